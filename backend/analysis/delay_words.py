"""A request's delays as sentences: what most of the time to its first token went by with, and of its longest gap."""

from __future__ import annotations

from collections.abc import Callable

from backend.analysis.request_delay import Cause, Delay, Part

Duration = Callable[[float], str]  # seconds -> text with its unit

_DOING: dict[Cause, str] = {
    "queued": "in the queue",
    "prefill": "on computing its prompt",
    "decode": "on decode steps without anybody's prompt",
    "decode_beside_prompts": "on decode steps that also ran prompts of other requests",
    "recompute": "on computing again what had not been kept",
    "stalled": "while it had its slot and steps ran without it",
    "preempted": "preempted, without its blocks",
    "swapped": "with its blocks outside the pool",
}
_SHORT: dict[Cause, str] = {
    "queued": "in the queue",
    "prefill": "on its prompt",
    "decode": "on decode steps",
    "decode_beside_prompts": "on decode steps beside prompts",
    "recompute": "on recomputation",
    "stalled": "left out of steps",
    "preempted": "preempted",
    "swapped": "swapped out",
}
_WORTH_NAMING = 0.005  # of a delay: below it is the moment between a delivery and the next step
_WAITING: frozenset[Cause] = frozenset({"queued", "stalled", "preempted", "swapped"})


def ttft_sentences(delay: Delay, duration: Duration) -> list[str]:
    """What the time from arrival to first token (TTFT) went by with. Plain text."""
    return [f"The first token came {duration(delay.seconds)} after the arrival (TTFT).", *_causes(delay, duration)]


def gap_sentences(delay: Delay, delivery: int, median_s: float, duration: Duration) -> list[str]:
    """What the longest time between two deliveries went by with. Plain text.

    Args:
        delivery: the one that ended it, counted from 1.
        median_s: of all gaps of the request.
    """
    times = f", ×{delay.seconds / median_s:.3g} of its median gap" if median_s > 0 else ""
    first = f"The longest gap between tokens, {duration(delay.seconds)}{times}, ended with delivery {delivery:,}."
    return [first, *_causes(delay, duration)]


def _causes(delay: Delay, duration: Duration) -> list[str]:
    if not delay.parts or delay.seconds <= 0:
        return []
    largest, *others = delay.parts
    share = largest.seconds / delay.seconds
    others = [part for part in others if part.seconds >= _WORTH_NAMING * delay.seconds]
    if not others:
        amount = "All of it went by"
    else:
        part = "Most of it" if share > 0.5 else "The largest part of it"
        amount = f"{part}, {duration(largest.seconds)} ({share * 100:.0f} %), went by"
    sentences = [f"{amount} {_DOING[largest.cause]}{_meanwhile(largest)}."]
    if others:
        rest = [f"{duration(part.seconds)} {_SHORT[part.cause]}" for part in others]
        sentences.append(f"The rest: {', '.join(rest)}.")
    return sentences


def _meanwhile(part: Part) -> str:
    """What ran in those steps."""
    if not part.num_steps:
        return ""
    tokens = [
        _count(number, kind)
        for number, kind in ((part.others_prompt_tokens, "prompt token"), (part.others_decode_tokens, "decode token"))
        if number
    ]
    steps = _count(part.num_steps, "step")
    if part.cause in _WAITING:
        return f"; the {steps} that began meanwhile ran {' and '.join(tokens)}" if tokens else ""
    others = f" beside {' and '.join(tokens)} of other requests" if tokens else ", alone"
    return f": {steps} ran {part.own_tokens:,} of its tokens{others}"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
