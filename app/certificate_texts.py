"""A certificate of speculation in words, for the command line and the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backend.experiments.certificate import Verdict


def figures(verdict: Verdict) -> list[tuple[str, str]]:
    """What a person looks at first, each with its name."""
    sampled, greedy = verdict.sampled, verdict.greedy
    differing = [each for each in greedy if each.divergence is not None]
    excused = sum(each.excused for each in differing)
    origins = ", ".join(f"{count:,} {name}" for name, count in sorted(verdict.sampled_origins.items()))
    return [
        ("prompts with equal greedy tokens", f"{len(greedy) - len(differing)} of {len(greedy)}"),
        ("differing at two logits that are as good as equal", f"{excused} of {len(differing)}"),
        ("samples by each", f"{sampled.num_samples:,}"),
        ("χ² (degrees of freedom)", f"{sampled.chi2:.1f} ({sampled.degrees_of_freedom:,})"),
        ("p", f"{sampled.p_value:.2g}"),
        ("total variation (limit)", f"{sampled.total_variation:.4f} ({sampled.total_variation_limit:.4f})"),
        ("compared tokens of speculation", origins),
    ]
