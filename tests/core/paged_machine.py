"""A machine without a model: it keeps tokens where KV would be, and its next token is a hash of what it reads back.

Reading through the block tables makes a misplaced, shared or recycled block show up as a wrong token, and `next_token` of the
plain list is the oracle. Of a KV group with a window it reads what is within the window only.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from backend.config import EngineConfig
from backend.core.block_hash import prefix_key
from backend.core.draft_cost import DraftCost
from backend.core.kv_cache_manager import KVGroupSpec
from backend.core.kv_layouts import resolve_layout
from backend.core.output import ModelRunnerOutput, RequestOutput, SchedulerOutput
from backend.core.scheduler_factory import make_scheduler
from backend.core.swapping import SwappingKVCacheManager
from backend.request import Request, sample_ids
from backend.sampling_params import SamplingParams

VOCAB = 50_000
GROUP = KVGroupSpec(1, 1, 1, 1)


def next_token(token_ids: Sequence[int], seed: int = 0, windows: Sequence[int | None] = (None,)) -> int:
    """Of what each KV group sees of the tokens; a window of `None` sees them all."""
    return hash_of([list(token_ids[-window:] if window else token_ids) for window in windows], seed)


def hash_of(seen: list[list[Any]], seed: int) -> int:
    read = seen if len(seen) > 1 else seen[0]
    return zlib.crc32(repr((seed, read) if seed else read).encode()) % VOCAB


def generate(
    prompt: Sequence[int], num_tokens: int, seed: int = 0, windows: Sequence[int | None] = (None,)
) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, seed, windows))
    return token_ids[len(prompt) :]


@dataclass
class _Known:
    token_ids: list[int]
    blocks: list[list[int]]  # per KV group
    seed: int


@dataclass
class PagedMachine:
    num_blocks: int
    block_size: int
    windows: tuple[int | None, ...] = (None,)  # of the KV groups
    known: dict[str, _Known] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots: list[int | None] = [None for _ in range((self.num_blocks + 1) * self.block_size)]
        self.host: dict[int, list[int | None]] = {}

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in (*scheduled.finished_request_ids, *scheduled.preempted_request_ids):
            self.known.pop(request_id, None)
        assert list(scheduled.num_scheduled_tokens) == list(scheduled.kinds)
        for new in scheduled.new_requests:
            assert new.request_id not in self.known
            blocks = [list(block_ids) for block_ids in new.block_ids]
            self.known[new.request_id] = _Known(list(new.token_ids), blocks, new.sampling_params.seed)
        for request_id, block_ids in scheduled.new_block_ids.items():
            for known, more in zip(self.known[request_id].blocks, block_ids, strict=True):
                known.extend(more)
        assert not (scheduled.swapped_out and scheduled.num_swapped == 0)
        for block, host_block in scheduled.swapped_out:
            self.host[host_block] = self._contents(block)
        for host_block, block in scheduled.swapped_in:
            self.slots[block * self.block_size : (block + 1) * self.block_size] = self.host[host_block]
        copied = [(destination, self._contents(source)) for source, destination in scheduled.block_copies]
        for destination, contents in copied:
            self.slots[destination * self.block_size : (destination + 1) * self.block_size] = contents
        sampled = {}
        rows = zip(scheduled.num_scheduled_tokens.items(), scheduled.num_computed_tokens, strict=True)
        for (request_id, num_tokens), start in rows:
            state = self.known[request_id]
            end = start + num_tokens
            for group in range(len(self.windows)):
                for position in range(start, end):
                    self.slots[self._slot(state, group, position)] = state.token_ids[position]
        for (request_id, num_tokens), start in zip(
            scheduled.num_scheduled_tokens.items(), scheduled.num_computed_tokens, strict=True
        ):
            state, end = self.known[request_id], start + num_tokens
            for group, window in enumerate(self.windows):
                if window:  # the step's first token sees the furthest back
                    first = max(0, start + 1 - window)
                    assert self._read(state, group, first, end) == state.token_ids[first:end]
            if end == len(state.token_ids):
                seen = [self._read(state, group, max(0, end - (w or end)), end) for group, w in enumerate(self.windows)]
                token_id = hash_of(seen, state.seed)
                state.token_ids.append(token_id)
                sampled[request_id] = [token_id]
        return ModelRunnerOutput(sampled)

    def _contents(self, block: int) -> list[int | None]:
        return self.slots[block * self.block_size : (block + 1) * self.block_size]

    def _read(self, state: _Known, group: int, first: int, end: int) -> list[int | None]:
        return [self.slots[self._slot(state, group, position)] for position in range(first, end)]

    def _slot(self, state: _Known, group: int, position: int) -> int:
        block = state.blocks[group][position // self.block_size]
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
    swap_blocks: int = 0  # of host memory; with some, preempted requests are swapped
    windows: tuple[int | None, ...] = (None,)  # of the KV groups
    overrides: dict[str, Any] = field(default_factory=dict)  # of the config
    draft_cost: DraftCost | None = None

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
                "scheduler.preemption": "swap" if self.swap_blocks else "recompute",
                "cache.swap_bytes": max(1, self.swap_blocks * self.block_size * GROUP.bytes_per_token),
                "model.max_model_len": self.max_model_len or self.num_blocks * self.block_size // len(self.windows),
                **self.overrides,
            }
        )
        self.scheduler = make_scheduler(
            resolve_layout(config)[0],
            [replace(GROUP, window=window) for window in self.windows],
            key,
            self.draft_cost,
        )
        self.manager = self.scheduler.kv_cache_manager
        self.machine = PagedMachine(self.num_blocks, self.block_size, self.windows)
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

    def add_samples(
        self, request_id: str, prompt: Sequence[int], n: int, max_tokens: Sequence[int], **sampling: object
    ) -> list[Request]:
        """The samples of one prompt, each with its own `max_tokens`."""
        requests = []
        for index, (sample_id, count) in enumerate(zip(sample_ids(request_id, n), max_tokens, strict=True)):
            params = SamplingParams(max_tokens=count, **sampling).sample(index)  # type: ignore[arg-type]
            requests.append(
                Request(sample_id, list(prompt), params, frozenset(), 0.0, parent_id=request_id, sample_index=index)
            )
            self.tokens[sample_id] = []
        self.scheduler.add_samples(requests)
        return requests

    def abort(self, request_id: str) -> None:
        output = self.scheduler.abort_request(request_id)
        assert output is not None
        self.take(output)

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
                if isinstance(self.manager, SwappingKVCacheManager):
                    assert self.manager.swap_space.num_free_blocks == self.swap_blocks
                return self.tokens
            self.step()
        raise AssertionError(f"not drained after {limit} steps")
