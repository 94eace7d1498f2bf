"""Static against continuous batching, exactly, from the lengths alone (Yu et al. 2022, Orca: iteration-level scheduling).

A step runs every occupied slot once, and takes the same time however many there are. So a request occupies its slot for one
step per output token, the first of which its last piece of prompt gives, and for one step per piece of prompt before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace


@dataclass(frozen=True, slots=True)
class Schedule:
    """When each request has which slot, and what that leaves idle. Steps count from 0; ends are exclusive."""

    num_slots: int
    slots: tuple[int, ...]  # one per request, in the order given; so the next two
    first_steps: tuple[int, ...]
    end_steps: tuple[int, ...]
    num_steps: int
    used_slot_steps: int  # a request ran
    arithmetic: str

    @property
    def slot_steps(self) -> int:
        return self.num_steps * self.num_slots

    @property
    def idle_slot_steps(self) -> int:
        return self.slot_steps - self.used_slot_steps

    @property
    def idle_slot_share(self) -> float:
        """Of all slot-steps, 0…1."""
        return self.idle_slot_steps / self.slot_steps


@dataclass(frozen=True, slots=True)
class BatchingComparison:
    static: Schedule
    continuous: Schedule
    least_steps: int  # no schedule has fewer: the slots' even share, or the longest request
    arithmetic: str

    @property
    def throughput_ratio(self) -> float:
        """Output tokens per step of continuous over static batching."""
        return self.static.num_steps / self.continuous.num_steps


def compare_batching(
    output_lens: Sequence[int],
    num_slots: int,
    *,
    prompt_lens: Sequence[int] | None = None,
    prefill_chunk: int | None = None,
) -> BatchingComparison:
    """Run the same requests, all waiting at the start, in the order given, both ways. O(n log num_slots).

    Static: batches of `num_slots` requests in order, each as long as its longest member. Continuous: a slot that is freed
    takes the next request in the step after; of slots freed together the lowest takes the first.

    Args:
        output_lens: tokens, one per request.
        num_slots: requests that run at once.
        prompt_lens: tokens, one per request; they cost steps only where `prefill_chunk` cuts them.
        prefill_chunk: prompt tokens that a slot computes in a step; None computes a whole prompt in one.

    Raises:
        ValueError: no request, a length, `num_slots` or `prefill_chunk` below 1, lists of unequal length, or
            `prefill_chunk` without `prompt_lens`.
    """
    steps = _steps_of_requests(output_lens, prompt_lens, prefill_chunk)
    if num_slots < 1:
        raise ValueError(f"num_slots {num_slots} is below 1")
    static, continuous = _static(steps, num_slots), _continuous(steps, num_slots)
    least = max(-(-sum(steps) // num_slots), max(steps))
    ratio = f"{static.num_steps:,} / {continuous.num_steps:,} steps = ×{static.num_steps / continuous.num_steps:.2f}"
    return BatchingComparison(static, continuous, least, ratio)


def _steps_of_requests(
    output_lens: Sequence[int], prompt_lens: Sequence[int] | None, prefill_chunk: int | None
) -> list[int]:
    if not output_lens:
        raise ValueError("output_lens names no request")
    for name, lengths in (("output_lens", output_lens), ("prompt_lens", prompt_lens or ())):
        if any(length < 1 for length in lengths):
            raise ValueError(f"{name} holds {min(lengths)}, and a request has at least 1 token")
    if prompt_lens is not None and len(prompt_lens) != len(output_lens):
        raise ValueError(f"prompt_lens has {len(prompt_lens)} entries and output_lens {len(output_lens)}")
    if prefill_chunk is None:
        return list(output_lens)
    if prompt_lens is None:
        raise ValueError(f"prefill_chunk {prefill_chunk} is set without prompt_lens")
    if prefill_chunk < 1:
        raise ValueError(f"prefill_chunk {prefill_chunk} is below 1")
    return [output - 1 + -(-prompt // prefill_chunk) for output, prompt in zip(output_lens, prompt_lens, strict=True)]


def _static(steps: list[int], num_slots: int) -> Schedule:
    firsts: list[int] = []
    start = 0
    for index in range(0, len(steps), num_slots):
        batch = steps[index : index + num_slots]
        firsts += [start] * len(batch)
        start += max(batch)
    return _schedule(num_slots, steps, [index % num_slots for index in range(len(steps))], firsts, start)


def _continuous(steps: list[int], num_slots: int) -> Schedule:
    free_at = [(0, slot) for slot in range(num_slots)]
    heapify(free_at)
    slots, firsts = [], []
    for length in steps:
        first, slot = free_at[0]
        slots.append(slot)
        firsts.append(first)
        heapreplace(free_at, (first + length, slot))
    return _schedule(num_slots, steps, slots, firsts, max(free_at)[0])


def _schedule(num_slots: int, steps: list[int], slots: list[int], firsts: list[int], num_steps: int) -> Schedule:
    used, available = sum(steps), num_steps * num_slots
    return Schedule(
        num_slots=num_slots,
        slots=tuple(slots),
        first_steps=tuple(firsts),
        end_steps=tuple(first + length for first, length in zip(firsts, steps, strict=True)),
        num_steps=num_steps,
        used_slot_steps=used,
        arithmetic=f"{num_steps:,} steps × {num_slots:,} slots − {used:,} used = {available - used:,} idle "
        f"({(available - used) / available:.1%})",
    )
