"""Which graph a step of chunks takes, if any."""

from __future__ import annotations

import pytest

from backend.worker.graph_sizes import choose_size, mixed_sizes


@pytest.mark.parametrize("budget", [1, 40, 64, 100, 1024, 2000, 5000, 8192, 100_000])
@pytest.mark.parametrize("launch_bound", [False, True])
def test_sizes_rise_and_keep_to_the_budget(budget: int, launch_bound: bool) -> None:
    sizes = mixed_sizes(budget, launch_bound)
    assert sizes == sorted(set(sizes))
    assert all(1 <= size <= budget for size in sizes)


@pytest.mark.parametrize("budget", [1, 40, 64, 2000, 8192])
def test_every_step_of_a_launch_bound_model_has_a_graph(budget: int) -> None:
    sizes = mixed_sizes(budget, launch_bound=True)
    for num_tokens in range(1, budget + 1):
        size = choose_size(sizes, num_tokens, launch_bound=True)
        assert size is not None
        assert size >= num_tokens
        assert not [other for other in sizes if num_tokens <= other < size], "the smallest that holds them"


def test_a_large_step_of_another_model_is_padded_by_an_eighth_at_most() -> None:
    sizes = mixed_sizes(8192, launch_bound=False)
    chosen = {num_tokens: choose_size(sizes, num_tokens, launch_bound=False) for num_tokens in range(1, 8193)}
    assert all(chosen[num_tokens] is not None for num_tokens in range(1, 1025))
    assert {size for num_tokens, size in chosen.items() if num_tokens > 1024} == {None, 2048}
    assert [num_tokens for num_tokens, size in chosen.items() if size == 2048] == list(range(1792, 2049))
