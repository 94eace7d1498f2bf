"""What plain decoding says of each token of a given text, and how close is too close for it to tell. No torch at module level."""

from __future__ import annotations

from collections.abc import Sequence

from backend.experiments.certificate_config import CertificateConfig
from backend.experiments.certificate_greedy import NO_TOKEN, Choice
from backend.experiments.text_pass import ROWS, TextModel, load_text_model
from backend.models.sources import resolve_source

# Logits, by the dtype that a model computes in: two that lie closer may change places with the order of sums, which the number of
# tokens of a step decides. Of 245 greedy tokens of SmolLM2-135M, run one by one and then all at once, the gap of the two best
# logits moved by up to 6e-5, 0.03 and 0.38. Bfloat16 is that coarse because its hidden states carry 8 bits: logits around 40, as
# there, are told apart by a quarter at best. Activations or KV in fewer bits than that move more, and are not excused for it.
LOGIT_GAP_BOUNDS = {"float32": 1e-3, "float16": 0.0625, "bfloat16": 0.5}


class PlainTeacher:
    """A `Teacher`: the plain engine's model, which is loaded when first asked.

    Args:
        tokenizer_eos_token_ids: end texts, beside those of the model.
    """

    def __init__(self, config: CertificateConfig, tokenizer_eos_token_ids: frozenset[int]) -> None:
        self._config = config
        self._eos_token_ids = tokenizer_eos_token_ids
        self._model: TextModel | None = None

    def __call__(self, text: Sequence[int], token_ids: Sequence[int]) -> list[Choice]:
        """See `Teacher`; `text` and `token_ids` are not empty. Raises as `load_text_model`."""
        import torch

        if self._model is None:
            self._model = load_text_model(resolve_source(self._config.model), self._config.plain_engine)
        model = self._model
        ends = self._eos_token_ids | model.loaded.config.eos_token_ids
        inputs = [*text, *token_ids[:-1]]  # behind the last of `text`, and behind each token but the last one
        found: list[Choice] = []
        with torch.inference_mode():
            hidden = model.run(inputs, model.allocate(len(inputs)))[len(text) - 1 :]
            for rows in hidden.split(ROWS):
                logits = model.decoder.compute_logits(rows).float()
                best, best_ids = (each.tolist() for each in logits.max(dim=-1))
                for row, (highest, best_id) in enumerate(zip(best, best_ids, strict=True)):
                    token_id = token_ids[len(found)]
                    asked = sorted(ends) if token_id == NO_TOKEN else [token_id]
                    gap = highest - float(logits[row, asked].max())
                    found.append(Choice(NO_TOKEN if best_id in ends else best_id, gap))
        return found
