"""The stand-ins for CUDA graphs refuse what a card would do wrong without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.worker.recorded_graphs import recorded_graphs

CPU = torch.device("cpu")
Capture = Callable[..., tuple[torch.cuda.CUDAGraph, Tensor]]


@pytest.fixture
def capture() -> Iterator[Capture]:
    with recorded_graphs():
        from backend.worker import round_graphs

        yield lambda run: round_graphs.capture_graph(run, None, CPU)  # type: ignore[arg-type]


def test_a_replay_reads_its_inputs_and_leaves_its_output_where_they_were(capture: Capture) -> None:
    given, kept = torch.tensor([1.0, 2.0]), torch.zeros(2)
    graph, output = capture(lambda: kept.copy_(2 * given) + torch.arange(2))
    for values in ([3.0, 4.0], [5.0, 6.0]):
        given.copy_(torch.tensor(values))
        graph.replay()
        assert kept.tolist() == [2 * value for value in values]
        assert output.tolist() == [kept[0].item(), kept[1].item() + 1]


def test_what_python_holds_later_makes_no_difference(capture: Capture) -> None:
    holder = [torch.tensor([1.0]), 10]
    graph, output = capture(lambda: holder[0] * holder[1])
    holder[:] = [torch.tensor([2.0]), 20]
    graph.replay()
    assert output.item() == 10


def test_what_is_not_handed_out_is_garbage_behind_a_replay_and_so_is_all_before_the_first(capture: Capture) -> None:
    inner: list[Tensor] = []

    def run() -> Tensor:
        inner[:] = [torch.ones(1) + 1]
        return inner[0] * 2

    graph, output = capture(run)
    assert output.isnan().all()
    graph.replay()
    assert output.item() == 4
    assert inner[0].isnan().all()


@pytest.mark.parametrize(
    "run",
    [lambda: torch.ones(1) * torch.ones(1).item(), lambda: torch.ones(3).nonzero(), lambda: torch.tensor([1.0])],
    ids=["a value", "a number of values", "from the host"],
)
def test_a_capture_neither_waits_nor_takes_from_the_host(capture: Capture, run: Callable[[], Tensor]) -> None:
    with pytest.raises(AssertionError, match="a capture"):
        capture(run)
