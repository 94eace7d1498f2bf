"""`kernels.batch_invariant`: what verification computes are the bits of plain decoding, through the interpreter in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interpreter import interpret_without_cuda

interpret_without_cuda()

from backend.engine.engine_host import EngineHost  # noqa: E402
from backend.models.decoder import Decoder  # noqa: E402
from backend.models.triton_decoder import TritonDecoder  # noqa: E402
from tests.engine.driving import answers, config_of, tokens  # noqa: E402
from tests.helpers import make_tiny_llama  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="through the interpreter; test_speculation_gpu.py has the kernels"
)

SHAPE = {"hidden_size": 56, "intermediate_size": 40, "vocab_size": 272, "num_hidden_layers": 2}
# This model goes on in a circle of three, and with the same token over and over: a look-up in the text finds something.
PROMPTS = {"circle": [87, 229, 125, 110, 236, 145], "same": [55, 1, 159, 69]}
GREEDY: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineHost]:
    monkeypatch.setattr(Decoder, "prepare", lambda self: None)  # weights as a GPU has them, not laid out for a CPU
    host = EngineHost()
    yield host
    host.close()


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> set[bytes]:
    """Every row of logits that a Triton decoder computes."""
    seen: set[bytes] = set()
    compute_logits = TritonDecoder.compute_logits

    def watched(self: TritonDecoder, *args: Any, **options: Any) -> Tensor:
        logits = compute_logits(self, *args, **options)
        seen.update(row.numpy().tobytes() for row in logits)
        return logits

    monkeypatch.setattr(TritonDecoder, "compute_logits", watched)
    return seen


def test_speculated_logits_and_tokens_are_those_of_each_request_alone(
    host: EngineHost, tmp_path: Path, rows: set[bytes]
) -> None:
    """Each token's logits come out again, bit for bit, of rounds that verify it beside another request's and in chunks."""
    model = make_tiny_llama(tmp_path, **SHAPE, num_attention_heads=14, num_key_value_heads=2, head_dim=20)
    settings: dict[str, Any] = {"kernels__backend": "triton", "kernels__enforce_eager": True}
    settings |= {"kernels__batch_invariant": True, "cache__block_size": 2}
    host.load(config_of(model, **settings))
    alone = {key: tokens(host, {key: prompt}, **GREEDY)[key] for key, prompt in PROMPTS.items()}
    plain = set(rows)
    settings |= {"speculative__num_speculative_tokens": 3, "scheduler__max_num_batched_tokens": 7}
    for method in ("ngram", "draft_model"):  # the draft model is the target's first layer: mostly wrong
        rows.clear()
        host.load(config_of(model, speculative__method=method, speculative__adaptive=False, **settings))
        collected = answers(host, PROMPTS, **GREEDY)
        assert {key: answer.token_ids for key, answer in collected.items()} == alone, method
        counts = [answer.last.speculation or (0, 0, 0) for answer in collected.values()]
        drafted, accepted = (sum(count[place] for count in counts) for place in (1, 2))
        assert accepted > 0, method
        assert method == "ngram" or accepted < drafted
        assert plain <= rows, method
