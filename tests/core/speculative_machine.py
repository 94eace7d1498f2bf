"""A `PagedMachine` that drafts: any number of tokens it is granted, of which any number are right; chains or trees."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np

from backend.core.output import DraftRounds, ModelRunnerOutput, RequestOutput, SchedulerOutput
from backend.spec_decode.draft_tree import DEFAULT_TREES, DraftTree
from tests.core.paged_machine import VOCAB, Lab, PagedMachine, _Known, hash_of


@dataclass
class SpeculativeMachine(PagedMachine):
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    num_right: int | None = None  # of each draft, which then has all tokens that are granted; None: as it comes
    finds_nothing_for: set[str] = field(default_factory=set)  # requests, which then have no drafts
    num_window_tokens: int = 0  # of what is granted, behind the draft
    tree: DraftTree | None = None  # of which as many nodes are drafted as are granted; None: chains are
    rounds: list[tuple[str, int, int]] = field(default_factory=list)  # request, drafted, accepted

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        for request_id, num_blocks in (scheduled.num_kept_blocks or {}).items():
            if request_id not in scheduled.preempted_request_ids:
                for blocks in self.known[request_id].blocks:
                    assert num_blocks < len(blocks)
                    del blocks[num_blocks:]
        if scheduled.continues:  # as a device does that has come further than the host knows
            known = [len(self.known[key].token_ids) - 1 for key in scheduled.num_scheduled_tokens]
            least = scheduled.num_computed_tokens
            assert all(ours >= theirs for ours, theirs in zip(known, least, strict=True))
            scheduled = replace(scheduled, num_computed_tokens=known)
        output = super().execute(scheduled)
        rows = []
        for request_id, granted in (scheduled.num_draft_tokens or {}).items():
            assert scheduled.num_scheduled_tokens[request_id] == 1
            if self.tree is not None:
                rows.append(self._verify_tree(self.tree, request_id, granted, output))
                continue
            row = self._verify(request_id, granted, output)
            rows += [row] if row else []
        if rows:
            ids, drafts, accepted = zip(*rows, strict=True)
            counts, last = [len(draft) for draft in drafts], [output.sampled_token_ids[key][-1] for key in ids]
            k = max(counts)
            tokens = np.array([draft + [0] * (k - len(draft)) for draft in drafts])
            probs = np.zeros((3, len(ids), k), dtype=np.float32)
            output.rounds = DraftRounds(list(ids), counts, list(accepted), last, tokens, probs, 1.0, 2.0)
            self.rounds += zip(ids, counts, accepted, strict=True)
        return output

    def _slot(self, state: _Known, group: int, position: int) -> int:
        """Where a request has no block there is the null block, which holds anything: what is read there shows."""
        if position // self.block_size >= len(state.blocks[group]):
            return position % self.block_size
        return super()._slot(state, group, position)

    def _verify(self, request_id: str, granted: int, output: ModelRunnerOutput) -> tuple[str, list[int], int] | None:
        """Write a draft behind the last token, and go on from what is read back as far as it is right."""
        state, rng = self.known[request_id], self.rng
        emitted = output.sampled_token_ids[request_id]
        begin = len(state.token_ids) - 1  # of the draft; the token sampled there is known already
        for position in range(begin + granted - self.num_window_tokens, begin + granted):
            self._write(state, position, VOCAB)  # no token of any text
        granted -= self.num_window_tokens
        assert granted > 0
        count = granted if self.num_right is not None else rng.randint(0, granted)
        count = 0 if request_id in self.finds_nothing_for else count
        num_right = rng.randint(0, count) if self.num_right is None else min(self.num_right, count)
        draft: list[int] = []
        for index in range(count):
            right = self._next(state, begin, draft)
            token_id = right if index < num_right else (right + 1) % VOCAB
            draft.append(token_id)
            self._write(state, begin + index, token_id)
        del state.token_ids[begin:]
        num_accepted = 0
        while num_accepted < count and draft[num_accepted] == emitted[num_accepted]:
            num_accepted += 1
            emitted.append(self._next(state, begin, draft[:num_accepted]))
        state.token_ids += emitted
        return (request_id, draft, num_accepted) if count else None

    def _verify_tree(
        self, tree: DraftTree, request_id: str, granted: int, output: ModelRunnerOutput
    ) -> tuple[str, list[int], int]:
        """Write the nodes side by side, move those of a path to the slots behind the text, and go on from what is read there."""
        state, rng = self.known[request_id], self.rng
        emitted = output.sampled_token_ids[request_id]
        begin = len(state.token_ids) - 1
        path, children = [], [child for child in tree.children[0] if child <= granted]
        while children and rng.random() < 0.7:
            path.append(rng.choice(children))
            children = [child for child in tree.children[path[-1]] if child <= granted]
        right: list[int] = []
        for index in range(len(path) + 1):
            right.append(self._next(state, begin, right))
            if index < len(path):
                self._write(state, begin + index, right[index])
        for node in range(1, granted + 1):
            self._write(state, begin + node - 1, right[path.index(node)] if node in path else VOCAB + node)
        for group in range(len(self.windows)):
            for index, node in enumerate(path):
                moved = self.slots[self._slot(state, group, begin + node - 1)]
                self.slots[self._slot(state, group, begin + index)] = moved
        for index in range(len(path)):
            emitted.append(self._next(state, begin, right[: index + 1]))
        state.token_ids[begin:] = emitted
        refused = [VOCAB + children[0]] if children else []
        return request_id, [*right[: len(path)], *refused], len(path)

    def _next(self, state: _Known, begin: int, draft: list[int]) -> int:
        """The token behind a draft, from what the blocks hold."""
        end = begin + len(draft)
        seen = [self._read(state, group, max(0, end - (w or end)), end) for group, w in enumerate(self.windows)]
        return hash_of(seen, state.seed)

    def _write(self, state: _Known, position: int, token_id: int) -> None:
        for group in range(len(self.windows)):
            self.slots[self._slot(state, group, position)] = token_id


@dataclass
class SpeculativeLab(Lab):
    num_speculative_tokens: int = 5
    max_batch: int | None = None
    adaptive: bool = False
    seed: int = 0
    num_right: int | None = None  # as in `SpeculativeMachine`
    lookahead: tuple[int, int] | None = None  # window and n-grams
    tree: bool = False
    drafts_ahead: bool = False  # each round ends with the draft of the next one
    looks_up: bool = False  # each round ends with a look-up of the next draft, which may find none
    runs_ahead: bool = False  # steps are scheduled before the last result is taken, where the scheduler allows it

    def __post_init__(self) -> None:
        self.overrides = {
            "speculative.method": "ngram",
            "speculative.num_speculative_tokens": self.num_speculative_tokens,
            "speculative.max_batch": self.max_batch,
            "speculative.adaptive": self.adaptive,
            "kernels.enforce_eager": not self.looks_up,
        }
        if self.lookahead:
            names = ("lookahead_window", "lookahead_ngram")
            self.overrides |= {f"speculative.{name}": each for name, each in zip(names, self.lookahead, strict=True)}
            self.overrides["speculative.method"] = "lookahead"
        if self.tree:
            self.overrides |= {"speculative.method": "eagle", "speculative.tree": True, "kernels.enforce_eager": True}
        if self.drafts_ahead:
            self.overrides |= {"speculative.method": "eagle", "kernels.enforce_eager": False}
        super().__post_init__()
        rng = random.Random(self.seed)
        self.machine: SpeculativeMachine = SpeculativeMachine(
            self.num_blocks, self.block_size, self.windows, rng=rng, num_right=self.num_right
        )
        if self.lookahead:
            self.machine.num_window_tokens = self.lookahead[0] * (self.lookahead[1] - 1)
        if self.tree:
            self.machine.tree = DEFAULT_TREES["eagle"].cut(self.num_speculative_tokens)

    def step(self) -> list[RequestOutput]:
        if not self.runs_ahead:
            return super().step()
        if not self.in_flight or self.scheduler.may_run_ahead(self.in_flight[0][0]):
            scheduled = self.scheduler.schedule(self.in_flight[0][0] if self.in_flight else None)
            self.manager.check_integrity()
            if (
                scheduled.continues
            ):  # a worker has the round in hand, which it has begun for requests that it knew before
                last = self.in_flight[0][0]
                assert (last.num_draft_tokens, last.new_requests) == (scheduled.num_draft_tokens, [])
            if scheduled.num_scheduled_tokens or scheduled.preempted_request_ids:
                self._carry_out(scheduled)
            if len(self.in_flight) == 1 and self.machine.rng.random() < 0.5:
                return []
        return self.complete() if self.in_flight else []

    def complete(self) -> list[RequestOutput]:
        outputs = super().complete()
        for request in self.scheduler.running:
            computed, blocks = request.num_computed_tokens, self.manager.block_ids_of(request)[0]
            assert computed <= len(request.token_ids) - 1 or request.num_placeholder_tokens
            if self.layout == "paged":
                num_reached = 2 * self.num_speculative_tokens if self.drafts_ahead else 0
                if self.tree and self.drafts_ahead:
                    num_reached = 1 + DEFAULT_TREES["eagle"].cut(self.num_speculative_tokens).num_drafted
                if self.in_flight:  # slots for all that the round under way may accept
                    num_reached += self.num_speculative_tokens + 1
                most = -(-(computed + num_reached) // self.block_size)
                least = -(-computed // self.block_size)
                assert least <= len(blocks) <= most, "blocks that only rejected drafts reached go back at once"
        return outputs
