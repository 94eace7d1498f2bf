"""Sentences about a step, word for word."""

from __future__ import annotations

from backend.core.block_events import BlockEvent
from backend.metrics.ledger_format import LedgerEntry, LedgerStep
from backend.metrics.step_words import step_sentences


def sentences(*events: BlockEvent, entries: tuple[LedgerEntry, ...] = ()) -> list[str]:
    return step_sentences(LedgerStep(7, entries, events), lambda request_id: request_id.removeprefix("run-"))


def test_everything_that_can_happen() -> None:
    assert sentences(
        BlockEvent("free", "run-1", 0, []),
        BlockEvent("preempt", "run-9", 0, []),
        BlockEvent("share", "run-2", 0, [5, 6]),
        BlockEvent("evict", None, 0, [7, 8, 9, 10]),
        BlockEvent("allocate", "run-2", 0, [7, 8, 9]),
        BlockEvent("allocate", "run-3", 0, [10]),
        BlockEvent("allocate", "run-4", 0, [11]),
        BlockEvent("cache", None, 0, [5]),
        BlockEvent("uncache", None, 0, [1, 2]),
        entries=(
            LedgerEntry("run-3", 1, "decode"),
            LedgerEntry("run-4", 1, "decode"),
            LedgerEntry("run-2", 37, "prefill"),
            LedgerEntry("run-5", 12, "recompute"),
        ),
    ) == [
        "Request 9 was preempted and gave up all blocks.",
        "Request 1 gave back all blocks.",
        "2 blocks left the prefix cache.",
        "4 blocks without a holder lost cached content to make room.",
        "Request 2 found 2 blocks in the cache and took 3 blocks.",
        "Requests 3 and 4 took 1 block each.",
        "1 block can be found by later requests from now on.",
        "The step runs 37 tokens of prompts (1 request), 2 tokens of decoding (2 requests) and 12 tokens again, "
        "whose keys and values were not kept (1 request).",
    ]


def test_what_a_request_takes_in_several_goes_and_groups_adds_up() -> None:
    events = [BlockEvent("allocate", "run-1", group, [10 * group + 1]) for group in (0, 1)]
    assert sentences(*events, BlockEvent("allocate", "run-1", 0, [3])) == [
        "Request 1 took 3 blocks.",
        "The step runs no token.",
    ]


def test_long_lists_are_cut_and_nothing_is_said_of_nothing() -> None:
    assert sentences() == ["The step runs no token."]
    freed = [BlockEvent("free", f"run-{index}", 0, []) for index in range(1007)]
    assert sentences(*freed)[0] == "Requests 0, 1, 2, 3, 4, 5 and 1,001 more gave back all blocks."
    assert sentences(BlockEvent("uncache", None, 0, []))[0] == "The prefix cache was emptied."


def test_samples_of_a_prompt() -> None:
    events = [
        BlockEvent("share", "run-1/1", 0, [5, 6], 30),
        BlockEvent("copy", "run-1/1", 0, [6, 7]),
        BlockEvent("share", "run-1/2", 0, [5, 6], 30),
        BlockEvent("copy", "run-1/2", 0, [6, 8]),
        BlockEvent("share", "run-2/1", 0, [9], 30),
        BlockEvent("allocate", "run-2/1", 0, [10]),
    ]
    assert sentences(*events)[:-1] == [
        "Requests 1/1 and 1/2 found 2 blocks with another sample of their prompt each.",
        "Request 2/1 found 1 block with another sample of their prompt and took 1 block.",
        "2 blocks that others hold or can find were copied to be written to.",
    ]


def test_what_leaves_for_host_memory_and_comes_back() -> None:
    events = [
        BlockEvent("swap_out", "run-1", 0, [4, 5], 30),
        BlockEvent("swap_out", "run-2", 0, [7], 30),
        BlockEvent("preempt", "run-3", 0, []),
        BlockEvent("share", "run-4", 0, [6]),
        BlockEvent("swap_in", "run-4", 0, [4, 5], 22),
        BlockEvent("allocate", "run-4", 0, [9]),
    ]
    assert sentences(*events)[:-1] == [
        "Request 3 was preempted and gave up all blocks.",
        "Requests 1 and 2 were preempted and left for host memory; 3 blocks were copied there.",
        "Request 4 found 1 block in the cache, got 2 blocks back from host memory and took 1 block.",
    ]
    assert sentences(BlockEvent("swap_out", "run-1", 0, [], 16))[0].endswith("; 0 blocks were copied there.")


def test_many_different_requests_are_summed_up() -> None:
    events = [BlockEvent("allocate", f"run-{index}", 0, list(range(1, index + 1))) for index in range(1, 8)]
    events.insert(0, BlockEvent("share", "run-7", 0, [90, 91]))
    assert sentences(*events)[:-1] == [
        "Request 7 found 2 blocks in the cache and took 7 blocks.",
        "Request 1 took 1 block.",
        "Request 2 took 2 blocks.",
        "4 more requests took 18 blocks in all.",
    ]


def test_a_request_that_got_only_what_lies_behind_a_window() -> None:
    assert sentences(BlockEvent("share", "run-1", 0, [0, 0]), BlockEvent("allocate", "run-2", 0, [3])) == [
        "Request 2 took 1 block.",
        "The step runs no token.",
    ]
