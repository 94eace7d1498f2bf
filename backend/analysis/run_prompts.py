"""The token ids of a stored run's requests. A run keeps its answers as ids, and of its prompts what they come from.

Random ids are drawn again from the run's workload: a digest over all prompts, stored with the run, says whether they are the
same. A further turn of a conversation is what was said before it, which is stored, and its own new ids. Text is encoded
again, and the number of tokens is compared with the run's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend.errors import ConfigError, RequestError
from backend.workload.datasets import WorkloadRequest, build_requests, build_warmup_requests, prompts_digest
from backend.workload.plans import plan_requests
from backend.workload.spec import PromptsSource, Workload
from backend.workload.targets import Prompt

MAX_PROMPT_TOKENS = 5_000_000  # of a run in all: they are kept, block by block

_PLACE = re.compile(r".*?-(?:(?P<warmup>warmup-)?(?P<index>\d+)(?:/\d+)?|c(?P<conversation>\d+)-t(?P<turn>\d+))")

Row = Mapping[str, Any]
Encode = Callable[[Prompt], list[int]]  # of a prompt that is text


def is_warmup(request_id: str) -> bool:
    """Whether a request is of its run's warm-up, by the name that the runner gives it."""
    place = _PLACE.fullmatch(request_id)
    return place is not None and place["warmup"] is not None


@dataclass(frozen=True, slots=True)
class RequestTokens:
    token_ids: NDArray[np.uint32]  # prompt, and the answer as far as it is recorded
    num_prompt_tokens: int

    @property
    def prompt(self) -> NDArray[np.uint32]:
        return self.token_ids[: self.num_prompt_tokens]


class RunPrompts:
    """Knows a request by its id, see `backend.experiments.runner.run_workload`, also before it has a record.

    Raises `ConfigError` where the prompts cannot be had again.

    Args:
        workload: of the run.
        model: what the run stores of its model; its `vocab_size` is read.
        max_model_len: as the run had it, in tokens.
        digest: `prompts_digest` as the run stored it.
        encode: of the run's model. Raises `RequestError`.
    """

    def __init__(
        self,
        workload: Workload,
        model: Mapping[str, Any],
        max_model_len: int | None,
        digest: str | None,
        encode: Encode,
    ) -> None:
        self._encode = encode
        self._rows: dict[str, Row] = {}
        self._known: dict[str, RequestTokens] = {}
        self._requests: dict[tuple[bool, int], WorkloadRequest] = {}
        self._turns: dict[tuple[int, int], int] = {}
        self._source = workload.source
        self._num_tokens = 0
        is_text = isinstance(self._source, PromptsSource)
        try:
            self._build(workload, model.get("vocab_size"), max_model_len, digest)
        except ConfigError:
            if not is_text:  # records hold the texts
                raise

    def add(self, rows: Iterable[Row]) -> None:
        """Take in the records of requests that have ended.

        Args:
            rows: with request_id, prompt, token_ids and num_prompt_tokens.
        """
        for row in rows:
            request_id = row["request_id"]
            self._rows[request_id] = row
            known = self._known.pop(request_id, None)
            self._num_tokens -= 0 if known is None else known.num_prompt_tokens

    def tokens_of(self, request_id: str) -> RequestTokens | None:
        """None for a request that is not of the run, or whose conversation is not recorded up to it.

        Raises `ConfigError` for a prompt that is not as long as it was.
        """
        if request_id not in self._known:
            tokens = self._tokens_of(request_id)
            if tokens is None:
                return None
            self._known[request_id] = tokens
        return self._known[request_id]

    def _build(self, workload: Workload, vocab_size: int | None, max_model_len: int | None, digest: str | None) -> None:
        planned = plan_requests(workload, max_model_len).requests
        _check_size(sum(request.prefix_len + request.prompt_len for request in planned))
        requests = build_requests(workload, vocab_size, max_model_len)
        if prompts_digest(requests) != digest:
            raise ConfigError("the prompts drawn from the run's workload today are not those that it sent")
        for request in requests:
            self._requests[False, request.index] = request
            if request.turn is not None:
                self._turns[request.turn.conversation, request.turn.number] = request.index
        for request in build_warmup_requests(workload, vocab_size, max_model_len):
            self._requests[True, request.index] = request

    def _tokens_of(self, request_id: str) -> RequestTokens | None:
        row, request = self._rows.get(request_id), self._request(request_id)
        prompt = self._prompt(request_id, row, request)
        if prompt is None:
            return None
        if row is not None and row["num_prompt_tokens"] not in (None, len(prompt)):
            raise ConfigError(
                f"the prompt of request {request_id} has {len(prompt):,} tokens today and had {row['num_prompt_tokens']:,} "
                "in the run"
            )
        self._num_tokens += len(prompt)
        _check_size(self._num_tokens)
        answer = [] if row is None else row["token_ids"] or []
        return RequestTokens(np.concatenate([prompt, np.array(answer, dtype=np.uint32)]), len(prompt))

    def _prompt(self, request_id: str, row: Row | None, request: WorkloadRequest | None) -> NDArray[np.uint32] | None:
        if isinstance(self._source, PromptsSource):
            text = row["prompt"] if row is not None else None if request is None else request.prompt.text
            return None if text is None else self._encoded(Prompt(text=text, chat=self._source.chat))
        if request is None:
            return None
        own = np.array(request.prompt.token_ids, dtype=np.uint32)
        if request.turn is None or request.turn.number == 0:
            return own
        before_id = re.sub(r"\d+$", str(request.turn.number - 1), request_id)
        before = self.tokens_of(before_id) if before_id in self._rows else None
        return None if before is None else np.concatenate([before.token_ids, own])

    def _encoded(self, prompt: Prompt) -> NDArray[np.uint32] | None:
        try:
            return np.array(self._encode(prompt), dtype=np.uint32)
        except RequestError:  # nor could the run
            return None

    def _request(self, request_id: str) -> WorkloadRequest | None:
        match = _PLACE.fullmatch(request_id)
        if match is None:
            return None
        if match["index"] is not None:
            return self._requests.get((match["warmup"] is not None, int(match["index"])))
        index = self._turns.get((int(match["conversation"]), int(match["turn"])))
        return None if index is None else self._requests.get((False, index))


def _check_size(num_tokens: int) -> None:
    if num_tokens > MAX_PROMPT_TOKENS:
        raise ConfigError(
            f"the run's prompts have more than {MAX_PROMPT_TOKENS:,} tokens in all ({num_tokens:,} so far), too many to be "
            "compared here"
        )
