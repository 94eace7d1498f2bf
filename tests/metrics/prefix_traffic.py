"""Traffic over few prefixes with its ledger, and beside the real pool a naive one that knows tokens and no hashes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from backend.analysis.prefix_cache import PrefixCache
from backend.analysis.run_prompts import RequestTokens
from backend.core.kv_blocks import ComputedBlocks, KVAllocation
from backend.core.output import SchedulerOutput
from backend.engine.llm_engine import _name_preemptions
from backend.metrics.ledger import StepLedger
from backend.metrics.ledger_reader import LedgerReader
from backend.metrics.prefix_history import PrefixHistory
from backend.request import Request
from tests.core.paged_machine import VOCAB, Lab

Content = tuple[int, ...]  # all tokens up to a block's end


@dataclass(eq=False)
class NaiveBlock:
    content: Content | None = None
    num_holders: int = 1


@dataclass
class Loss:
    content: Content
    how: str
    step: int
    by: str | None


@dataclass
class Lookup:
    """What the naive pool knew when a request was admitted for the first time."""

    step: int
    found: int  # blocks
    findable: set[Content]
    losses: dict[Content, Loss]
    computing: list[tuple[str, int]]
    ended: set[str]


@dataclass
class NaivePool:
    """A list of what can be found, in order of use, and a count of free blocks."""

    num_blocks: int
    block_size: int
    cached: dict[Content, NaiveBlock] = field(default_factory=dict)
    idle: list[NaiveBlock] = field(default_factory=list)  # cached and not held, longest first
    held: dict[str, list[NaiveBlock]] = field(default_factory=dict)
    offered: dict[str, int] = field(default_factory=dict)  # blocks of a request
    losses: dict[Content, Loss] = field(default_factory=dict)

    def find(self, token_ids: list[int]) -> int:
        num = 0
        while (num + 1) * self.block_size < len(token_ids):
            if tuple(token_ids[: (num + 1) * self.block_size]) not in self.cached:
                break
            num += 1
        return num

    def begin(self, key: str, token_ids: list[int], num_blocks: int) -> None:
        blocks = [self.cached[tuple(token_ids[: (index + 1) * self.block_size])] for index in range(num_blocks)]
        for block in blocks:
            block.num_holders += 1
            if block in self.idle:
                self.idle.remove(block)
        self.held[key], self.offered[key] = blocks, num_blocks

    def take(self, key: str, num_blocks: int, step: int) -> None:
        for _ in range(num_blocks):
            in_use = {id(block) for blocks in self.held.values() for block in blocks}
            if len(in_use) + len(self.idle) == self.num_blocks:
                self.lose(self.idle.pop(0), "evicted", step, key)
            self.held.setdefault(key, []).append(NaiveBlock())

    def cache(self, key: str, token_ids: list[int], num_computed: int) -> None:
        """Each block is offered once, when it is full."""
        num_full = min(num_computed, len(token_ids)) // self.block_size
        for index in range(self.offered[key], num_full):
            content, block = tuple(token_ids[: (index + 1) * self.block_size]), self.held[key][index]
            if content not in self.cached and block.content is None:
                block.content = content
                self.cached[content] = block
        self.offered[key] = max(self.offered[key], num_full)

    def free(self, key: str) -> None:
        for block in reversed(self.held.pop(key, [])):
            block.num_holders -= 1
            if not block.num_holders and block.content is not None:
                self.idle.append(block)

    def lose(self, block: NaiveBlock, how: str, step: int, by: str | None) -> None:
        assert block.content is not None
        self.losses[block.content] = Loss(block.content, how, step, by)
        del self.cached[block.content]
        block.content = None

    def lose_all(self, blocks: list[NaiveBlock], how: str, step: int) -> None:
        for block in blocks:
            self.lose(block, how, step, None)
        self.idle = [block for block in self.idle if block.content is not None]


@dataclass
class WatchedLab(Lab):
    """A lab whose steps go into a ledger, and whose pool, if `watched`, has a naive one beside it."""

    watched: bool = True

    def __post_init__(self) -> None:
        self.prefix_caching = True
        super().__post_init__()
        self.naive = NaivePool(self.num_blocks, self.block_size)
        self.lookups: dict[str, Lookup] = {}
        self.asked: dict[str, Request] = {}
        self.ended: set[str] = set()
        self.ledger, self.chunks, self.num_steps = StepLedger(), [], 0
        self.manager.log_events(True)
        if self.watched:
            self._watch()

    def add(self, request_id: str, *args: object, **kwargs: object) -> Request:
        request = self.asked[request_id] = super().add(request_id, *args, **kwargs)  # type: ignore[arg-type]
        return request

    def _carry_out(self, scheduled: SchedulerOutput) -> None:
        frame = self.manager.state(self.scheduler.requests) if not self.num_steps else None
        events = _name_preemptions(self.manager.take_events(), frozenset(scheduled.preempted_request_ids))
        rows = scheduled.num_scheduled_tokens
        self.ledger.append(self.num_steps, rows, rows.values(), scheduled.kinds.values(), events, frame)
        self.num_steps += 1
        if self.num_steps % 7 == 0:
            self.chunks.append(self.ledger.flush())
        super()._carry_out(scheduled)

    def reader(self) -> LedgerReader:
        if chunk := self.ledger.flush():
            self.chunks.append(chunk)
        return LedgerReader([(chunk.encode(), chunk.first_step, chunk.last_step) for chunk in self.chunks])

    def cache(self) -> PrefixCache:
        """The analysis, from the ledger and the tokens alone."""
        history = PrefixHistory(self.block_size)
        assert history.extend(self.reader())
        return PrefixCache(history, {key: tokens_of(request) for key, request in self.asked.items()})

    def _watch(self) -> None:
        manager, naive = self.manager, self.naive
        take, allocate, cache = manager.take_computed_blocks, manager.allocate_slots, manager.cache_blocks
        free, uncache, reset = manager.free, manager.uncache_blocks, manager.reset_prefix_cache

        def take_computed(request: Request, computed: ComputedBlocks) -> list[tuple[int, int]]:
            key = request.request_id
            found = naive.find(request.token_ids)
            assert found * self.block_size == computed.num_tokens, "the naive pool is not the real one"
            if key not in self.lookups:
                running = [(other.request_id, other.num_computed_tokens) for other in self.scheduler.running]
                self.lookups[key] = Lookup(
                    self.num_steps, found, set(naive.cached), dict(naive.losses), running, set(self.ended)
                )
            naive.begin(key, request.token_ids, found)
            return take(request, computed)

        def allocate_slots(request: Request, *args: int) -> KVAllocation | None:
            allocation = allocate(request, *args)
            if allocation is not None:
                naive.take(request.request_id, len(allocation.block_ids[0]), self.num_steps)
            return allocation

        def cache_blocks(request: Request) -> None:
            cache(request)
            naive.cache(request.request_id, request.token_ids, request.num_computed_tokens)

        def free_blocks(request: Request) -> None:
            free(request)
            naive.free(request.request_id)

        def uncache_blocks(request: Request) -> None:
            uncache(request)
            blocks = naive.held.get(request.request_id, [])
            naive.lose_all([block for block in blocks if block.content is not None], "withdrawn", self.num_steps)

        def reset_cache() -> int:
            naive.lose_all(list(naive.cached.values()), "reset", self.num_steps)
            return reset()

        manager.take_computed_blocks = take_computed  # type: ignore[method-assign]
        manager.allocate_slots = allocate_slots  # type: ignore[method-assign,assignment]
        manager.cache_blocks = cache_blocks  # type: ignore[method-assign]
        manager.free = free_blocks  # type: ignore[method-assign]
        manager.uncache_blocks = uncache_blocks  # type: ignore[method-assign]
        manager.reset_prefix_cache = reset_cache  # type: ignore[method-assign]
        finish = self.scheduler._finish

        def finish_request(request: Request, reason: str) -> None:
            if request.request_id in naive.held:  # who has nothing to give back ends without a block event
                self.ended.add(request.request_id)
            finish(request, reason)  # type: ignore[arg-type]

        self.scheduler._finish = finish_request  # type: ignore[method-assign]


def tokens_of(request: Request) -> RequestTokens:
    return RequestTokens(np.array(request.token_ids, dtype=np.uint32), request.num_prompt_tokens)


def random_lab(seed: int, ahead: int = 0) -> WatchedLab:
    """Prompts that begin alike and part anywhere, turns of conversations, a pool that evicts and preempts, and resets."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4])
    lab = WatchedLab(
        block_size=block_size,
        num_blocks=96 // block_size,
        max_num_seqs=6,
        max_num_batched_tokens=rng.choice([5, 24, 64]),
        ahead=ahead,
    )
    for index, prompt in enumerate(_prompts(rng, lab)):
        lab.add(str(index), prompt, max_tokens=rng.choice([1, 3, 12]))
        if rng.random() < 0.03:
            lab.fail_at[str(index)] = len(prompt)
        for _ in range(rng.choice([0, 1, 3])):
            if lab.scheduler.has_unfinished_requests():
                lab.step()
        if rng.random() < 0.04:
            lab.manager.reset_prefix_cache()
    lab.run()
    return lab


def _prompts(rng: random.Random, lab: WatchedLab) -> Iterator[list[int]]:
    stems = [rng.choices(range(VOCAB), k=30) for _ in range(3)]
    for _ in range(70):
        over = [key for key in lab.finished if len(lab.asked[key].token_ids) < 40]
        if over and rng.random() < 0.3:
            begin = list(lab.asked[rng.choice(over)].token_ids)  # a further turn
        else:
            stem = rng.choice(stems)
            begin = stem[: rng.randint(1, len(stem))]
        yield begin + rng.choices(range(3), k=rng.randint(0, 6))
