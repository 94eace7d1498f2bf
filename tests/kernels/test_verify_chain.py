from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.ops.verify_chain as module
from backend.sample.rejection_sampler import RejectionSampler
from backend.worker.round_download import num_round_bytes, pack_round
from kernels.reference.sample_nodes import SampledNodes
from kernels.registry import REGISTRY
from tests.kernels.oracle import GuardBands

OP = REGISTRY["verify_chain"]
IMPLEMENTATIONS = ["reference", "launch"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 16)


def call(which: str, logits: Tensor, drafts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """ids int64 [num_rows, 2 k + 3], probs float32 [3, num_rows, k]."""
    packed, ids = getattr(OP, which)(logits, drafts, counts)
    num_rows, k = drafts.shape
    assert packed.dtype == torch.uint8
    assert packed.shape == (num_round_bytes(num_rows, k),)
    assert (ids.dtype, ids.shape, ids.data_ptr()) == (torch.int64, (num_rows, 2 * k + 3), packed.data_ptr())
    return ids, packed[ids.nbytes :].view(torch.float32).view(3, num_rows, k)


def naive(logits: Tensor, drafts: Tensor, counts: Tensor) -> tuple[list[list[int]], Tensor]:
    """Token by token, by Python's own comparisons, with probabilities in float64. For finite logits."""
    num_rows, k = drafts.shape
    positions, ids, probs = logits.view(num_rows, k + 1, -1), [], torch.zeros(3, num_rows, k, dtype=torch.float64)
    for row, (draft, count) in enumerate(zip(drafts.tolist(), counts.tolist(), strict=True)):
        likeliest = [scores.index(max(scores)) for scores in positions[row].tolist()]
        token_ids = []
        while len(token_ids) < count and draft[len(token_ids)] == likeliest[len(token_ids)]:
            token_ids.append(draft[len(token_ids)])
        num_accepted = len(token_ids)
        token_ids.append(likeliest[num_accepted])
        ids.append([*token_ids, *[-1] * (k - num_accepted), num_accepted, 1, *draft])
        for j in range(count):
            law = positions[row, j].double().softmax(-1)
            probs[:, row, j] = torch.tensor([law[draft[j]], draft[j] == likeliest[j], 1.0])
    return ids, probs


def drafted(logits: Tensor, k: int, change: float = 0.25) -> Tensor:
    """int64 [num_rows, k]: the likeliest ids, but for some."""
    likeliest = logits.max(-1).indices.view(-1, k + 1)[:, :k]
    return likeliest.where(torch.rand(likeliest.shape, device=logits.device) >= change, 1)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("num_rows", "k", "vocab_size"),
    [(1, 1, 7), (3, 2, 16), (4, 5, 50), (2, 8, 33), (5, 3, 129), (32, 1, 17), (1, 32, 20)],
)
def test_accepts_what_is_likeliest(num_rows: int, k: int, vocab_size: int, which: str, device: torch.device) -> None:
    torch.manual_seed(k)
    bands = GuardBands(value=77)
    # Rounded, so that most positions have several that are largest.
    logits = bands.wrap(torch.randn(num_rows * (k + 1), vocab_size, device=device).mul(2).round())
    drafts = bands.wrap(drafted(logits, k))
    counts = bands.wrap(torch.randint(k + 1, (num_rows,), device=device))
    before = [it.clone() for it in (logits, drafts, counts)]
    ids, probs = call(which, logits, drafts, counts)
    expected_ids, expected_probs = naive(*(it.cpu() for it in before))
    assert ids.tolist() == expected_ids
    torch.testing.assert_close(probs.double().cpu(), expected_probs, atol=0, rtol=1e-5)
    bands.assert_untouched()
    assert all(map(torch.equal, before, (logits, drafts, counts)))


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_sampled_rows_accept_what_they_have_drawn(which: str, device: torch.device) -> None:
    """Beside greedy rows; the probabilities told are the given ones, of drafts that are refused too."""
    torch.manual_seed(5)
    num_rows, k, vocab_size = 6, 4, 40
    logits = torch.randn(num_rows * (k + 1), vocab_size, device=device).mul(2).round()
    drafts, counts = drafted(logits, k), torch.tensor([4, 0, 4, 2, 4, 3], device=device)
    token_ids = torch.randint(vocab_size, (num_rows, k + 1), device=device)
    num_right = [4, 0, 2, 2, 0, 1]
    for row, right in enumerate(num_right):
        token_ids[row, :right] = drafts[row, :right]
        if right < k:
            token_ids[row, right] = (drafts[row, right] + 1) % vocab_size
    token_ids[5] = -1  # greedy
    probs = torch.rand(num_rows, k, device=device)
    sampled = SampledNodes(token_ids, probs)
    packed, ids = getattr(OP, which)(logits, drafts, counts, sampled)
    told = packed[ids.nbytes :].view(torch.float32).view(3, num_rows, k)
    for row, right in enumerate(num_right[:5]):
        count = int(counts[row])
        assert ids[row, : right + 1].tolist() == token_ids[row, : right + 1].tolist()
        assert ids[row, right + 1 : k + 1].tolist() == [-1] * (k - right)
        assert ids[row, k + 1 : k + 3].tolist() == [right, 1]
        assert told[0, row].tolist() == told[1, row].tolist() == [*probs[row, :count].tolist(), *[0.0] * (k - count)]
    expected_ids, expected_probs = naive(logits[5 * (k + 1) :].cpu(), drafts[5:].cpu(), counts[5:].cpu())
    assert ids[5].tolist() == expected_ids[0]
    torch.testing.assert_close(told[:, 5].double().cpu(), expected_probs[:, 0], atol=0, rtol=1e-5)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_a_sampled_row_without_usable_logits_is_not_usable(which: str, device: torch.device) -> None:
    """Which `sample_nodes` leaves without a token."""
    logits = torch.zeros(4, 10, device=device)
    logits[2, 3] = math.nan
    sampled = SampledNodes(torch.tensor([[5, 6, -1, 4]], device=device), torch.full((1, 3), 0.5, device=device))
    three = torch.tensor([3], device=device)
    _, ids = getattr(OP, which)(logits, torch.tensor([[5, 6, 7]], device=device), three, sampled)
    assert ids[0, 4:6].tolist() == [2, 0]
    _, ids = getattr(OP, which)(logits, torch.tensor([[5, 7, 7]], device=device), three, sampled)
    assert ids[0, :6].tolist() == [5, 6, -1, -1, 1, 1]


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of the interpreter, where nothing has a probability
@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize("k", range(1, 9))
def test_agrees_with_the_rejection_sampler(k: int, which: str, device: torch.device) -> None:
    """Also on ties, on logits that are infinite or NaN wherever they stand, and on padding that means nothing."""
    torch.manual_seed(100 + k)
    num_rows, vocab_size = 24, 40
    logits = torch.randn(num_rows * (k + 1), vocab_size, device=device).mul(3).round()
    drafts = drafted(logits, k, 0.1)
    counts = torch.randint(k + 1, (num_rows,), device=device)
    drafts = drafts.where(torch.arange(k, device=device) < counts[:, None], 2**40)
    damaged = torch.randperm(len(logits), device=device)[: len(logits) // 4]
    for place, value in zip(damaged.tolist(), [math.nan, math.inf, -math.inf] * len(logits), strict=False):
        logits[place, torch.randint(vocab_size, (2,))] = value
    logits[damaged[0]] = -math.inf
    logits[damaged[1]] = math.nan
    verified = RejectionSampler()(logits.view(num_rows, k + 1, vocab_size), drafts, counts, None, None)
    expected = pack_round(verified, drafts)
    ids, probs = call(which, logits, drafts, counts)
    expected_ids = expected[: ids.nbytes].view(torch.int64).view(ids.shape)
    usable = verified.finite
    assert 0 < int(usable.sum()) < num_rows
    assert torch.equal(ids[usable], expected_ids[usable])
    # Of the others the number, the flag and the drafts; the token behind those that count is some id.
    assert torch.equal(ids[:, k + 1 :], expected_ids[:, k + 1 :])
    last = ids.gather(1, ids[:, k + 1 : k + 2])
    assert bool(((last >= 0) & (last < vocab_size)).all())
    expected_probs = expected[ids.nbytes :].view(torch.float32).view(probs.shape)
    torch.testing.assert_close(probs[0], expected_probs[0], atol=0, rtol=1e-5, equal_nan=True)
    finite = logits.max(-1).values.isfinite().view(num_rows, k + 1)[:, :k]
    assert torch.equal(probs[1][finite], expected_probs[1][finite])
    assert torch.equal(probs[2], expected_probs[2])


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_only_the_positions_up_to_the_last_token_have_to_be_finite(which: str, device: torch.device) -> None:
    """Three drafts, of which the second is wrong: rows are damaged at one position each."""
    logits = torch.zeros(16, 40, device=device)
    logits[:, 30] = 5.0
    for row in range(4):
        logits[4 * row + row, 2] = math.nan
    drafts = torch.tensor([[30, 3, 30]] * 4, device=device)
    ids, _ = call(which, logits, drafts, torch.tensor([3] * 4, device=device))
    assert ids[:, 4].tolist() == [0, 1, 1, 1]
    assert ids[:, 5].tolist() == [0, 0, 1, 1]
    assert ids[2:, :4].tolist() == [[30, 30, -1, -1]] * 2


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_kernel_s_probabilities_of_logits_far_from_zero(offset: float, device: torch.device) -> None:
    """And of chunks of which nothing is left, beside the largest or at all."""
    logits = torch.full((2, 64), -math.inf, device=device)
    logits[:, 20], logits[:, 40], logits[:, 63] = offset, offset + 1, offset - 300
    counts = torch.ones(1, dtype=torch.int64, device=device)
    for token_id, expected in ((20, 1 / (1 + math.e)), (40, 1 / (1 + 1 / math.e)), (63, 0.0), (5, 0.0)):
        ids, probs = call("launch", logits, torch.tensor([[token_id]], device=device), counts)
        assert probs[0].item() == pytest.approx(expected, rel=1e-5)
        assert ids[0, :4].tolist() == ([40, 40, 1, 1] if token_id == 40 else [40, -1, 0, 1])


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_takes_views_of_wider_tensors(which: str, device: torch.device) -> None:
    """As the logits of a vocabulary that is padded for the matrix product, and drafts shorter than the longest."""
    torch.manual_seed(0)
    wide = torch.randn(12, 64, device=device)
    wide[:, 41:] = math.nan
    logits = wide[:, :41]
    drafts = torch.full((3, 7), 2**40, device=device)
    drafts[:, :3] = drafted(logits, 3)
    counts = torch.tensor([3, 1, 2], device=device)
    ids, probs = call(which, logits, drafts[:, :3], counts)
    expected_ids, expected_probs = naive(logits.cpu(), drafts[:, :3].cpu(), counts.cpu())
    assert ids.tolist() == expected_ids
    torch.testing.assert_close(probs.double().cpu(), expected_probs, atol=0, rtol=1e-5)


def test_kernels_write_nothing_but_their_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = OP.make_inputs(torch.float32, device, num_rows=3, k=4, vocab_size=70)
    arguments = {name: inputs[key] for name, key in zip(("logits", "drafts", "counts"), inputs, strict=False)}
    expected, _ = naive(*(it.cpu() for it in arguments.values()))
    bands = GuardBands(value=1)
    monkeypatch.setattr(torch, "empty", bands.empty)
    ids, _ = call("launch", **arguments)
    monkeypatch.undo()
    bands.assert_untouched()
    assert ids.tolist() == expected


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_of_no_rows(which: str, device: torch.device) -> None:
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    ids, _ = call(which, torch.zeros(0, 8, device=device), nothing.view(0, 2), nothing)
    assert ids.numel() == 0


def test_bytes_are_the_logits_and_the_round() -> None:
    inputs = OP.make_inputs(torch.float16, torch.device("cpu"), num_rows=3, k=2, vocab_size=50)
    packed, _ = OP.reference(**inputs)  # type: ignore[misc]
    sampled = 8 * 3 * 3 + 4 * 3 * 2
    assert OP.bytes_moved(inputs) == 4 * 9 * 50 + 8 * (3 * 2 + 3) + sampled + packed.nbytes


@pytest.mark.gpu
def test_on_a_real_vocabulary(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 2048)
    torch.manual_seed(1)
    logits = torch.randn(33 * 32, 151_936, device=device).mul(4)
    drafts, counts = drafted(logits, 32, 0.02), torch.randint(33, (32,), device=device)
    verified = RejectionSampler()(logits.view(32, 33, -1), drafts, counts, None, None)
    packed, ids = OP.launch(logits, drafts, counts)  # type: ignore[misc]
    expected = pack_round(verified, drafts)
    assert torch.equal(packed[: ids.nbytes], expected[: ids.nbytes])
    launched, wanted = (it[ids.nbytes :].view(torch.float32) for it in (packed, expected))
    torch.testing.assert_close(launched, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(6, 8).half()}, "logits is float16; expected float32"),
        ({"logits": torch.zeros(5, 8)}, r"logits has shape \[5, 8\]; expected \[6, any\]"),
        ({"logits": torch.zeros(8, 6).t()[:6]}, "logits has stride 6"),
        ({"logits": torch.zeros(6, 0)}, "logits has 0 columns; at least 1 is expected"),
        ({"draft_token_ids": torch.zeros(2, 2).int()}, "draft_token_ids is int32; expected int64"),
        ({"draft_token_ids": torch.zeros(3, 2).long()}, r"draft_token_ids has shape \[3, 2\]; expected \[2, any\]"),
        ({"draft_token_ids": torch.zeros(2, 0).long()}, "draft_token_ids has 0 columns; at least 1 is expected"),
        ({"num_draft_tokens": torch.zeros(2).int()}, "num_draft_tokens is int32; expected int64"),
        ({"num_draft_tokens": torch.zeros(2, device="meta").long()}, "num_draft_tokens is on meta; expected cpu"),
        (
            {"sampled": SampledNodes(torch.zeros(2, 2).long(), torch.zeros(2, 2))},
            r"sampled.token_ids has shape \[2, 2\]; expected \[2, 3\]",
        ),
        (
            {"sampled": SampledNodes(torch.zeros(3, 2).long().t(), torch.zeros(2, 2))},
            "sampled.token_ids has stride 2 in its last dimension",
        ),
        (
            {"sampled": SampledNodes(torch.zeros(2, 3).long(), torch.zeros(2, 4)[:, :2])},
            r"sampled.probs has strides \[4, 1\]; expected it contiguous",
        ),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    inputs = {
        "logits": torch.zeros(6, 8),
        "draft_token_ids": torch.zeros(2, 2).long(),
        "num_draft_tokens": torch.zeros(2).long(),
    }
    check: Callable[..., Any] = OP.launch
    with pytest.raises(ValueError, match=message):
        check(**(inputs | change))
