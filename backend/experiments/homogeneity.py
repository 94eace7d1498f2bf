"""Whether two samples of token sequences come from one distribution: Pearson's χ² test of homogeneity, and total variation.

Sequences that are too rare for a cell of their own are pooled by their beginnings: those of one beginning, then of all that are
left of a shorter one. How cells are pooled depends on both samples together and not on which is which, so that under the
hypothesis the split of a cell's sequences between the two stays a matter of chance. No torch at module level.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backend.errors import ConfigError

MIN_EXPECTATION = 5  # of a cell, in each sample

Tokens = tuple[int, ...]
Cell = tuple[int, int]  # how many sequences of the first sample are in it, and of the second


@dataclass(frozen=True, slots=True)
class Homogeneity:
    """Two samples of the same size, beside each other.

    Attributes:
        num_samples: of each.
        num_cells: after pooling.
        chi2: of all strata together, as `degrees_of_freedom`.
        p_value: of so large a χ² under the hypothesis.
        total_variation: half the sum of the differences of shares, over the pooled cells.
        total_variation_limit: what it exceeds with at most half the significance under the hypothesis.
        significance: chance that the hypothesis is rejected although it holds; half of it is each test's.
    """

    num_samples: int
    num_cells: int
    chi2: float
    degrees_of_freedom: int
    p_value: float
    total_variation: float
    total_variation_limit: float
    significance: float

    @property
    def rejections(self) -> list[str]:
        """Why the samples are not of one distribution, a sentence each; none where nothing speaks against it."""
        found = []
        if self.p_value < self.significance / 2:
            found.append(
                f"χ² = {self.chi2:.1f} at {self.degrees_of_freedom:,} degrees of freedom has p = {self.p_value:.1e}, "
                f"below {self.significance / 2:g}"
            )
        if self.total_variation > self.total_variation_limit:
            found.append(
                f"the total variation is {self.total_variation:.4f}, above the {self.total_variation_limit:.4f} that chance "
                f"exceeds once in {2 / self.significance:,.0f} times"
            )
        return found


def compare_samples(
    strata: Sequence[tuple[Sequence[Tokens], Sequence[Tokens]]], significance: float = 1e-4
) -> Homogeneity:
    """Test that in every stratum both samples have one distribution.

    Args:
        strata: pairs of samples of the same size, such as those of one prompt.
        significance: of both tests together.
    Raises:
        ConfigError: a stratum's samples differ in size or have fewer than 10 sequences, or there is no stratum.
    """
    for first, second in strata:
        if len(first) != len(second):
            raise ConfigError(
                f"samples of {len(first):,} and {len(second):,} sequences cannot be compared; sizes are equal"
            )
        if len(first) < 2 * MIN_EXPECTATION:
            raise ConfigError(f"{len(first)} sequences are too few to compare; {2 * MIN_EXPECTATION} are the least")
    if not strata:
        raise ConfigError("there is nothing to compare: no prompt was sampled")
    num_samples = sum(len(first) for first, _ in strata)
    cells = [pool_cells(*pair) for pair in strata]
    chi2 = math.fsum((a - b) ** 2 / (a + b) for stratum in cells for a, b in stratum)
    degrees = sum(len(stratum) - 1 for stratum in cells)
    distance = sum(abs(a - b) for stratum in cells for a, b in stratum) / 2 / num_samples
    # The mean of |a - b| is at most its standard deviation, that of a hypergeometric count. Above the mean: a sequence moves
    # the total variation by 1 / n at most, so that by McDiarmid's inequality (1989) t is exceeded with exp(-n t²).
    chance = 0.0
    for (first, _), stratum in zip(strata, cells, strict=True):
        total = 2 * len(first)
        chance += sum(math.sqrt((a + b) * (total - a - b) / (total - 1)) for a, b in stratum) / 2 / num_samples
    limit = chance + math.sqrt(math.log(2 / significance) / num_samples)
    return Homogeneity(
        num_samples=num_samples,
        num_cells=sum(map(len, cells)),
        chi2=chi2,
        degrees_of_freedom=degrees,
        p_value=chi2_tail(chi2, degrees),
        total_variation=distance,
        total_variation_limit=limit,
        significance=significance,
    )


def pool_cells(first: Iterable[Tokens], second: Iterable[Tokens]) -> list[Cell]:
    """Counts of both samples, of the same size, in cells in which 5 of each are expected under the hypothesis.

    All sequences have one length. What is left at the end, if it is too little for a cell, goes into the smallest.
    """
    counts = (Counter(first), Counter(second))
    level = {tokens: (counts[0][tokens], counts[1][tokens]) for tokens in counts[0].keys() | counts[1].keys()}
    cells: list[Cell] = []
    while True:
        rare: defaultdict[Tokens, list[Cell]] = defaultdict(list)
        for tokens, cell in level.items():
            if sum(cell) >= 2 * MIN_EXPECTATION:
                cells.append(cell)
            else:
                rare[tokens[:-1]].append(cell)
        if not rare or () in level:
            break
        level = {tokens: _sum(parts) for tokens, parts in rare.items()}
    rest = _sum(cell for parts in rare.values() for cell in parts)
    if not sum(rest):
        return sorted(cells)
    if cells:
        cells.sort(key=sum)
        rest = _sum((rest, cells.pop(0)))
    return sorted([*cells, rest])


def chi2_tail(chi2: float, degrees_of_freedom: int) -> float:
    """Chance of a χ² as large as this or larger; 1 without a degree of freedom."""
    import torch

    if degrees_of_freedom == 0:
        return 1.0
    half = torch.tensor([degrees_of_freedom / 2, chi2 / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _sum(cells: Iterable[Cell]) -> Cell:
    first = second = 0
    for a, b in cells:
        first, second = first + a, second + b
    return first, second
