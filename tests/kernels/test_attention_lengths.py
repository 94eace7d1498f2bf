from __future__ import annotations

import pytest
import torch

from kernels import attention_lengths, timing
from kernels.attention_lengths import attention_points, peak_memory_bytes, unfused_attention

CPU = torch.device("cpu")


def test_unfused_attention_is_the_definition() -> None:
    query, key, value = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    output = unfused_attention(query, key, value, 0.5)
    for head in range(2):
        for row in range(5):
            scores = 0.5 * (key[0, head, : row + 1] @ query[0, head, row])
            expected = torch.softmax(scores, 0) @ value[0, head, : row + 1]
            torch.testing.assert_close(output[0, head, row], expected)


def test_all_implementations_agree_and_only_the_unfused_holds_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "CPU_CACHE_BYTES", 2**16)
    points = {point.implementation: point for point in attention_points(256, CPU, torch.float32)}
    assert list(points) == ["unfused", "fused, torch", "paged reference"]
    for name, point in points.items():
        assert point.p50_us is not None
        assert point.problem is None
        if name != "unfused":
            assert point.max_abs_error is not None
            assert point.max_abs_error < 1e-5
    heads = attention_lengths.HEADS["cpu"]["num_heads"]
    scores = heads * 256 * 256 * 4
    assert points["unfused"].peak_memory_bytes is not None
    assert points["fused, torch"].peak_memory_bytes is not None
    assert points["unfused"].peak_memory_bytes >= 2 * scores  # scores and weights
    assert points["fused, torch"].peak_memory_bytes < scores


def test_peak_memory_counts_what_lives_at_once() -> None:
    def one_after_the_other() -> None:
        for _ in range(3):
            torch.zeros(1000)

    def at_once() -> torch.Tensor:
        parts = [torch.zeros(1000) for _ in range(3)]
        return parts[0].view(10, 100)  # a view holds no memory of its own

    assert peak_memory_bytes(one_after_the_other, CPU) <= 2 * 4000
    assert peak_memory_bytes(at_once, CPU) == 3 * 4000


@pytest.mark.gpu
def test_ours_and_torchs_agree_on_a_gpu() -> None:
    points = list(attention_points(1024, torch.device("cuda"), torch.bfloat16))
    assert [point.implementation for point in points] == ["unfused", "fused, torch", "paged, ours"]
    assert all(point.max_abs_error is None or point.max_abs_error < 5e-2 for point in points)
    memory = [point.peak_memory_bytes or 0 for point in points]
    assert memory[0] > 4 * max(memory[1:])
