"""How the engine's thread shares the interpreter and its garbage collector with the pages."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

# Beside a thread that computes without a pause, a loop of 0.5 ms that lets go four times takes 19 ms with the usual 5 ms, 3.1
# with 0.5 ms, 1.4 with 0.1 ms and 1.1 with 0.05 ms, where the other thread has lost a third of its own speed.
STEPPING_SWITCH_INTERVAL_S = 0.0001
STEPPING_GC_THRESHOLD = 5000


def freeze_objects() -> None:
    """Take what lives now out of later collections, each of which would walk it and hold up a step for a tenth of a second."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@contextmanager
def stepping() -> Iterator[None]:
    """How the interpreter is shared while steps run.

    A thread that computes gives it up after 0.1 ms. The usual 5 ms are paid whenever the step loop has let go of it, as in
    most tensor operations: a page that is drawn or a recorder that writes beside it then makes steps several times as long.

    Young objects are not looked through before there are more of them than a step makes and drops: with the usual 700, a
    step of some 200 requests would start a collection each time, and every hundredth a full one.
    """
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(STEPPING_SWITCH_INTERVAL_S)
    gc.set_threshold(STEPPING_GC_THRESHOLD, *thresholds[1:])
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)


def clear_frames(error: BaseException) -> None:
    """Drop the local variables that a failed load left in its traceback: whoever keeps the error would keep the weights."""
    chained: BaseException | None = error
    while chained is not None:
        traceback.clear_frames(chained.__traceback__)
        chained = chained.__cause__ or chained.__context__
