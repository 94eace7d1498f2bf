"""A machine without a model: it keeps tokens where KV would be, and its next token is a hash of what it reads back.

Reading through the block tables makes a misplaced, shared or recycled block show up as a wrong token, and `next_token` of the
plain list is the oracle.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from backend.config import EngineConfig
from backend.core.block_hash import prefix_key
from backend.core.kv_cache_manager import KVGroupSpec
from backend.core.kv_layouts import resolve_layout
from backend.core.output import ModelRunnerOutput, RequestOutput, SchedulerOutput
from backend.core.scheduler_factory import make_scheduler
from backend.request import Request
from backend.sampling_params import SamplingParams

VOCAB = 50_000


def next_token(token_ids: Sequence[int]) -> int:
    return zlib.crc32(repr(list(token_ids)).encode()) % VOCAB


def generate(prompt: Sequence[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


@dataclass
class _Known:
    token_ids: list[int]
    blocks: list[int]


@dataclass
class PagedMachine:
    num_blocks: int
    block_size: int
    known: dict[str, _Known] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots: list[int | None] = [None] * (self.num_blocks + 1) * self.block_size

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in (*scheduled.finished_request_ids, *scheduled.preempted_request_ids):
            self.known.pop(request_id, None)
        assert list(scheduled.num_scheduled_tokens) == list(scheduled.kinds)
        for new in scheduled.new_requests:
            assert new.request_id not in self.known
            self.known[new.request_id] = _Known(list(new.token_ids), list(new.block_ids[0]))
        for request_id, block_ids in scheduled.new_block_ids.items():
            self.known[request_id].blocks.extend(block_ids[0])
        sampled = {}
        rows = zip(scheduled.num_scheduled_tokens.items(), scheduled.num_computed_tokens, strict=True)
        for (request_id, num_tokens), start in rows:
            state = self.known[request_id]
            end = start + num_tokens
            for position in range(start, end):
                self.slots[self._slot(state, position)] = state.token_ids[position]
            if end == len(state.token_ids):
                read = [self.slots[self._slot(state, position)] for position in range(end)]
                token_id = next_token(read)  # type: ignore[arg-type]
                state.token_ids.append(token_id)
                sampled[request_id] = [token_id]
        return ModelRunnerOutput(sampled)

    def _slot(self, state: _Known, position: int) -> int:
        block = state.blocks[position // self.block_size]
        assert 1 <= block <= self.num_blocks
        return block * self.block_size + position % self.block_size


@dataclass
class Lab:
    """A scheduler over a `PagedMachine`, with every step checked.

    With `ahead`, so many steps are scheduled before the result of the oldest is taken. The machine carries each out when it
    is scheduled, as a device does that runs them in order.
    """

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    max_model_len: int | None = None
    ahead: int = 0
    prefix_caching: bool = False
    batching: str = "continuous"
    policy: str = "fcfs"
    layout: str = "paged"

    def __post_init__(self) -> None:
        key = prefix_key(model="a machine") if self.prefix_caching else None
        config = EngineConfig().with_overrides(
            {
                "cache.num_blocks": self.num_blocks,
                "cache.block_size": self.block_size,
                "cache.layout": self.layout,
                "scheduler.max_num_seqs": self.max_num_seqs,
                "scheduler.max_num_batched_tokens": self.max_num_batched_tokens,
                "scheduler.batching": self.batching,
                "scheduler.policy": self.policy,
                "model.max_model_len": self.max_model_len or self.num_blocks * self.block_size,
            }
        )
        self.scheduler = make_scheduler(resolve_layout(config)[0], [KVGroupSpec(1, 1, 1, 1)], key)
        self.manager = self.scheduler.kv_cache_manager
        self.machine = PagedMachine(self.num_blocks, self.block_size)
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.steps: list[SchedulerOutput] = []
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.fail_at: dict[str, int] = {}  # request_id -> number of computed tokens at which its logits are damaged

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 8,
        eos_token_ids: Iterable[int] = (),
        priority: int = 0,
        **sampling: object,
    ) -> Request:
        params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
        request = Request(request_id, list(prompt), params, frozenset(eos_token_ids), 0.0, priority)
        self.scheduler.add_request(request)
        self.tokens[request_id] = []
        return request

    def step(self) -> list[RequestOutput]:
        """Schedule a step and take the oldest result that is due; without anything to schedule, the oldest there is."""
        scheduled = self.scheduler.schedule()
        self.manager.check_integrity()
        if scheduled.num_scheduled_tokens or scheduled.preempted_request_ids:
            self._carry_out(scheduled)
            if len(self.in_flight) <= self.ahead:
                return []
        return self.complete() if self.in_flight else []

    def complete(self) -> list[RequestOutput]:
        outputs = self.scheduler.update_from_output(*self.in_flight.popleft())
        self.manager.check_integrity()
        for output in outputs:
            self.take(output)
        return outputs

    def _carry_out(self, scheduled: SchedulerOutput) -> None:
        self.steps.append(scheduled)
        assert scheduled.total_num_scheduled_tokens <= self.max_num_batched_tokens
        assert len(scheduled.num_scheduled_tokens) <= self.max_num_seqs
        assert all(count > 0 for count in scheduled.num_scheduled_tokens.values())
        output = self.machine.execute(scheduled)
        rows = zip(scheduled.num_scheduled_tokens.items(), scheduled.num_computed_tokens, strict=True)
        for (request_id, num_tokens), computed in rows:
            if computed + num_tokens == self.fail_at.get(request_id):
                del output.sampled_token_ids[request_id]
                output.errors[request_id] = "logits are not finite"
        self.in_flight.append((scheduled, output))

    def take(self, output: RequestOutput) -> None:
        assert output.request_id not in self.finished, "a request ended twice"
        self.tokens[output.request_id].extend(output.new_token_ids)
        if output.finish_reason:
            self.finished[output.request_id] = output.finish_reason

    def run(self, limit: int = 10_000) -> dict[str, list[int]]:
        for _ in range(limit):
            if not self.scheduler.has_unfinished_requests():
                while self.in_flight:
                    assert self.complete() == []
                pool = self.manager.pool
                assert pool.num_free_blocks + pool.num_evictable_blocks == self.num_blocks
                assert self.prefix_caching or not pool.num_evictable_blocks
                return self.tokens
            self.step()
        raise AssertionError(f"not drained after {limit} steps")
