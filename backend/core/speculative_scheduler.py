"""`SpeculativeScheduler`: requests that decode may have drafts verified behind their last token, a chain or a tree of them.

A request that needs a single token is scheduled that token, and the right to so many drafts behind it: what the step's budget
and the pool have left once everybody else is served. So drafts go before anybody is preempted, turned away or held up. The
worker drafts at most that many, verifies them in the same step and says which were accepted.

`num_computed_tokens` counts the last token and what was accepted, never a draft under way: KV of rejected drafts is written
over by what comes next, and is not hashed into the prefix cache. Blocks that only rejected drafts reached go back at once, but
for those that the next draft will reach: where that is made before its round is scheduled, and while the pool has a block for
everybody.

Such a worker, and one that looks drafts up in the text, knows by itself how far a round has come. So the next one may be
scheduled before its result is known, as plain steps are: of the same requests, with as many drafts, in slots for the most that
may be accepted (`may_run_ahead`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backend.core.draft_cost import MAX_CONTINUED
from backend.core.draft_length import AdaptiveLength
from backend.core.output import DraftRounds, ModelRunnerOutput, RequestOutput, SchedulerOutput, TokenOrigin
from backend.core.scheduler import Scheduler
from backend.core.step_plan import StepPlan
from backend.request import FinishReason, Request

MAX_TREE_REQS = 16  # of a round of trees in graphs; others are launched op by op, which holds up everybody
_PLAIN: list[TokenOrigin] = ["plain"]  # shared: nobody changes what a step has yielded


class SpeculativeScheduler(Scheduler):
    """As `Scheduler`; a step needs the result of a round before it, which tells how far its request has come.

    Args:
        num_speculative_tokens: most drafts of a request in one step.
        length: how many of them are worth it; None: always all.
        max_batch: nobody drafts in a step in which more requests decode; None: however many.
        num_window_tokens: that run behind each draft and are never accepted; without room for all of them there is no draft.
        only_in_graphs: nobody drafts beside tokens of prompts; see `DraftCost`.
        drafts_ahead: each round ends with the draft of the next one, which needs slots for it.
        looks_up: each round ends with a look-up of the next draft, which needs no slots, and may find none.
        num_nodes: drafts are trees, and these their nodes down to each depth from 0 on, see `DraftTree.num_drafted_to`; a round
            accepts one of each depth at most, and `num_speculative_tokens` is the deepest. None: drafts are chains.
    """

    def __init__(
        self,
        *args: Any,
        num_speculative_tokens: int,
        length: AdaptiveLength | None = None,
        max_batch: int | None = None,
        num_window_tokens: int = 0,
        only_in_graphs: bool = False,
        drafts_ahead: bool = False,
        looks_up: bool = False,
        num_nodes: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._num_speculative_tokens = num_speculative_tokens
        self._length = length
        self._max_batch = max_batch
        self._num_window_tokens = num_window_tokens
        self._only_in_graphs = only_in_graphs
        # Of a draft behind one that is accepted whole, all but the last are written.
        self._num_ahead = num_speculative_tokens - 1 if drafts_ahead and num_nodes is None else 0
        self._looks_up = looks_up
        self._num_nodes = num_nodes
        # What is written of a tree that is drafted ahead has room in the slots of the tree before.
        self._num_kept_nodes = num_nodes[-1] if drafts_ahead and num_nodes else 0
        self._drafted: dict[str, int] = {}  # by each request's last step that is known, since it was let in
        self._continued: dict[str, int] | None = (
            None  # drafts of a round that the next step repeats, its result unknown
        )
        self._num_kept_blocks: dict[str, int] = {}  # since the last step, of requests that gave some back

    def schedule(self, behind: SchedulerOutput | None = None) -> SchedulerOutput:
        self._continued = behind.num_draft_tokens if behind is not None else None
        return super().schedule(behind)

    def may_run_ahead(self, last: SchedulerOutput) -> bool:
        """As long as nobody drafts, or everybody as in the last step: else a draft depends on what that accepts."""
        if last.num_draft_tokens:
            # Who was in that step without drafts may be gone since; the worker has them in its round all the same, or has none.
            is_whole = len(last.num_draft_tokens) == len(last.num_scheduled_tokens)
            return is_whole and self._may_continue(last.num_draft_tokens)
        if self._max_batch is not None and len(self.running) > self._max_batch:
            return True
        return self._length is not None and self._length.passes_over(self.running)

    def update_from_output(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> list[RequestOutput]:
        if not scheduled.num_scheduled_tokens:
            return []
        if not scheduled.num_draft_tokens:
            return self._update_plain(scheduled, output)
        step, requests = self._in_flight.popleft()
        if step != scheduled.step:
            raise RuntimeError(f"the result of step {scheduled.step} came before that of step {step}")
        sampled, rounds = output.sampled_token_ids, output.rounds
        ended = _cut_to_ends(rounds, requests) if rounds is not None and scheduled.continues else ()
        verified = (
            dict(zip(rounds.request_ids, zip(rounds.num_draft_tokens, rounds.num_accepted, strict=True), strict=True))
            if rounds
            else {}
        )
        granted = scheduled.num_draft_tokens
        outputs = []
        for request in requests:
            if request.status == "finished":
                continue
            request_id = request.request_id
            request.num_placeholder_tokens -= 1
            token_ids = sampled.get(request_id)
            if token_ids is None:
                self._finish(request, "error")
                outputs.append(RequestOutput(request_id, [], "error", output.errors[request_id]))
                continue
            request.num_computed_tokens += len(token_ids) - 1  # the accepted ones: the last has not run yet
            new_token_ids, reason = request.append(token_ids)
            if reason is not None:
                self._finish(request, reason)
            elif request_id in granted:
                self._settle(request)
            num_draft_tokens, num_accepted = verified.get(request_id, (0, 0))
            if reason is None:
                self._drafted[request_id] = num_draft_tokens
            if request_id in granted and request_id not in ended and self._length is not None:
                self._length.learn(request, num_draft_tokens, num_accepted)
            origins = _origins(num_draft_tokens, num_accepted)
            outputs.append(RequestOutput(request_id, new_token_ids, reason, None, origins, num_draft_tokens))
        return outputs

    def _update_plain(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> list[RequestOutput]:
        """Of a step in which nobody might draft."""
        self._drafted.clear()  # nothing that a round behind it could go on from
        outputs = super().update_from_output(scheduled, output)
        for each in outputs:
            if each.error is None:
                each.origins = _PLAIN
        return outputs

    def _may_continue(self, counts: Mapping[str, int]) -> bool:
        """Whether the round with these drafts can be repeated without its result."""
        running, manager = self.running, self.kv_cache_manager
        if not self._num_ahead and not self._looks_up:
            return False
        if self.waiting or len(running) > MAX_CONTINUED or len(counts) != len(running):
            return False
        num_missing, is_drafted, goes_on = 0, False, False
        for request in running:
            count, params = counts.get(request.request_id, 0), request.sampling_params
            drafted = self._drafted.get(request.request_id)
            # By a round that is known, the worker drafts what it may for the request.
            if not count or drafted is None:
                return False
            if drafted != count and not self._looks_up:
                return False
            is_drafted |= drafted > 0
            if request.num_output_tokens < params.min_tokens or request.awaits_last_token:
                return False
            # What comes behind the end of one that ends in the round under way is lost; but not in a tree, whose nodes may stand
            # there and be part of what comes before.
            reach = self._num_tokens_at_most(request, count) + count
            may_end = reach >= request.max_num_tokens
            if reach >= self.max_model_len or (may_end and self._num_nodes is not None):
                return False
            goes_on |= not may_end
            num_slots = self._num_slots_at_most(request, count)
            num_missing += max(0, -(-(num_slots - request.num_slots) // manager.block_size))
        if not is_drafted or not goes_on:  # where look-ups find nothing, plain steps are quicker
            return False
        if sum(counts.values()) + len(counts) > self.max_num_batched_tokens:
            return False
        pool = manager.pool
        if (num_missing + len(running)) * manager.num_groups > pool.num_free_blocks + pool.num_evictable_blocks:
            return False
        return self._length is None or self._length.repeats(running, [counts[it.request_id] for it in running])

    def _num_tokens_at_most(self, request: Request, count: int) -> int:
        """Of a request behind a round under way that verifies so many drafts: those it runs, and one more."""
        return request.num_computed_tokens + count + 1

    def _num_slots_at_most(self, request: Request, count: int) -> int:
        """For as many drafts again behind such a round, and for the draft behind those."""
        num_slots = self._num_tokens_at_most(request, count) + count + self._num_ahead
        return min(num_slots, request.max_num_tokens)

    def _settle(self, request: Request) -> None:
        """After a round of a request that goes on."""
        if request.num_computed_tokens >= request.next_cache_at:
            self.kv_cache_manager.cache_blocks(request)
        num_reached = 1 + self._num_kept_nodes if self._num_kept_nodes and self._has_room() else 0
        if request.num_placeholder_tokens or (self._num_ahead and self._has_room()):
            num_reached = 1 + self._num_speculative_tokens + self._num_ahead
        num_kept = self.kv_cache_manager.give_back_lookahead(request, num_reached)
        if num_kept is not None:
            self._num_kept_blocks[request.request_id] = num_kept

    def _has_room(self) -> bool:
        """Whether the pool has a block for each running request, so that nobody is preempted for what another keeps."""
        pool = self.kv_cache_manager.pool
        return pool.num_free_blocks + pool.num_evictable_blocks >= len(self.running) * self.kv_cache_manager.num_groups

    def _finish(self, request: Request, reason: FinishReason) -> None:
        super()._finish(request, reason)
        self._num_kept_blocks.pop(request.request_id, None)
        self._drafted.pop(request.request_id, None)

    def _to_output(self, plan: StepPlan) -> SchedulerOutput:
        continued = self._continued
        for request in plan.admitted:  # which the worker takes up anew, even one that it has known before
            self._drafted.pop(request.request_id, None)
        granted = self._repeat_drafts(plan, continued) if continued else self._grant_drafts(plan)
        output = super()._to_output(plan)
        output.continues = bool(continued)
        if granted:
            output.num_draft_tokens = granted
        if self._num_kept_blocks and (plan.num_tokens or plan.preempted):
            output.num_kept_blocks, self._num_kept_blocks = self._num_kept_blocks, {}
        return output

    def _grant_drafts(self, plan: StepPlan) -> dict[str, int]:
        """How many tokens may be drafted for whom, a window's included; what is left of the budget is shared out evenly."""
        requests = [request for request, num_tokens in plan.num_tokens.items() if num_tokens == 1 and _decodes(request)]
        granted: dict[str, int] = {}
        if self._only_in_graphs and len(requests) < len(plan.num_tokens):
            return granted
        if self._max_batch is not None and len(requests) > self._max_batch:
            return granted
        most = self._length.limits(requests) if self._length else [self._num_speculative_tokens] * len(requests)
        for place, request in enumerate(requests):
            share = -(-plan.budget // (len(requests) - place))
            # One token comes on top of the drafts, be they accepted or not.
            num_left = request.max_num_tokens - len(request.token_ids) - 1
            if self._num_window_tokens:
                num_drafts = self._reserve_window(plan, request, min(most[place], num_left), share)
            elif self._num_nodes:
                num_drafts = self._reserve_tree(plan, request, min(most[place], num_left), share)
            else:
                num_drafts = self._reserve(plan, request, min(most[place], num_left, share))
            if num_drafts:
                plan.budget -= num_drafts
                granted[request.request_id] = num_drafts
        return granted

    def _repeat_drafts(self, plan: StepPlan, counts: dict[str, int]) -> dict[str, int]:
        """As many for everybody as in the round before, with slots for the case that it accepts them all."""
        for request in plan.num_tokens:
            num_slots = self._num_slots_at_most(request, counts[request.request_id])
            if num_slots > request.num_slots:
                num_more = num_slots - request.num_computed_tokens
                allocation = self.kv_cache_manager.allocate_slots(request, 1, num_more - 1)
                if allocation is None:
                    raise RuntimeError("the pool refused blocks that it had counted as free")
                plan.add(request, 0, allocation.block_ids)
        return counts

    def _reserve(self, plan: StepPlan, request: Request, num_drafts: int) -> int:
        """Take blocks for so many drafts behind the token of a request; for how many there is room."""
        num_tokens, manager = request.num_computed_tokens + 1, self.kv_cache_manager
        num_ahead = max(0, min(self._num_ahead, request.max_num_tokens - num_tokens - num_drafts))
        if num_drafts <= 0 or num_tokens + num_drafts + num_ahead <= request.num_slots:
            return max(0, num_drafts)
        allocation = (
            manager.allocate_slots(request, 1, num_drafts + num_ahead) if num_ahead and self._has_room() else None
        )
        if allocation is None:
            if num_tokens + num_drafts <= request.num_slots:
                return num_drafts
            allocation = manager.allocate_slots(request, 1, num_drafts)
        if allocation is None:
            return request.num_slots - num_tokens
        plan.add(request, 0, allocation.block_ids)
        return num_drafts

    def _reserve_window(self, plan: StepPlan, request: Request, num_drafts: int, share: int) -> int:
        """The same with a window behind the drafts, which is whole and may reach beyond the request's own end."""
        room = min(share, self.max_model_len - len(request.token_ids)) - self._num_window_tokens
        num_tokens = min(num_drafts, room) + self._num_window_tokens
        if num_tokens <= self._num_window_tokens:
            return 0
        return num_tokens if self._reserve(plan, request, num_tokens) == num_tokens else 0

    def _reserve_tree(self, plan: StepPlan, request: Request, depth: int, share: int) -> int:
        """The same for the nodes of a tree of that depth, or as many as there is room for: the first ones are a tree as well.

        Beyond the request's own end there may be slots of nodes that share a position, and beyond the context none.
        """
        assert self._num_nodes is not None
        room = min(share, self.max_model_len - len(request.token_ids))
        return self._reserve(plan, request, min(self._num_nodes[max(0, depth)], room))


def _decodes(request: Request) -> bool:
    """Whether a single token of a request is its last one, and of its output."""
    num_tokens = len(request.token_ids)
    return (
        request.num_placeholder_tokens == 0
        and request.num_computed_tokens == num_tokens - 1 >= request.num_prompt_tokens
    )


def _cut_to_ends(rounds: DraftRounds, requests: Sequence[Request]) -> set[str]:
    """Leave out the drafts for which requests had no room left when the round before was known: this one had begun by then.

    Returns the requests that had room for none.
    """
    room = {it.request_id: it.max_num_tokens - len(it.token_ids) - 1 for it in requests}
    ended = {request_id for request_id in rounds.request_ids if room[request_id] <= 0}
    rounds.leave_out(ended)
    for row, request_id in enumerate(rounds.request_ids):
        rounds.cut(row, room[request_id])
    return ended


def _origins(num_draft_tokens: int, num_accepted: int) -> list[TokenOrigin]:
    if num_draft_tokens == 0:
        return _PLAIN
    accepted: list[TokenOrigin] = ["accepted"] * num_accepted
    return [*accepted, "bonus" if num_accepted == num_draft_tokens else "recovered"]
