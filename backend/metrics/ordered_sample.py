"""Numbers kept in order as they come, so that a percentile of them costs the same however many there are."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import accumulate
from math import floor, inf

MAX_PIECE = 4096  # numbers in one piece; a longer one is cut in two


class OrderedSample:
    """Adding a number moves one piece at most; a percentile looks a few numbers up.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._pieces: list[array[float]] = [array("d")]
        self._largest: list[float] = [inf]  # of each piece, but for the last, which takes what is above the others
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, value: float) -> None:
        place = bisect_left(self._largest, value)
        piece = self._pieces[place]
        insort(piece, value)
        self._count += 1
        if len(piece) > MAX_PIECE:
            half = len(piece) // 2
            self._pieces[place : place + 1] = [piece[:half], piece[half:]]
            self._largest.insert(place, piece[half - 1])

    def percentiles(self, shares: Sequence[float], others: Sequence[float] = ()) -> list[float | None]:
        """Linearly interpolated percentiles of the sample and `others` together; None where both are empty.

        Args:
            shares: 0.5 is the median.
            others: ascending; they do not join the sample.
        """
        starts = [0, *accumulate(map(len, self._pieces))]
        return [self._percentile(share, others, starts) for share in shares]

    def _percentile(self, share: float, others: Sequence[float], starts: list[int]) -> float | None:
        last = self._count + len(others) - 1
        if last < 0:
            return None
        place = floor(share * last)
        low, high = (self._smallest(min(rank, last), others, starts) for rank in (place, place + 1))
        return low + (share * last - place) * (high - low)

    def _smallest(self, rank: int, others: Sequence[float], starts: list[int]) -> float:
        """The number of both that `rank` numbers come before: so many of `others`, found by halving, the rest of ours."""
        fewest, most = max(0, rank - self._count), min(rank, len(others))
        while fewest < most:
            middle = (fewest + most) // 2
            if others[middle] < self._at(rank - middle - 1, starts):
                fewest = middle + 1
            else:
                most = middle
        ours = rank - fewest
        return min(
            self._at(ours, starts) if ours < self._count else inf, others[fewest] if fewest < len(others) else inf
        )

    def _at(self, index: int, starts: list[int]) -> float:
        place = bisect_right(starts, index) - 1
        return self._pieces[place][index - starts[place]]
