"""What a head runs of the kernels' ops is what its modules compute, one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.interpreter import interpret_without_cuda

interpret_without_cuda()

from backend.config import KernelSettings  # noqa: E402
from backend.layers.few_token_linear import few_token_linear  # noqa: E402
from backend.layers.linear import Linear  # noqa: E402
from backend.layers.ops import REFERENCE_OPS, LayerOps  # noqa: E402
from backend.spec_decode.draft_vocabulary import DraftVocabulary  # noqa: E402
from backend.spec_decode.heads.eagle import EagleHead  # noqa: E402
from backend.worker.decoders import layer_ops  # noqa: E402
from kernels.ops.greedy_tokens import greedy_tokens  # noqa: E402
from tests.spec_decode.tiny_heads import CPU, make_target, random_ids, randomize  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="through the interpreter; test_heads_gpu.py has kernels"
)
KERNEL_OPS = layer_ops(KernelSettings(backend="triton"))


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("ops", [REFERENCE_OPS, KERNEL_OPS], ids=["reference", "kernels"])
@pytest.mark.parametrize("num_tokens", [1, 6, 40])  # the last are too many for the kernel of few
def test_features_are_fused_and_joined(num_tokens: int, ops: LayerOps, tmp_path: Path) -> None:
    target = make_target(tmp_path)
    head = EagleHead(target.config, 3, ops=ops, dtype=torch.float32, device=CPU)
    randomize(head)
    size, eps = target.config.hidden_size, target.config.rms_norm_eps
    states, token_ids = torch.randn(num_tokens, 3, size), random_ids(512, num_tokens)
    assert head.fusion.weight is not None
    assert head.joint.weight is not None
    normed = exact_norm(states.double(), head.state_norm.weight, eps).flatten(1)
    features = head.fuse(states)
    torch.testing.assert_close(features.double(), normed @ head.fusion.weight.double().t(), atol=1e-4, rtol=1e-4)
    embedded = F.embedding(token_ids, target.embedding)
    halves = (embedded, head.embedding_norm), (features, head.feature_norm)
    normed = torch.cat([exact_norm(half.double(), norm.weight, eps) for half, norm in halves], dim=1)
    joined = head.join_tokens(token_ids, target.embedding, features)
    torch.testing.assert_close(joined.double(), normed @ head.joint.weight.double().t(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(joined, head.join(embedded, features), atol=1e-4, rtol=1e-4)


def test_the_likeliest_token_of_a_draft_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Linear, "prepare", lambda self: None)  # weights as a card has them, not laid out for a CPU
    torch.manual_seed(0)
    token_ids, rows = torch.arange(5, 3005, 3), torch.randn(1000, 66).half()
    hidden = torch.randn(4, 66).half()
    vocabulary = DraftVocabulary(token_ids, rows, 4000, greedy_tokens, few_token_linear)
    logits = vocabulary.logits(hidden)
    expected = hidden.double() @ rows.double().t()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=1e-5)
    assert vocabulary.likeliest(logits).tolist() == [5 + 3 * column for column in expected.argmax(1).tolist()]
