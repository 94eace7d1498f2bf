"""The requests of a workload: its prompts, lengths, seeds and arrivals, all fixed by the workload and its seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backend.errors import ConfigError
from backend.sampling_params import SamplingParams
from backend.workload.conversations import Turn
from backend.workload.draws import Purpose, priorities, request_seed, token_ids
from backend.workload.plans import PlannedRequest, plan_requests, plan_warmup
from backend.workload.plans import count_requests as count_requests
from backend.workload.spec import (
    MAX_TURNS,
    ConversationsSource,
    MooncakeSource,
    PromptsSource,
    SharedPrefixSource,
    TraceSource,
    Workload,
)
from backend.workload.targets import Prompt


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    index: int  # measured and warm-up requests count from 0 each
    prompt: Prompt  # of a further turn, what it adds to the conversation; the driver puts what was said before it
    sampling: SamplingParams
    arrival_s: float | None  # after the measured part's start; None where earlier ends decide, and for warm-up
    turn: Turn | None = None  # where it is one of a conversation
    priority: int = 0


def check_workload(workload: Workload) -> None:
    """Find what no model could make possible, without drawing a prompt. Raises `ConfigError`."""
    plan_requests(workload)
    plan_warmup(workload)


def workload_notices(workload: Workload, max_model_len: int | None, policy: str | None = None) -> tuple[str, ...]:
    """What comes out otherwise than asked or expected, a sentence each. Raises `ConfigError` as `build_requests`.

    Args:
        workload: what is asked.
        max_model_len: as for `build_requests`.
        policy: the target's `scheduler.policy`; None where it is not known.
    """
    notices = []
    if workload.priorities and policy not in (None, "priority"):
        notices.append(f"workload.priorities are not heeded: scheduler.policy is {policy!r}, and only 'priority' does")
    if workload.sampling.n > 1 and workload.sampling.temperature == 0:
        notices.append(f"the {workload.sampling.n} samples of each prompt are alike: sampling.temperature is 0")
    return (*notices, *_cut_notices(workload, max_model_len))


def _cut_notices(workload: Workload, max_model_len: int | None) -> tuple[str, ...]:
    source = workload.source
    if max_model_len is None or not isinstance(source, TraceSource | MooncakeSource | ConversationsSource):
        return ()
    plan = plan_requests(workload, max_model_len)
    if not plan.num_cut:
        return ()
    if isinstance(source, ConversationsSource):
        return (
            f"{plan.num_cut:,} of {source.num_conversations:,} conversations end before the turn that would pass the "
            f"context of {max_model_len:,} tokens",
        )
    remedy = "; source.scale keeps their proportions" if isinstance(source, MooncakeSource) else ""
    return (
        f"{plan.num_cut:,} of {len(plan.requests):,} requests of the trace were cut to the context of "
        f"{max_model_len:,} tokens{remedy}",
    )


def build_requests(
    workload: Workload, vocab_size: int | None, max_model_len: int | None = None
) -> list[WorkloadRequest]:
    """The measured requests, in order of arrival; those of conversations by conversation, then turn.

    Args:
        workload: what to build.
        vocab_size: ids of the model, needed where prompts are random ids; None when the target cannot tell.
        max_model_len: most tokens of a prompt and its answer, to which traces and conversations are cut; None when the
            target cannot tell.

    Raises `ConfigError` for a file or list that cannot be used, or a vocabulary that is needed and not known.
    """
    return _build(workload, vocab_size, plan_requests(workload, max_model_len).requests, warmup=False)


def build_warmup_requests(
    workload: Workload, vocab_size: int | None, max_model_len: int | None = None
) -> list[WorkloadRequest]:
    """`workload.warmup_requests` requests like the measured ones: texts from the first on, random ids of their own."""
    return _build(workload, vocab_size, plan_warmup(workload, max_model_len), warmup=True)


def prompts_digest(requests: Iterable[WorkloadRequest]) -> str:
    """SHA-256 over all prompts in order: equal digests, equal prompts, wherever they were read from."""
    digest = hashlib.sha256()
    for request in requests:
        prompt = request.prompt
        place = [] if request.turn is None else [request.turn.conversation, request.turn.number]
        line = json.dumps([prompt.text, prompt.token_ids, prompt.chat, *place], separators=(",", ":"))
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def _build(
    workload: Workload, vocab_size: int | None, planned: Sequence[PlannedRequest], *, warmup: bool
) -> list[WorkloadRequest]:
    settings = {name: getattr(workload.sampling, name) for name in type(workload.sampling).model_fields}
    if isinstance(workload.source, TraceSource | MooncakeSource):
        settings["ignore_eos"] = True
    prompts = _Prompts(workload, vocab_size, warmup=warmup)
    places = [request.index if request.turn is None else request.turn.conversation for request in planned]
    drawn = priorities(workload.priorities, workload.seed, max(places, default=-1) + 1, warmup=warmup)
    return [
        WorkloadRequest(
            index=request.index,
            prompt=prompts.of(request),
            sampling=SamplingParams(
                **settings,
                seed=request_seed(workload.seed, request.index, warmup=warmup),
                max_tokens=request.output_len,
            ),
            arrival_s=request.arrival_s,
            turn=request.turn,
            priority=drawn[place],
        )
        for request, place in zip(planned, places, strict=True)
    ]


class _Prompts:
    """Draws what is random. Each prompt has a stream of its own, so its first ids do not change with its length or its
    neighbours'."""

    def __init__(self, workload: Workload, vocab_size: int | None, *, warmup: bool) -> None:
        self._source = workload.source
        if vocab_size is None and not isinstance(self._source, PromptsSource):
            raise ConfigError(
                f"source.kind = {self._source.kind!r} draws token ids, but the target does not tell the size of its "
                "vocabulary; allowed here: 'prompts'"
            )
        self._vocab_size = vocab_size or 0
        self._seed = workload.seed
        self._warmup = warmup
        self._shared: dict[tuple[Purpose, int], tuple[int, ...]] = {}

    def of(self, request: PlannedRequest) -> Prompt:
        if isinstance(self._source, PromptsSource):
            return Prompt(text=request.text, chat=self._source.chat)
        stream = request.index
        if request.turn is not None:
            stream = request.turn.conversation * MAX_TURNS + request.turn.number
        ids = self._blocks(request) + self._prefix(request)
        own = request.prompt_len + request.prefix_len - len(ids)
        return Prompt(token_ids=ids + self._draw(Purpose.PROMPT_IDS, own, stream))

    def _prefix(self, request: PlannedRequest) -> tuple[int, ...]:
        if not request.prefix_len:
            return ()
        # Groups take turns, so that a group's prompts arrive apart, as those of different users would.
        group = request.index % self._source.groups if isinstance(self._source, SharedPrefixSource) else 0
        return self._drawn_once(Purpose.PREFIX_IDS, request.prefix_len, group)

    def _blocks(self, request: PlannedRequest) -> tuple[int, ...]:
        """The blocks of the hash ids, each a function of its id alone, cut to the prompt."""
        if not isinstance(self._source, MooncakeSource):
            return ()
        block_len = self._source.block_len // self._source.scale
        ids: list[int] = []
        for hash_id in request.hash_ids[: -(-request.prompt_len // block_len)]:
            ids += self._drawn_once(Purpose.BLOCK_IDS, block_len, hash_id)
        return tuple(ids[: request.prompt_len])

    def _drawn_once(self, purpose: Purpose, count: int, index: int) -> tuple[int, ...]:
        if (purpose, index) not in self._shared:
            self._shared[purpose, index] = self._draw(purpose, count, index)
        return self._shared[purpose, index]

    def _draw(self, purpose: Purpose, count: int, index: int) -> tuple[int, ...]:
        return token_ids(self._vocab_size, self._seed, purpose, count, index=index, warmup=self._warmup)
