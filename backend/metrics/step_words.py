"""A step of the ledger as sentences: what ran, and what became of KV blocks since the step before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from backend.core.output import StepKind
from backend.metrics.ledger_format import LedgerStep

MAX_NAMES = 6  # named in one sentence
MAX_ALIKE = 4  # sentences about what requests took

_RAN: dict[StepKind, str] = {
    "prefill": "of prompts",
    "decode": "of decoding",
    "recompute": "again, whose keys and values were not kept",
}


def step_sentences(step: LedgerStep, name: Callable[[str], str] = str) -> list[str]:
    """In the order of events, those of one kind together; what ran comes last, as it did. Plain text.

    Args:
        name: request id -> what stands behind "Request".
    """
    sentences: list[str] = []
    ended: dict[str, list[str]] = {"preempt": [], "swap_out": [], "free": []}
    found: dict[str, int] = {}
    forked: dict[str, int] = {}
    took: dict[str, int] = {}
    back: dict[str, int] = {}
    slid: dict[str, int] = {}
    given_back: dict[str, int] = {}
    counts: dict[str, int] = dict.fromkeys(("evict", "cache", "uncache", "copy", "swap_out"), 0)
    forgot_all = False
    for event in step.events:
        if event.kind in ended:
            assert event.request_id is not None
            ended[event.kind].append(event.request_id)
            counts["swap_out"] += len(event.block_ids)
        elif event.kind == "swap_in":
            assert event.request_id is not None
            back[event.request_id] = back.get(event.request_id, 0) + sum(map(bool, event.block_ids))
        elif event.kind in ("share", "allocate"):
            assert event.request_id is not None
            blocks = took if event.kind == "allocate" else forked if event.num_tokens else found
            blocks[event.request_id] = blocks.get(event.request_id, 0) + sum(map(bool, event.block_ids))
        elif event.kind == "copy":
            counts["copy"] += 1
        elif event.kind in ("slide", "give_back"):
            assert event.request_id is not None
            blocks = slid if event.kind == "slide" else given_back
            blocks[event.request_id] = blocks.get(event.request_id, 0) + len(event.block_ids)
        else:
            counts[event.kind] += len(event.block_ids)
            forgot_all |= event.kind == "uncache" and not event.block_ids
    if ended["preempt"]:
        sentences.append(
            f"{_requests(ended['preempt'], name)} {_was(len(ended['preempt']))} preempted and gave up all blocks."
        )
    if ended["swap_out"]:
        sentences.append(
            f"{_requests(ended['swap_out'], name)} {_was(len(ended['swap_out']))} preempted and left for host memory; "
            f"{_blocks(counts['swap_out'])} {_was(counts['swap_out'])} copied there."
        )
    if ended["free"]:
        sentences.append(f"{_requests(ended['free'], name)} gave back all blocks.")
    if slid:
        sentences.append(f"{_requests([*slid], name)} gave back {_blocks(sum(slid.values()))} behind the window.")
    if given_back:
        blocks = _blocks(sum(given_back.values()))
        sentences.append(f"{_requests([*given_back], name)} gave back {blocks} that only rejected drafts had reached.")
    if forgot_all:
        sentences.append("The prefix cache was emptied.")
    if counts["uncache"]:
        sentences.append(f"{_blocks(counts['uncache'])} left the prefix cache.")
    if counts["evict"]:
        sentences.append(f"{_blocks(counts['evict'])} without a holder lost cached content to make room.")
    alike = list(_alike(found, forked, back, took).items())
    said = alike if len(alike) <= MAX_ALIKE else alike[: MAX_ALIKE - 1]
    for blocks, request_ids in said:
        each = " each" if len(request_ids) > 1 else ""
        sentences.append(f"{_requests(request_ids, name)} {_got(*blocks)}{each}.")
    if rest := alike[len(said) :]:
        others = sum(len(request_ids) for _, request_ids in rest)
        totals = [sum(blocks[place] * len(request_ids) for blocks, request_ids in rest) for place in range(4)]
        sentences.append(f"{others:,} more requests {_got(*totals)} in all.")
    if counts["copy"]:
        sentences.append(
            f"{_blocks(counts['copy'])} that others hold or can find {_was(counts['copy'])} copied to be written to."
        )
    if counts["cache"]:
        sentences.append(f"{_blocks(counts['cache'])} can be found by later requests from now on.")
    sentences.append(_ran(step))
    return sentences


def _ran(step: LedgerStep) -> str:
    parts = []
    for kind, words in _RAN.items():
        tokens = [entry.num_scheduled_tokens for entry in step.entries if entry.kind == kind]
        if tokens:
            parts.append(f"{_count(sum(tokens), 'token')} {words} ({_count(len(tokens), 'request')})")
    return f"The step runs {_list(parts)}." if parts else "The step runs no token."


def _alike(*blocks: dict[str, int]) -> dict[tuple[int, ...], list[str]]:
    """Requests by how many blocks of each kind they got."""
    alike: dict[tuple[int, ...], list[str]] = {}
    for request_id in dict.fromkeys(request_id for kind in blocks for request_id in kind):
        numbers = tuple(kind.get(request_id, 0) for kind in blocks)
        if any(numbers):  # all that it got may lie behind a window
            alike.setdefault(numbers, []).append(request_id)
    return alike


def _got(num_found: int, num_forked: int, num_back: int, num_taken: int) -> str:
    parts = [f"found {_blocks(num_found)} in the cache"] if num_found else []
    parts += [f"found {_blocks(num_forked)} with another sample of their prompt"] if num_forked else []
    parts += [f"got {_blocks(num_back)} back from host memory"] if num_back else []
    parts += [f"took {_blocks(num_taken)}"] if num_taken else []
    return _list(parts)


def _requests(request_ids: Sequence[str], name: Callable[[str], str]) -> str:
    names = [name(request_id) for request_id in request_ids[:MAX_NAMES]]
    if len(request_ids) > MAX_NAMES:
        names.append(f"{len(request_ids) - MAX_NAMES:,} more")
    return f"{'Request' if len(request_ids) == 1 else 'Requests'} {_list(names)}"


def _list(parts: Iterable[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _was(number: int) -> str:
    return "was" if number == 1 else "were"


def _blocks(number: int) -> str:
    return _count(number, "block")


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
