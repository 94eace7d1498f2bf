"""What stands for CUDA graphs where there is no card: the operations of a capture are recorded, and a replay does them again.

As strict as the card: what a replay reads are the tensors that the capture saw, whatever Python holds by then; a capture asks for
no value, and takes nothing from the host; and what it made and did not hand out is garbage behind every replay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.attention.reference import ReferenceAttention
from backend.config import EngineConfig
from backend.core import scheduler_factory
from backend.core.scheduler import Scheduler
from backend.engine import llm_engine
from backend.layers.linear import Linear
from backend.worker.model_runner import ModelRunner
from kernels.reference import (
    decode_positions,
    draft_positions,
    greedy_tokens,
    next_draws,
    record_tokens,
    sample_tokens,
)
from tests.interpreter import interpret_without_cuda

interpret_without_cuda()

from backend.worker import (  # noqa: E402
    decode_graphs,
    draw_graphs,
    graph_sizes,
    mixed_graphs,
    observe_graphs,
    round_graphs,
    tree_graphs,
)

T = TypeVar("T")
WAITS = ("_local_scalar_dense", "nonzero", "equal", "item", "is_nonzero", "masked_select", "unique")
GARBAGE = 2**30 + 12345  # as an index it raises


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any], Any]] = []  # the last: its result
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        assert name not in WAITS, f"a capture waits for the device: {name}"
        result = func(*args, **kwargs)
        given = _tensors([*args, *kwargs.values()])
        taken = {tensor.untyped_storage().data_ptr() for tensor in given if tensor.numel()}
        fresh = [it for it in _tensors(result) if it.numel() and it.untyped_storage().data_ptr() not in taken]
        if func._schema.is_mutable or fresh:
            self.calls.append((func, args, kwargs, None if func._schema.is_mutable else result))
            self.made += fresh
        return result


class RecordedGraph:
    """A `torch.cuda.CUDAGraph`."""

    def __init__(self, recorder: _Recorder, output: Any) -> None:
        self._calls = recorder.calls
        handed_out = {tensor.untyped_storage().data_ptr() for tensor in _tensors(output)}
        self._garbage = [
            (it, _garbage_of(it)) for it in recorder.made if it.untyped_storage().data_ptr() not in handed_out
        ]
        self._output = output  # keeps it apart from all that is made later
        for tensor in recorder.made:
            _spoil(tensor)

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, output in self._calls:
                result = func(*args, **kwargs)
                if isinstance(output, Tensor):  # most
                    output.copy_(result)
                elif output is not None:
                    for tensor, value in zip(_tensors(output), _tensors(result), strict=True):
                        tensor.copy_(value)
            for tensor, value in self._garbage:
                tensor.fill_(value)


class RepeatedGraph:
    """A `torch.cuda.CUDAGraph` that is less strict, and so can hold kernels: it runs all of a capture anew."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run, self._output = run, run()
        for tensor in _tensors(self._output):
            _spoil(tensor)

    @property
    def output(self) -> Any:
        return self._output

    def replay(self) -> None:
        with torch.inference_mode():
            for tensor, value in zip(_tensors(self._output), list(_tensors(self._run())), strict=True):
                tensor.copy_(value)


class CountedGraph:
    """One of them that counts its replays. It refers to itself nowhere: its memory is free as soon as its engine is gone."""

    def __init__(self, graph: RecordedGraph | RepeatedGraph, replays: Counter[str], name: str) -> None:
        self._graph, self._replays, self._name = graph, replays, name

    def replay(self) -> None:
        self._replays[self._name] += 1
        self._graph.replay()


class GraphAttention(ReferenceAttention):
    """Attention as a graph can hold it: over the whole width of the table, whatever the lengths are."""

    def forward(self, query: Tensor, layer_cache: LayerCache, metadata: AttentionMetadata, scale: float) -> Tensor:
        num_tokens, num_heads = query.shape[:2]
        tokens = torch.arange(num_tokens)
        starts, seq_lens = metadata.query_start_loc.long(), metadata.seq_lens.long()
        reqs = (starts[1:, None] <= tokens).sum(0).clamp(max=len(seq_lens) - 1)
        positions = seq_lens[reqs] - starts[reqs + 1] + tokens
        keys, values = (self._gather(layer_cache, name, metadata.block_table) for name in ("key", "value"))
        group = num_heads // keys.shape[2]
        keys, values = (it[reqs].repeat_interleave(group, dim=2) for it in (keys, values))
        places = torch.arange(keys.shape[1])
        seen = places <= positions[:, None]
        standing = (
            places  # where the token of a place stands, which of a node is as deep as those that are seen with it
        )
        if metadata.tree_mask is not None and metadata.tree_starts is not None:
            begins, masks = metadata.tree_starts.long()[reqs, None], metadata.tree_mask[:, None]
            is_node = (masks != -1) & (places >= begins)
            bits = masks >> (places - begins).clamp(0, 63) & 1
            seen = torch.where(is_node, (bits != 0) & (places < begins + 64), seen)
            standing = torch.where(is_node, begins - 1 + (seen & is_node).cumsum(1), places)
            positions = torch.where(masks[:, 0] != -1, (standing * seen).amax(1), positions)
        if layer_cache.window is not None:
            seen &= standing > positions[:, None] - layer_cache.window
        scores = torch.einsum("thd,tlhd->thl", query.float(), keys.float()) * scale
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num()
        return torch.einsum("thl,tlhd->thd", weights, values.float()).to(query.dtype)

    def _gather(self, layer_cache: LayerCache, name: str, block_table: Tensor) -> Tensor:
        """float [num_reqs, num_places, num_kv_heads, head_dim]."""
        data, scales = getattr(layer_cache, f"{name}_cache"), getattr(layer_cache, f"{name}_scales")
        assert scales is None
        return data[block_table.long()].flatten(1, 2)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _spoil(tensor: Tensor) -> None:
    tensor.fill_(_garbage_of(tensor))


def _garbage_of(tensor: Tensor) -> float:
    if tensor.dtype == torch.bool:
        return True
    return torch.nan if tensor.is_floating_point() else min(GARBAGE, torch.iinfo(tensor.dtype).max)


@contextmanager
def recorded_graphs(*, on_kernels: bool = False) -> Iterator[Counter[str]]:
    """Engines that are loaded within have such graphs, of few sizes; how often those of each module were replayed.

    Args:
        on_kernels: they are for the Triton kernels, through the interpreter, and only repeated.
    """
    replays: Counter[str] = Counter()

    def capture_in(name: str) -> Callable[..., Any]:
        def capture(run: Callable[[], T], pool: object, device: torch.device) -> tuple[Any, T]:
            if on_kernels or name == "draw_graphs":  # whose reference goes by what it reads
                graph = RepeatedGraph(run)
                return CountedGraph(graph, replays, name), graph.output
            run()
            recorder = _Recorder()
            with pytest.MonkeyPatch.context() as patch, recorder:
                for function in ("from_numpy", "tensor", "as_tensor"):
                    patch.setattr(torch, function, _refuse)
                output = run()
            return CountedGraph(RecordedGraph(recorder, output), replays, name), output

        return capture

    def capture_cuda_graphs(runner: ModelRunner, *args: Any) -> None:
        runner._config = runner._config.with_overrides({"kernels.enforce_eager": False})
        capture_all(runner, *args)

    def make_scheduler(config: EngineConfig, *args: Any) -> Scheduler:
        return scheduler_factory.make_scheduler(config.with_overrides({"kernels.enforce_eager": False}), *args)

    capture_all = ModelRunner.capture_cuda_graphs
    with pytest.MonkeyPatch.context() as patch:
        for module in (decode_graphs, draw_graphs, mixed_graphs, observe_graphs, round_graphs, tree_graphs):
            patch.setattr(module, "capture_graph", capture_in(module.__name__.rsplit(".", 1)[1]))
        if not on_kernels:
            for module in (decode_graphs, draw_graphs, mixed_graphs):
                patch.setattr(module, "record_tokens", record_tokens.record_tokens)
            for module in (decode_graphs, mixed_graphs):
                patch.setattr(module, "greedy_tokens", greedy_tokens.greedy_tokens)
            patch.setattr(draw_graphs, "next_draws", next_draws.next_draws)
            patch.setattr(draw_graphs, "sample_tokens", sample_tokens.sample_tokens)
            patch.setattr(decode_graphs, "decode_positions", decode_positions.decode_positions)
            patch.setattr(round_graphs, "draft_positions", draft_positions.draft_positions)
            patch.setattr("backend.worker.decoders.ReferenceAttention", GraphAttention)
        patch.setattr(decode_graphs, "SIZES", () if on_kernels else (1, 4))
        patch.setattr(round_graphs, "SIZES", (2,) if on_kernels else (1, 2, 8))
        patch.setattr(tree_graphs, "SIZES", (2,) if on_kernels else (2, 8))
        patch.setattr(graph_sizes, "SIZES", (16,) if on_kernels else (16, 32, 128))
        patch.setattr(Linear, "prepare", lambda self: None)  # weights as a card has them, not laid out for a CPU
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        patch.setattr(ModelRunner, "capture_cuda_graphs", capture_cuda_graphs)
        patch.setattr(llm_engine, "make_scheduler", make_scheduler)
        yield replays


def _refuse(*args: Any, **kwargs: Any) -> Tensor:
    raise AssertionError("a capture takes something from the host")
