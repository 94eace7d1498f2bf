"""What the requests of a workload will be, before any of their token ids is drawn: lengths, times, turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backend.errors import ConfigError
from backend.workload.arrivals import arrival_times
from backend.workload.conversations import Turn, count_turns, plan_turns, within_context
from backend.workload.draws import Purpose, lengths
from backend.workload.prompt_texts import prompt_texts
from backend.workload.spec import (
    MAX_REQUESTS,
    ConversationsSource,
    MooncakeSource,
    PromptsSource,
    SharedPrefixSource,
    SyntheticSource,
    TraceSource,
    Workload,
)
from backend.workload.traces import TraceRow, fit, read_trace

MAX_PROMPT_TOKENS = 20_000_000  # random ids are drawn before the run, and all kept


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to come. Lengths are in tokens, and 0 where they are the text's."""

    index: int
    output_len: int
    prompt_len: int = 0  # what is drawn for it alone
    prefix_len: int = 0  # what comes before, drawn for its group
    text: str | None = None
    hash_ids: tuple[int, ...] = ()  # of a Mooncake trace's blocks
    arrival_s: float | None = None
    turn: Turn | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    requests: list[PlannedRequest]
    num_cut: int = 0  # requests of a trace, or conversations, that the target's context has shortened


def count_requests(workload: Workload) -> int:
    """How many prompts are measured where the context shortens nothing. Reads a file of prompts or of a trace.

    Raises `ConfigError` when the source cannot be used.
    """
    source = workload.source
    match source:
        case SyntheticSource():
            return source.num_requests
        case SharedPrefixSource():
            return source.groups * source.prompts_per_group
        case ConversationsSource():
            return sum(count_turns(source, workload.seed))
        case TraceSource() | MooncakeSource():
            return len(read_trace(source))
        case PromptsSource():
            return len(prompt_texts(source))


def plan_requests(workload: Workload, max_model_len: int | None = None) -> Plan:
    """The measured requests, by index. `max_model_len` is the context of the target, None where it is not known.

    Raises `ConfigError` for what no target could serve, and for what does not fit into this one's context at all.
    """
    source = workload.source
    if isinstance(source, ConversationsSource):
        plan = _conversations(workload, source, max_model_len)
    elif isinstance(source, TraceSource | MooncakeSource):
        plan = _trace(workload, read_trace(source), max_model_len)
    else:
        count = count_requests(workload)
        texts = prompt_texts(source) if isinstance(source, PromptsSource) else None
        times = arrival_times(workload.arrivals, count, workload.seed)
        plan = Plan(_drawn(workload, count, texts, times, warmup=False))
    _check(workload, plan.requests)
    return plan


def plan_warmup(workload: Workload, max_model_len: int | None = None) -> list[PlannedRequest]:
    """`workload.warmup_requests` requests like the measured ones: texts and rows from the first on, first turns."""
    source, count = workload.source, workload.warmup_requests
    if isinstance(source, TraceSource | MooncakeSource) and count:
        rows = read_trace(source)
        cut = [fit(rows[index % len(rows)], max_model_len) for index in range(count)]
        planned = [_of_row(index, row, None) for index, row in enumerate(cut)]
    else:
        texts = prompt_texts(source) if isinstance(source, PromptsSource) and count else None
        planned = _drawn(workload, count, texts, None, warmup=True)
    _check(workload, planned)
    return planned


def _drawn(
    workload: Workload, count: int, texts: list[str] | None, times: Sequence[float] | None, *, warmup: bool
) -> list[PlannedRequest]:
    """Requests of lengths that are drawn, or of texts."""
    source, seed = workload.source, workload.seed
    output_lens = lengths(workload.output_len, seed, Purpose.OUTPUT_LENGTHS, count, warmup=warmup)
    prompt_lens, prefix_len = [0] * count, 0
    if isinstance(source, SyntheticSource):
        prompt_lens = lengths(source.prompt_len, seed, Purpose.PROMPT_LENGTHS, count, warmup=warmup)
    elif isinstance(source, SharedPrefixSource):
        prompt_lens = lengths(source.suffix_len, seed, Purpose.PROMPT_LENGTHS, count, warmup=warmup)
        prefix_len = source.prefix_len
    elif isinstance(source, ConversationsSource):
        prompt_lens = lengths(source.first_len, seed, Purpose.PROMPT_LENGTHS, count, warmup=warmup)
        prefix_len = source.system_len
    return [
        PlannedRequest(
            index=index,
            output_len=output_lens[index],
            prompt_len=prompt_lens[index],
            prefix_len=prefix_len,
            text=None if texts is None else texts[index % len(texts)],
            arrival_s=None if times is None else times[index],
        )
        for index in range(count)
    ]


def _trace(workload: Workload, rows: list[TraceRow], max_model_len: int | None) -> Plan:
    times = arrival_times(workload.arrivals, len(rows), workload.seed, [row.time_s for row in rows])
    fitting = [fit(row, max_model_len) for row in rows]
    planned = [_of_row(index, row, None if times is None else times[index]) for index, row in enumerate(fitting)]
    return Plan(planned, sum(row != whole for row, whole in zip(fitting, rows, strict=True)))


def _of_row(index: int, row: TraceRow, arrival_s: float | None) -> PlannedRequest:
    return PlannedRequest(index, row.output_len, row.prompt_len, hash_ids=row.hash_ids, arrival_s=arrival_s)


def _conversations(workload: Workload, source: ConversationsSource, max_model_len: int | None) -> Plan:
    conversations = plan_turns(source, workload)
    times = arrival_times(workload.arrivals, len(conversations), workload.seed)
    kept = [within_context(turns, source.system_len, max_model_len) for turns in conversations]
    if not any(kept):
        raise ConfigError(
            f"no conversation's first turn fits into the target's context of {max_model_len:,} tokens; lower "
            "source.system_len, source.first_len or output_len"
        )
    planned = [
        PlannedRequest(
            index=planned.index,
            output_len=planned.output_len,
            prompt_len=planned.new_len,
            prefix_len=0 if planned.turn.number else source.system_len,
            arrival_s=None if times is None or planned.turn.number else times[planned.turn.conversation],
            turn=planned.turn,
        )
        for turns in kept
        for planned in turns
    ]
    return Plan(planned, sum(len(turns) < len(whole) for turns, whole in zip(kept, conversations, strict=True)))


def _check(workload: Workload, planned: Sequence[PlannedRequest]) -> None:
    shortest = min((request.output_len for request in planned), default=None)
    if shortest is not None and workload.sampling.min_tokens > shortest:
        raise ConfigError(
            f"sampling.min_tokens = {workload.sampling.min_tokens} is above the shortest output_len of this workload, "
            f"{shortest}"
        )
    num_samples = len(planned) * workload.sampling.n
    if num_samples > MAX_REQUESTS:
        raise ConfigError(
            f"sampling.n = {workload.sampling.n} of {len(planned):,} prompts are {num_samples:,} samples; at most "
            f"{MAX_REQUESTS:,} are allowed"
        )
    num_tokens = sum(request.prefix_len + request.prompt_len for request in planned)
    if num_tokens > MAX_PROMPT_TOKENS:
        raise ConfigError(
            f"the workload's prompts have {num_tokens:,} tokens in all; at most {MAX_PROMPT_TOKENS:,} are allowed"
        )
