"""Row tiles of one product shared out over as many threads as torch uses."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

# Multiply-adds below which waking a thread takes longer than it saves.
_LEAST_WORK = 4_000_000
_CHUNKS_PER_THREAD = 4
_TILES_AT_ONCE = 4  # which kernels take for one token


def over_tiles(run: Callable[[int, int], None], num_tiles: int, work: int) -> None:
    """Call `run(first, end)` for parts of `range(num_tiles)`, at once where that is worth it.

    Threads take the next part when they are done with one, and the calling thread waits for none that has not begun: on a
    machine that is busy otherwise it does most of the work itself.

    Args:
        run: releases the interpreter's lock while it computes.
        work: multiply-adds of all tiles.
    """
    threads = min(torch.get_num_threads(), num_tiles, work // _LEAST_WORK + 1)
    if threads == 1:
        run(0, num_tiles)
        return
    step = -(-num_tiles // (threads * _CHUNKS_PER_THREAD * _TILES_AT_ONCE)) * _TILES_AT_ONCE
    parts = iter([(first, min(first + step, num_tiles)) for first in range(0, num_tiles, step)])

    def take_parts() -> None:
        for first, end in parts:
            run(first, end)

    others = [_pool(threads - 1).submit(take_parts) for _ in range(threads - 1)]
    take_parts()
    for other in others:
        if not other.cancel():
            other.result()


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="cpu-kernel")
