"""A certificate of speculation in words, for the command line and the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.experiments.certificate_greedy import token_name

if TYPE_CHECKING:
    from backend.experiments.certificate import Verdict


def figures(verdict: Verdict) -> list[tuple[str, str]]:
    """What a person looks at first, each with its name."""
    sampled, greedy = verdict.sampled, verdict.greedy
    excused = sum(each.excused for of_one in greedy for each in of_one.divergences)
    bound = verdict.logit_gap_bound
    num_checked, num_forced = sum(each.num_checked for each in greedy), sum(each.num_forced for each in greedy)
    num_tokens = sum(each.num_tokens for each in greedy)
    origins = ", ".join(f"{count:,} {name}" for name, count in sorted(verdict.sampled_origins.items()))
    return [
        ("prompts with equal greedy tokens", f"{sum(not each.divergences for each in greedy)} of {len(greedy)}"),
        (
            "greedy tokens that differ and are excused",
            "none may differ" if bound is None else f"{excused:,} (logits closer than {bound:g})",
        ),
        ("greedy tokens checked", f"{num_checked:,} of {num_tokens:,}"),
        ("of these, from a difference on, teacher forced", f"{num_forced:,}"),
        ("samples by each", f"{sampled.num_samples:,}"),
        ("χ² (degrees of freedom)", f"{sampled.chi2:.1f} ({sampled.degrees_of_freedom:,})"),
        ("p", f"{sampled.p_value:.2g}"),
        ("total variation (limit)", f"{sampled.total_variation:.4f} ({sampled.total_variation_limit:.4f})"),
        ("compared tokens of speculation", origins),
    ]


EXCUSED_HEADERS = ("Prompt", "Output position", "Plain", "Speculation", "Logits below the best")


def excused_rows(verdict: Verdict) -> list[tuple[str, str, str, str, str]]:
    """Of each greedy token that differs and is excused: prompt, position, choice of plain decoding, of speculation, and gap."""
    return [
        (
            str(greedy.prompt),
            str(each.position),
            token_name(each.plain_token_id),
            token_name(each.token_id),
            f"{each.logit_gap:.3g}",
        )
        for greedy in verdict.greedy
        for each in greedy.divergences
        if each.excused and each.logit_gap is not None
    ]
