"""What the prefix cache did for each request of a run, and why it did not do more.

A block's content is all tokens up to its end, so contents form a tree, and a request's full blocks are a path in it. What
could be found at a moment comes from `PrefixHistory`, and which tokens those were from the run's prompts. In a run that began
with a warm cache, what earlier runs had left comes from `EarlierBlocks` and from their prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from backend.analysis.run_prompts import RequestTokens
from backend.metrics.prefix_history import Admission, BlockLife, PrefixHistory

# cached:  came from the cache
# lost:    could be found once, or stands behind a block that could: evicted, forgotten in a reset, withdrawn
# pending: another request was computing the same tokens
# new:     no block with these tokens could ever be found
# end:     the rest behind the last block that could have been found, at least the prompt's last token
Fate = Literal["cached", "lost", "pending", "new", "end"]
FATES: tuple[Fate, ...] = ("cached", "new", "lost", "pending", "end")

# last_token, partial_block: all blocks that could be were found; the prompt is, or is not, a multiple of the block size
# empty, nothing: no block could be found; no prompt in the cache begins with the same token
# differs, ends: from the nearest prompt; it has no further token
# unfinished: the nearest request ended before it had computed this block, or waits to compute it
# earlier: what was found is nobody's whose prompt is known
# unknown: as nothing, but there were blocks of earlier runs whose tokens are not known
# window: it is there, but not in the layers with a window
CauseKind = Literal[
    "last_token",
    "partial_block",
    "empty",
    "nothing",
    "unknown",
    "differs",
    "ends",
    "unfinished",
    "earlier",
    "forked",
    "window",
]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens `start` to `end` of a prompt, `end` not included."""

    fate: Fate
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Nearest:
    """Of the prompts whose first block could be found, the one that shares most tokens; of equal ones the first."""

    request_id: str  # maybe of an earlier run
    num_common: int  # first tokens, the same in both
    num_findable: int  # of its tokens, those in blocks that could be found
    token_ids: NDArray[np.uint32]  # its prompt, and its answer as far as there was one
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PromptFate:
    """A prompt at its request's first admission."""

    admission: Admission
    token_ids: NDArray[np.uint32]  # the prompt
    stretches: tuple[Stretch, ...]
    cause: CauseKind | BlockLife | Admission  # a block that was lost, or who was computing it
    nearest: Nearest | None
    providers: tuple[str, ...]  # whose blocks it found; those of earlier runs that are not known have no name
    knows_all: bool = True  # whether all that could be found is of prompts that are known

    @property
    def num_cached_tokens(self) -> int:
        return self.num_tokens("cached")

    def num_tokens(self, fate: Fate) -> int:
        return sum(stretch.end - stretch.start for stretch in self.stretches if stretch.fate == fate)


@dataclass(frozen=True, slots=True)
class EarlierRuns:
    """What is known of the runs that had filled the cache before a run began."""

    lives: Sequence[BlockLife] = ()  # `EarlierBlocks.lives`
    tokens: Mapping[str, RequestTokens] = field(default_factory=dict)  # of their requests that are known, in order


class PrefixCache:
    """Args:
    history: of the run, as far as it has come.
    tokens: of the requests that are known.
    earlier: for a run that began with a warm cache.
    """

    def __init__(
        self, history: PrefixHistory, tokens: Mapping[str, RequestTokens], earlier: EarlierRuns | None = None
    ) -> None:
        self.history = history
        self.tokens = tokens
        self.block_size = history.block_size
        self._earlier = earlier or EarlierRuns()
        self._contents: dict[tuple[int, bytes], int] = {}  # (content of the block before or -1, tokens) -> content
        self._earlier_paths = {key: self._path(known.token_ids) for key, known in self._earlier.tokens.items()}
        self.paths = {key: self._path(tokens[key].token_ids) for key in history.admissions if key in tokens}
        self._lives: dict[tuple[int, int], list[BlockLife]] = {}  # (content, group) -> in order
        self._unknown: list[BlockLife] = []  # of which nobody knows the tokens
        self._index_lives()
        self._stretches: dict[str, tuple[Stretch, ...]] = {}

    def fate(self, request_id: str) -> PromptFate:
        """Raises `KeyError` for a request that was not admitted, or whose tokens are not known."""
        admission, tokens = self.history.admissions[request_id], self.tokens[request_id]
        return PromptFate(
            admission,
            tokens.prompt,
            self.stretches(request_id),
            self._cause(admission),
            self._nearest(admission),
            self._providers(admission),
            not self._has_unknown(admission),
        )

    def stretches(self, request_id: str) -> tuple[Stretch, ...]:
        """The whole prompt, in order. Raises as `fate`."""
        known = self._stretches.get(request_id)
        if known is None:
            known = self._stretches[request_id] = self._cut(request_id)
        return known

    def _cut(self, request_id: str) -> tuple[Stretch, ...]:
        admission, size = self.history.admissions[request_id], self.block_size
        num_tokens = self.tokens[request_id].num_prompt_tokens
        last = (num_tokens - 1) // size  # blocks that may be found
        fates: list[Fate] = ["cached"] * admission.num_found
        for index in range(admission.num_found, last):
            fate = self._block_fate(admission, index)
            fates.append((fates[-1] if index > admission.num_found else "lost") if fate == "cached" else fate)
        made: list[Stretch] = []
        for index, fate in enumerate(fates):
            begin = made.pop().start if made and made[-1].fate == fate else index * size
            made.append(Stretch(fate, begin, (index + 1) * size))
        return (*made, Stretch("end", last * size, num_tokens))

    def _path(self, token_ids: NDArray[np.uint32]) -> list[int]:
        """Contents of the full blocks of these tokens."""
        data, width, content, path = token_ids.tobytes(), 4 * self.block_size, -1, []
        for begin in range(0, len(data) - width + 1, width):
            content = self._contents.setdefault((content, data[begin : begin + width]), len(self._contents))
            path.append(content)
        return path

    def _index_lives(self) -> None:
        found = {
            id(life): self.paths[request_id][index]
            for request_id, admission in self.history.admissions.items()
            if request_id in self.paths and not admission.is_forked
            for group in admission.found
            for index, life in enumerate(group)
            if life is not None
        }
        for life in self._earlier.lives:  # before the same ones of the history, which do not know whose they are
            path = self._earlier_paths.get(life.owner or "", ())
            if life.index < len(path):
                self._lives.setdefault((path[life.index], life.group), []).append(life)
            elif not path:
                self._unknown.append(life)
        for life in self.history.lives:
            path = self.paths.get(life.owner or "", ())
            content = path[life.index] if life.index < len(path) else found.get(id(life))
            if content is not None:
                self._lives.setdefault((content, life.group), []).append(life)
            elif not path and (life.owner or not self._earlier.lives):
                self._unknown.append(life)

    def _has_unknown(self, admission: Admission) -> bool:
        return any(life.is_findable(admission.at) for life in self._unknown)

    def _providers(self, admission: Admission) -> tuple[str, ...]:
        path, names = self.paths[admission.request_id], {}
        for group, lives in enumerate(admission.found):
            for index, life in enumerate(lives):
                if life is None or admission.is_forked:
                    continue
                same = [life, *self._lives.get((path[index], group), ())]
                names |= dict.fromkeys([it.owner for it in same if it.owner and it.is_findable(admission.at)][:1])
        return tuple(names)

    def _is_findable(self, content: int, at: int) -> bool:
        """In all KV groups that need it: of those with a window a later block may do."""
        sliding = self.history.sliding if len(self.history.sliding) < self.history.num_groups else ()
        return all(
            any(life.is_findable(at) for life in self._lives.get((content, group), ()))
            for group in range(self.history.num_groups)
            if group not in sliding
        )

    def _block_fate(self, admission: Admission, index: int) -> Fate:
        """`cached` of one that could be found, had those before it been there."""
        content = self.paths[admission.request_id][index]
        if self._is_findable(content, admission.at):
            return "cached"
        if self._computing(admission, index) is not None:
            return "pending"
        return "new" if self._lost(content, admission.at) is None else "lost"

    def _computing(self, admission: Admission, index: int) -> Admission | None:
        """The first who was about to compute the same block of a prompt."""
        content, end = self.paths[admission.request_id][index], (index + 1) * self.block_size
        for other, computed in admission.computing:
            path = self.paths.get(other, ())
            in_prompt = other in self.tokens and end <= self.tokens[other].num_prompt_tokens
            if computed < end and in_prompt and path[index] == content:
                return self.history.admissions[other]
        return None

    def _lost(self, content: int, at: int) -> BlockLife | None:
        """The last block with this content that could be found before."""
        lives = [life for group in range(self.history.num_groups) for life in self._lives.get((content, group), ())]
        return max((life for life in lives if life.end <= at), key=lambda life: life.end, default=None)

    def _cause(self, admission: Admission) -> CauseKind | BlockLife | Admission:
        num_tokens = self.tokens[admission.request_id].num_prompt_tokens
        index = admission.num_found
        if admission.is_forked:
            return "forked"
        if index >= (num_tokens - 1) // self.block_size:
            return "partial_block" if num_tokens % self.block_size else "last_token"
        content = self.paths[admission.request_id][index]
        known = self._computing(admission, index) or self._lost(content, admission.at)
        if known is not None:
            return known
        if self._is_findable(content, admission.at):
            return "window"
        if not any(life.is_findable(admission.at) for life in self.history.lives):
            return "empty"
        nearest = self._nearest(admission)
        common = 0 if nearest is None else nearest.num_common
        if common < index * self.block_size:
            return "earlier"
        if nearest is None or not common:
            return "unknown" if self._has_unknown(admission) else "nothing"
        if common >= (index + 1) * self.block_size:
            return "unfinished"
        return "ends" if common == len(nearest.token_ids) else "differs"

    def _nearest(self, admission: Admission) -> Nearest | None:
        prompt, best = self.tokens[admission.request_id].prompt, None
        for other, path in (*self._earlier_paths.items(), *self.paths.items()):
            before = self.history.admissions.get(other)  # None: in an earlier run
            if before is not None and before.at >= admission.at:
                continue
            if not path or not self._is_findable(path[0], admission.at):
                continue
            tokens = self._earlier.tokens[other] if before is None else self.tokens[other]
            token_ids, common = tokens.token_ids, num_common(prompt, tokens.token_ids)
            if best is not None and common <= best.num_common:
                continue
            num_findable = self._num_findable(path, admission.at)
            if before is not None and self.history.ends.get(other, admission.at + 1) > admission.at:
                # Of its answer, what is sure to have been there.
                token_ids = token_ids[: max(tokens.num_prompt_tokens, num_findable)]
                common = min(common, len(token_ids))
            if best is None or common > best.num_common:
                best = Nearest(other, common, num_findable, token_ids, tokens.num_prompt_tokens)
        return best

    def _num_findable(self, path: list[int], at: int) -> int:
        """Tokens."""
        for index, content in enumerate(path):
            if not self._is_findable(content, at):
                return index * self.block_size
        return len(path) * self.block_size


def num_common(first: NDArray[np.uint32], second: NDArray[np.uint32]) -> int:
    """How many first elements are equal in both."""
    length = min(len(first), len(second))
    unlike = np.flatnonzero(first[:length] != second[:length])
    return int(unlike[0]) if unlike.size else length
