"""Why a prompt's tokens did not come from the prefix cache, in sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backend.analysis.prefix_cache import Nearest, PromptFate
from backend.metrics.prefix_history import Admission, BlockLife

_MAX_NAMED = 3


def fate_sentences(fate: PromptFate, block_size: int, name: Callable[[str], str] = str) -> list[str]:
    """What was found, and why it was not more. Plain text.

    Args:
        name: request id -> what stands behind "request".
    """
    return [_found(fate, name), *_why(fate, block_size, name)]


def _found(fate: PromptFate, name: Callable[[str], str]) -> str:
    num_tokens, cached = len(fate.token_ids), fate.num_cached_tokens
    when = f"came from the cache when it was admitted for step {fate.admission.step:,}"
    if not cached:
        return f"None of its {_tokens(num_tokens, 'prompt ')} {when}."
    origin = f", computed by {_requests(fate.providers, name)}" if fate.providers else ", left by an earlier run"
    share = f"{100 * cached / num_tokens:.1f} %"
    return f"{cached:,} of its {_tokens(num_tokens, 'prompt ')} ({share}) {when}{origin}."


def _why(fate: PromptFate, block_size: int, name: Callable[[str], str]) -> list[str]:
    cause, nearest, cached = fate.cause, fate.nearest, fate.num_cached_tokens
    rest = len(fate.token_ids) - cached
    block = f"tokens {cached:,} to {cached + block_size - 1:,}"
    if isinstance(cause, BlockLife):
        return _lost(cause, block, name)
    if isinstance(cause, Admission):
        return [
            f"The next block, {block}, was not computed yet: request {name(cause.request_id)} has the same tokens, was "
            f"admitted for step {cause.step:,} and was still computing them."
        ]
    match cause:
        case "partial_block":
            return [
                f"The other {_tokens(rest)} could not: they do not fill a block, and only full blocks of "
                f"{_tokens(block_size)} are found."
            ]
        case "last_token":
            return [
                "Nobody could have found more: the last token always runs again, for the next one to be sampled from it, and "
                "only full blocks are found."
                if block_size > 1
                else "Nobody could have found more: the last token always runs again, for the next one to be sampled from it."
            ]
        case "empty":
            return ["The cache was empty: no block could be found by anybody."]
        case "nothing":
            return ["Nothing like it was cached: no prompt in the cache began with its first token."]
        case "unknown":
            return [
                "No prompt that is known here began with its first token; blocks of earlier runs whose prompts are not known "
                "could be found as well."
            ]
        case "earlier":
            return ["What it found was left by an earlier run, whose prompts are not known here."]
        case "window":
            return [
                f"The next block, {block}, could be found in the layers that keep everything, but not all that is needed was "
                "there in those with a window."
            ]
        case "forked":
            return ["It is another sample of a prompt, and began with the blocks of the sample that had computed it."]
    assert nearest is not None
    other, known = f"request {name(nearest.request_id)}", "" if fate.knows_all else " that is known"
    match cause:
        case "differs":
            where = "prompt" if nearest.num_common < nearest.num_prompt_tokens else "answer"
            return [
                f"It differs at token {nearest.num_common:,} from the {where} of {other}, the nearest{known}.",
                *_alike(fate, nearest, block_size),
            ]
        case "ends":
            return [
                f"The nearest{known} is {other}, whose prompt and answer end with token {nearest.num_common - 1:,}.",
                *_alike(fate, nearest, block_size),
            ]
        case "unfinished":
            return [
                f"The nearest{known} is {other}, which has the same {_tokens(nearest.num_common)}, but had not computed the "
                f"block of {block} and was not running."
            ]
    raise AssertionError(cause)


def _alike(fate: PromptFate, nearest: Nearest, block_size: int) -> list[str]:
    """Of the tokens in common that were not found."""
    more = nearest.num_common - fate.num_cached_tokens
    if not more:
        return []
    return [
        f"The {_tokens(more)} before that {'is' if more == 1 else 'are'} the same in both, but do not fill a block, and only "
        f"full blocks of {_tokens(block_size)} are found."
    ]


def _lost(life: BlockLife, block: str, name: Callable[[str], str]) -> list[str]:
    since = f" from step {life.begin_step:,} on" if life.begin or life.owner is None else ""
    computed = "left by an earlier run" if life.owner is None else f"computed by request {name(life.owner)}"
    begun = f"The next block, {block}, had been in the cache{since}, {computed}"
    place = "in" if life.how == "evicted" else "before"
    when = f"{place} step {life.end_step:,}" if life.end else "before this run began"
    match life.how:
        case "evicted":
            by = "" if life.taken_by is None else f" to make room for request {name(life.taken_by)}"
            return [f"{begun}. It was evicted {when}{by}."]
        case "reset":
            return [f"{begun}. The cache was reset {when}."]
    return [f"{begun}. It was withdrawn {when}: that request's logits turned out to be damaged."]


def _requests(request_ids: Sequence[str], name: Callable[[str], str]) -> str:
    named = [name(request_id) for request_id in request_ids[:_MAX_NAMED]]
    more = len(request_ids) - len(named)
    if more:
        return f"requests {', '.join(named)} and {more:,} more"
    return f"request {named[0]}" if len(named) == 1 else f"requests {', '.join(named[:-1])} and {named[-1]}"


def _tokens(number: int, kind: str = "") -> str:
    return f"{number:,} {kind}token" if number == 1 else f"{number:,} {kind}tokens"
