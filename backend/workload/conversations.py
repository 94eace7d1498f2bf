"""The turns of conversations: how many, how long, and after what pause, all fixed before the first answer is there."""

from __future__ import annotations

from dataclasses import dataclass

from backend.errors import ConfigError
from backend.workload.draws import Purpose, exponentials, lengths
from backend.workload.spec import MAX_REQUESTS, MAX_TURNS, ConversationsSource, Workload


@dataclass(frozen=True, slots=True)
class Turn:
    """The place of a request in a conversation; both numbers count from 0."""

    conversation: int
    number: int
    think_s: float  # from the end of the answer before to this turn's arrival; 0 for the first


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """A turn's lengths in tokens."""

    index: int  # by conversation, then turn
    turn: Turn
    new_len: int  # what the user adds; the system prompt is not counted
    output_len: int


def count_turns(source: ConversationsSource, seed: int) -> list[int]:
    """The turns of each conversation. Raises `ConfigError` for more than `MAX_TURNS`, or `MAX_REQUESTS` in all."""
    counts = lengths(source.turns, seed, Purpose.TURN_COUNTS, source.num_conversations)
    if max(counts) > MAX_TURNS:
        raise ConfigError(f"source.turns: a conversation has {max(counts):,} turns; at most {MAX_TURNS:,} are allowed")
    if sum(counts) > MAX_REQUESTS:
        raise ConfigError(
            f"the workload's conversations have {sum(counts):,} turns in all; at most {MAX_REQUESTS:,} are allowed"
        )
    return counts


def plan_turns(source: ConversationsSource, workload: Workload) -> list[list[PlannedTurn]]:
    """The turns of each conversation. No conversation's draws depend on another's number of turns. Raises `ConfigError`."""
    seed = workload.seed
    counts = count_turns(source, seed)
    first_lens = lengths(source.first_len, seed, Purpose.PROMPT_LENGTHS, len(counts))
    conversations, index = [], 0
    for conversation, count in enumerate(counts):
        further_lens = lengths(source.turn_len, seed, Purpose.TURN_LENGTHS, count - 1, index=conversation)
        output_lens = lengths(workload.output_len, seed, Purpose.OUTPUT_LENGTHS, count, index=conversation)
        pauses = [0.0] * (count - 1)
        if source.think_time_s:
            pauses = (
                exponentials(seed, Purpose.THINK_TIMES, count - 1, index=conversation) * source.think_time_s
            ).tolist()
        turns = [Turn(conversation, number, pause) for number, pause in enumerate([0.0, *pauses])]
        sizes = zip(turns, [first_lens[conversation], *further_lens], output_lens, strict=True)
        conversations.append([PlannedTurn(index + turn.number, turn, size, output) for turn, size, output in sizes])
        index += count
    return conversations


def within_context(turns: list[PlannedTurn], system_len: int, max_model_len: int | None) -> list[PlannedTurn]:
    """The turns before the first one that would pass the context if all answers up to its own had their full length.

    Counted so, and not by the answers that come, a workload sends the same requests in every run on the same context.
    """
    total = system_len
    for number, turn in enumerate(turns):
        total += turn.new_len + turn.output_len
        if max_model_len is not None and total > max_model_len:
            return turns[:number]
    return turns
