"""The samples of a prompt: requests that share its blocks.

The first one that is admitted computes the prompt. The others are admitted when that is done. Each begins with the blocks of
one that runs and computes the prompt's last token again, for the logits that it samples from. That token is written into the
last block, which therefore is copied in the same step (copy-on-write, as in PagedAttention, Kwon et al. 2023, section 4.4):
nobody who runs ever finds a block shared that he is about to write into.

What is computed of the prompt outlives the sample that has computed it: `PromptHeirs`. With a window, a sample that has run
on may have given back blocks that another one would begin with; that one then computes the prompt again.
"""

from __future__ import annotations

from collections.abc import Iterable

from backend.core.kv_cache_manager import KVCacheManager
from backend.request import FinishReason, Request


class PromptHeirs:
    """When the last sample that runs ends, the first one that waits keeps its blocks of the prompt, for all the others.

    Such blocks serve nobody for the moment: the scheduler has them given up before it preempts or turns away another
    request. The prompt is then computed again.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._heirs: dict[Request, None] = {}

    def end(self, request: Request, waiting: Iterable[Request], reason: FinishReason) -> None:
        """A sample ends, and still holds its blocks.

        Args:
            waiting: requests in the order in which they are to be admitted.
        """
        samples = request.samples
        assert samples is not None
        samples.remove(request)
        request.samples = None
        self._heirs.pop(request, None)
        if reason == "error" or any(other.status == "running" for other in samples):
            return
        heir = next((other for other in waiting if other.samples is samples and other.status != "swapped"), None)
        if heir is None or heir in self._heirs:
            return
        num_tokens = min(request.num_computed_tokens, heir.num_forked_tokens)
        computed = self._manager.blocks_of_sample(request, num_tokens) if num_tokens else None
        if computed is not None:
            self._manager.take_computed_blocks(heir, computed)
            self._heirs[heir] = None

    def admit(self, request: Request) -> None:
        """A request does not wait any more."""
        self._heirs.pop(request, None)

    def give_up(self, but: Request | None = None) -> bool:
        """Free the blocks of the heir that came last, another than `but`; False when there is none."""
        heir = next((heir for heir in reversed(self._heirs) if heir is not but), None)
        if heir is None:
            return False
        del self._heirs[heir]
        self._manager.free(heir)
        heir.num_computed_tokens = 0
        return True
