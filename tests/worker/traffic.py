"""Random traffic for the worker: the scheduler's messages without its policy, and what they should come to."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from backend.core.output import NewRequestData, SchedulerOutput
from backend.sampling_params import SamplingParams

VOCAB = 1000


class Known(NamedTuple):
    """A request of a step that the worker knows already."""

    request_id: str
    new_block_ids: list[list[int]]
    num_computed_tokens: int


def step_of(
    num_scheduled_tokens: dict[str, int] | None = None,
    *,
    new: Iterable[NewRequestData] = (),
    known: Iterable[Known] = (),
    finished: Iterable[str] = (),
    preempted: Iterable[str] = (),
) -> SchedulerOutput:
    """A step by hand, its rows in the order of `num_scheduled_tokens`."""
    new, known, rows = list(new), list(known), num_scheduled_tokens or {}
    computed = {item.request_id: item.num_computed_tokens for item in (*new, *known)}
    return SchedulerOutput(
        step=0,
        new_requests=new,
        num_scheduled_tokens=rows,
        num_computed_tokens=[computed[request_id] for request_id in rows],
        new_block_ids={item.request_id: item.new_block_ids for item in known if any(item.new_block_ids)},
        kinds=dict.fromkeys(rows, "prefill"),
        finished_request_ids=list(finished),
        preempted_request_ids=list(preempted),
    )


@dataclass
class Job:
    """A request as its client and the pool see it."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    banned: tuple[int, ...]
    length: int  # it ends when it has so many tokens
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    known: bool = False  # to the worker
    num_told: int = 0  # tokens whose ids the worker was told

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


class Traffic:
    """Plays the scheduler at random: no policy, only what the messages to the worker allow."""

    def __init__(self, seed: int, block_size: int, max_num_reqs: int = 5, max_model_len: int = 45) -> None:
        self.rng = random.Random(f"{seed}/{block_size}")
        self.block_size = block_size
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.blocks_each = -(-max_model_len // block_size)
        self.num_blocks = max_num_reqs * self.blocks_each
        self.free = list(range(1, self.num_blocks + 1))
        self.jobs: list[Job] = []
        self.ended: list[str] = []  # since the last step
        self.count = self.step = 0
        self.num_steady = 0  # coming steps in which requests go on by one token each, and nothing else happens
        self.seen: set[str] = set()

    def schedule(self) -> tuple[SchedulerOutput, list[Job]]:
        """The next step's message, and its jobs in the order of its rows, `computed` as before the step."""
        rng, new, new_block_ids, preempted = self.rng, [], {}, []
        steady = self.num_steady > 0
        self.num_steady = self.num_steady - 1 if steady else rng.choice([0, 0, 0, rng.randint(2, 9)])
        for job in [job for job in self.jobs if job.known and not steady and rng.random() < 0.08]:
            self._give_back(job)
            job.known, job.computed = False, 0
            preempted.append(job.request_id)
            self.seen.add("preempted")
        while not steady and len(self.jobs) < self.max_num_reqs + 2 and rng.random() < 0.7:
            self._arrive()
        scheduled: list[tuple[Job, int]] = []
        for job in self.jobs:
            no_room = not job.known and sum(other.known for other in self.jobs) == self.max_num_reqs
            # Who was preempted in this step comes back in a later one.
            if no_room or job.request_id in preempted or (not steady and rng.random() < 0.2):
                continue
            if steady and not (job.known and job.computed == len(job.token_ids) - 1):
                continue
            if not job.known and rng.random() < 0.2:
                job.computed = rng.randrange(len(job.token_ids))  # as if its beginning had been cached
            needed = len(job.token_ids) - job.computed
            size = needed if rng.random() < 0.5 else rng.randint(1, needed)
            self.seen.add("chunk" if size < needed else "prompt or recompute" if size > 1 else "single")
            blocks = self._take(-(-(job.computed + size) // self.block_size) - len(job.blocks))
            job.blocks += blocks
            if job.known:
                if blocks:
                    new_block_ids[job.request_id] = [list(blocks)]
            else:
                if job.num_output_tokens:
                    self.seen.add("resumed")
                new.append(
                    NewRequestData(
                        job.request_id,
                        list(job.token_ids),
                        job.num_prompt_tokens,
                        job.params,
                        job.banned,
                        [list(blocks)],
                        job.computed,
                    )
                )
                job.known, job.num_told = True, len(job.token_ids)
            scheduled.append((job, size))
        if not steady:
            rng.shuffle(scheduled)
        scheduled.sort(key=lambda item: item[1] > 1)  # single rows first
        output = SchedulerOutput(
            step=self.step,
            new_requests=new,
            num_scheduled_tokens={job.request_id: size for job, size in scheduled},
            num_computed_tokens=[job.computed for job, _ in scheduled],
            new_block_ids=new_block_ids,
            kinds={job.request_id: "prefill" for job, _ in scheduled},
            finished_request_ids=self.ended,
            preempted_request_ids=preempted,
        )
        self.step, self.ended = self.step + 1, []
        return output, [replace(job) for job, _ in scheduled]

    def carry_out(self, output: SchedulerOutput) -> dict[str, int]:
        """What follows a step: computed tokens, sampled ones, and requests that end. Returns what the device sampled."""
        sampled: dict[str, int] = {}
        for job in list(self.jobs):
            size = output.num_scheduled_tokens.get(job.request_id, 0)
            job.computed += size
            ended = self.rng.random() < 0.03  # aborted, or without usable logits: its token counts for nothing
            if size and job.computed == len(job.token_ids):
                sampled[job.request_id] = self.rng.randrange(VOCAB)
                if not ended:
                    job.token_ids.append(sampled[job.request_id])
                    ended = len(job.token_ids) == job.length
            if ended:
                self._give_back(job)
                self.jobs.remove(job)
                if job.known:
                    self.ended.append(job.request_id)
                    self.seen.add("ended")
        return sampled

    def _arrive(self) -> Job:
        rng = self.rng
        length = rng.randint(2, self.max_model_len)
        num_prompt_tokens = rng.randint(1, length - 1)
        min_tokens = rng.choice([0, 0, 1, 3, length])
        params = SamplingParams(
            min_tokens=min_tokens,
            max_tokens=max(3, length),
            temperature=rng.choice([0.0, 0.0, 0.0, 0.0, 0.0, 0.7]),
            seed=self.count,
        )
        prompt = [rng.randrange(VOCAB) for _ in range(num_prompt_tokens)]
        # Names are used again, also while the worker has yet to hear of the last owner's end.
        name = next(
            name for name in rng.sample("abcdefghijkl", 12) if name not in {job.request_id for job in self.jobs}
        )
        banned = rng.choice([(self.count % VOCAB, 7), ()])
        job = Job(name, prompt, num_prompt_tokens, params, banned, length)
        self.count += 1
        self.jobs.append(job)
        return job

    def _take(self, count: int) -> list[int]:
        self.rng.shuffle(self.free)
        return [self.free.pop() for _ in range(count)]

    def _give_back(self, job: Job) -> None:
        self.free += job.blocks
        job.blocks = []


def batch_order(output: SchedulerOutput, jobs: list[Job]) -> list[Job]:
    """Single rows first, the longest before the others, then chunks; equals as they were scheduled."""

    def place(job: Job) -> tuple[bool, int]:
        is_chunk = output.num_scheduled_tokens[job.request_id] > 1
        return is_chunk, 0 if is_chunk else -job.computed

    return sorted(jobs, key=place)
