"""`DraftModelRunner`: a `ModelRunner` with a draft model beside the target, or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from backend.attention.metadata import LayerCache
from backend.core.draft_cost import SMALL_ON_CUDA, DraftCost
from backend.core.kv_format import KV_FORMATS
from backend.core.kv_groups import KVGroupSpec
from backend.core.speculation import HEAD_METHODS, LOOK_UP_METHODS
from backend.errors import CapacityError, ConfigError
from backend.models.decoder import Decoder
from backend.models.loader import LoadedModel, load_model
from backend.models.model_config import DecoderConfig
from backend.models.sources import ModelSource, resolve_source
from backend.spec_decode.first_layers import first_layers
from backend.worker.model_runner import ModelRunner
from backend.worker.out_of_memory import is_out_of_memory

# Of a round in CUDA graphs for which the device waits, in plain steps, and of each of its requests besides. On an H200 with
# SmolLM2-135M, whose steps take less than half a millisecond, it waits for the host, which hands out the tokens of a plain step
# while the next one runs: where nothing is found in a text, and where the host drafts.
SMALL_ROUND_COSTS = {"head": 0.05, "text": 0.6, "host": 1.1}
SMALL_REQUEST_COST = 0.06
# Of rounds that a head or a look-up on the device has found drafts for, measured there with 1 to 32 requests.
SMALL_FOUND_COSTS = {"head": 0.2, "text": 0.35, "host": None}
SMALL_DRAFT_SHARE = 0.6  # of what a head's share of the parameters would take, there
LARGE_ROUND_COST = 0.1  # of steps that take long enough not to wait for their launches


class DraftModelRunner(ModelRunner):
    """Loads the draft's weights, and gives its layers slots in the target's blocks."""

    def _let_go(self) -> None:
        super()._let_go()
        self._draft_model: Decoder | None = None
        self._draft_caches: list[LayerCache] = []  # none where the draft's are the target's

    def load_model(self, source: ModelSource, on_progress: Callable[[float, float], None] | None = None) -> LoadedModel:
        """Also the draft model, if there is one. Raises `ConfigError` for one whose layers have windows of their own."""
        loaded = super().load_model(source, on_progress)
        settings = self._config.speculative
        if settings.method == "draft_model":
            if settings.model is None:
                self._draft_model = first_layers(loaded.model)
            else:
                draft = load_model(resolve_source(settings.model), device=self._device, dtype=self._dtype)
                self._draft_model = draft.model
                self._groups_of_draft(draft.config)  # that they exist
                both = {"weights_bytes": loaded.weights_bytes + draft.weights_bytes}
                loaded = self._loaded = replace(loaded, **both)
        return loaded

    @property
    def kv_groups(self) -> list[KVGroupSpec]:
        draft = self._own_draft
        if draft is None:
            return super().kv_groups
        groups = super().kv_groups
        shape = (draft.num_layers, draft.num_kv_heads, draft.head_dim, self._dtype.itemsize)
        num_bytes = KVGroupSpec(*shape, format=groups[0].format).bytes_per_token
        return [replace(group, draft_bytes_per_token=num_bytes) for group in groups]

    def notices(self, max_model_len: int) -> tuple[str, ...]:
        """A sentence for each limit of the drafts that the target has not."""
        limit = self._draft_model.config.max_position_embeddings if self._draft_model else max_model_len
        if limit >= max_model_len:
            return ()
        return (
            f"speculation is off for requests of more than {limit:,} tokens: that is the draft model's context, and "
            f"{max_model_len:,} is the target's.",
        )

    @property
    def longest_draft(self) -> int | None:
        """Tokens that a draft can have at most; None: any number."""
        return None

    @property
    def cost(self) -> DraftCost:
        assert self._decoder is not None
        if self._config.kernels.enforce_eager:  # a plain step has no graph either
            return DraftCost(self.draft_cost, self._device.type)
        method = self._config.speculative.method
        drafter = "head" if method in HEAD_METHODS else "text" if method in LOOK_UP_METHODS else "host"
        if not self._decoder.launch_bound:
            found = None if drafter == "host" else LARGE_ROUND_COST
            return DraftCost(self.draft_cost, self._device.type, LARGE_ROUND_COST, found=found)
        return DraftCost(
            self.draft_cost * (SMALL_DRAFT_SHARE if drafter == "head" else 1.0),
            SMALL_ON_CUDA,
            SMALL_ROUND_COSTS[drafter],
            SMALL_REQUEST_COST,
            SMALL_FOUND_COSTS[drafter],
            only_in_graphs=True,
        )

    @property
    def draft_cost(self) -> float:
        """Of a drafted token, in steps of the target: the draft's share of its parameters."""
        draft = self._draft_model
        return draft.config.count_parameters() / self.loaded.config.count_parameters() if draft else 0.0

    @property
    def _own_draft(self) -> DecoderConfig | None:
        """The draft model that has keys and values of its own."""
        return self._draft_model.config if self._draft_model and self._config.speculative.model else None

    def _groups_of_draft(self, draft: DecoderConfig) -> list[int]:
        """For each layer of a draft model, the KV group in whose blocks it has its slots: one with the same window."""
        windows = [group.window for group in self.layer_groups]
        if missing := [window for window in draft.windows if window not in windows]:
            own, ours = (_windows_in_words(each) for each in (missing, windows))
            raise ConfigError(
                f"speculative.model = {self._config.speculative.model!r} has layers {own}, and the target's are all {ours}: "
                "they cannot share blocks; allowed are drafts with the target's windows, or none named"
            )
        return [windows.index(window) for window in draft.windows]

    def _allocate_caches(self, num_blocks: int) -> None:
        super()._allocate_caches(num_blocks)
        draft = self._own_draft
        if draft is None:
            return
        sizes = (num_blocks, self._config.cache.block_size, draft.num_kv_heads, draft.head_dim)
        kv_format = KV_FORMATS[self._config.cache.dtype]
        try:
            self._draft_caches = [
                replace(LayerCache.zeros(*sizes, self._dtype, self._device, kv_format), group=group, window=window)
                for group, window in zip(self._groups_of_draft(draft), draft.windows, strict=True)
            ]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise CapacityError(
                f"the draft model's keys and values of {num_blocks:,} blocks do not fit the GPU beside the target's; lower "
                "cache.num_blocks or cache.gpu_memory_utilization"
            ) from error

    @property
    def _all_caches(self) -> list[LayerCache]:
        return [*self._layer_caches, *self._draft_caches]


def _windows_in_words(windows: list[int | None]) -> str:
    words = ["without a window" if window is None else f"with a window of {window:,} tokens" for window in windows]
    return " and ".join(dict.fromkeys(words))
