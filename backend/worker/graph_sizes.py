"""How many tokens the mixed graphs hold: `mixed_sizes`."""

from __future__ import annotations

# Steps beyond the first tuple take longer on the device than to launch, unless the model is small.
SIZES = (64, 128, 256, 384, 512, 768, 1024)
LARGE_SIZES = (1536, 2048, 3072, 4096, 6144, 8192)
PROMPT_SIZE = 2048  # where a prompt that comes alone still waits for its first launches
MAX_PADDING = 1 / 8  # of a large graph, where padding costs device time that the step would not


def mixed_sizes(max_num_tokens: int, launch_bound: bool) -> list[int]:
    """Sizes to capture, ascending.

    Args:
        max_num_tokens: token budget of a step; a launch-bound model has a graph of that size too, up to the largest here.
        launch_bound: whether a step of any size takes longer to launch than to compute.
    """
    if not launch_bound:
        return [size for size in (*SIZES, PROMPT_SIZE) if size <= max_num_tokens]
    largest = min(max_num_tokens, LARGE_SIZES[-1])
    return [*(size for size in (*SIZES, *LARGE_SIZES) if size < largest), largest]


def choose_size(sizes: list[int], num_tokens: int, launch_bound: bool) -> int | None:
    """The graph for so many tokens; None where the step is better, or can only be, launched op by op."""
    size = next((size for size in sizes if size >= num_tokens), None)
    if size is None or launch_bound or size <= SIZES[-1] or size - num_tokens <= MAX_PADDING * size:
        return size
    return None
