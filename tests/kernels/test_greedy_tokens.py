from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernels.ops.greedy_tokens as module
from kernels.registry import REGISTRY
from tests.kernels.oracle import GuardBands

IMPLEMENTATIONS = ["reference", "launch"]


def implementation(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return getattr(REGISTRY["greedy_tokens"], name)


def naive(logits: Tensor) -> tuple[list[int], list[bool]]:
    """By Python's own comparisons."""
    rows = logits.tolist()
    finite = [not any(map(math.isnan, row)) and math.isfinite(max(row)) for row in rows]
    return [row.index(max(row)) for row in rows], finite


@pytest.fixture(params=[1, 512])
def many_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are taken whole, or in chunks that a second launch joins, however short they are."""
    monkeypatch.setattr(module, "MAX_WHOLE_ROW", 0)
    monkeypatch.setattr(module, "MANY_PROGRAMS", request.param)


@pytest.mark.parametrize("shape", [(5, 7), (3, 2048), (1, 10_001), (4, 16_385), (100, 33), (1, 1)])
@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_takes_the_first_of_the_largest(which: str, shape: tuple[int, int], device: torch.device) -> None:
    torch.manual_seed(0)
    bands = GuardBands()
    # Rounded, so that most rows have several that are largest.
    logits = bands.wrap(torch.randn(shape, device=device).mul(2).round())
    before = logits.clone()
    token_ids, finite = implementation(which)(logits)
    assert (token_ids.dtype, finite.dtype) == (torch.int64, torch.bool)
    assert (token_ids.tolist(), finite.tolist()) == naive(logits)
    assert torch.equal(logits, before)
    bands.assert_untouched()


@pytest.mark.usefixtures("many_programs")
@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_a_row_without_a_finite_maximum_is_named_and_its_neighbours_are_unharmed(
    which: str, device: torch.device
) -> None:
    num_rows, vocab_size = 3, 4100
    for column in (0, 2047, 2048, 4099):
        for value in (math.nan, math.inf, -math.inf):
            logits = torch.randn(num_rows, vocab_size, device=device)
            logits[-1, column] = value
            token_ids, finite = implementation(which)(logits)
            assert finite.tolist() == [True] * (num_rows - 1) + [value == -math.inf]
            assert token_ids[:-1].tolist() == logits[:-1].argmax(-1).tolist()
            assert 0 <= int(token_ids[-1]) < vocab_size
    # A NaN is not hidden by a larger logit in another chunk, and nothing but -inf leaves nothing to choose.
    logits = torch.zeros(num_rows, vocab_size, device=device)
    logits[-1, 0], logits[-1, -1] = math.nan, 5.0
    assert not implementation(which)(logits)[1][-1]
    token_ids, finite = implementation(which)(torch.full((num_rows, vocab_size), -math.inf, device=device))
    assert not finite.any()
    assert ((token_ids >= 0) & (token_ids < vocab_size)).all()


def test_how_rows_are_cut_changes_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3, 9000, device=device).round()
    expected = naive(logits)
    for longest, programs in ((9000, 1), (8999, 1), (8999, 6), (8999, 9), (8999, 512)):
        monkeypatch.setattr(module, "MAX_WHOLE_ROW", longest)
        monkeypatch.setattr(module, "MANY_PROGRAMS", programs)
        token_ids, finite = module.greedy_tokens(logits)
        assert (token_ids.tolist(), finite.tolist()) == expected


def test_a_draft_vocabulary_takes_one_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_largest_of_row_kernel", None)
    logits = torch.randn(2, 16_384, device=device).round()
    token_ids, finite = module.greedy_tokens(logits)
    assert (token_ids.tolist(), finite.tolist()) == naive(logits)
    with pytest.raises(TypeError):
        module.greedy_tokens(torch.zeros(1, 16_385, device=device))


@pytest.mark.usefixtures("many_programs")
@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_gives_ids_of_a_vocabulary_of_some_tokens(which: str, device: torch.device) -> None:
    """A row without a finite maximum gets one of them too."""
    logits = torch.randn(5, 4100, device=device).round()
    logits[1, 4099], logits[2] = math.nan, -math.inf
    vocabulary = GuardBands(value=-1).wrap(2**40 + 3 * torch.arange(4100, device=device))
    token_ids, finite = implementation(which)(logits, vocabulary)
    assert finite.tolist() == [True, False, False, True, True]
    chosen, _ = naive(logits[[0, 3, 4]])
    assert token_ids[[0, 3, 4]].tolist() == [2**40 + 3 * column for column in chosen]
    assert set(token_ids.tolist()) <= set(vocabulary.tolist())


@pytest.mark.gpu
def test_many_rows_are_taken_whole(device: torch.device) -> None:
    logits = torch.randn(module.MANY_PROGRAMS, 18_000, device=device).round()
    token_ids, finite = module.greedy_tokens(logits)
    assert (token_ids.tolist(), finite.tolist()) == naive(logits)


@pytest.mark.usefixtures("many_programs")
def test_kernel_writes_nothing_but_its_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3, 2100, device=device)
    bands = GuardBands(value=1.0)
    monkeypatch.setattr(torch, "empty", bands.empty)
    token_ids, _ = module.greedy_tokens(logits)
    monkeypatch.undo()
    bands.assert_untouched()
    assert token_ids.tolist() == naive(logits)[0]


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_takes_rows_of_a_wider_tensor(which: str, device: torch.device) -> None:
    """As the logits of a vocabulary that is padded for the matrix product."""
    wide = torch.randn(4, 3000, device=device)
    wide[:, 2900:] = math.nan
    logits = wide[:, :2900]
    token_ids, finite = implementation(which)(logits)
    assert (token_ids.tolist(), finite.tolist()) == naive(logits)
    assert finite.all()


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_of_no_rows(which: str, device: torch.device) -> None:
    token_ids, finite = implementation(which)(torch.empty(0, 64, device=device))
    assert (token_ids.shape, token_ids.dtype, finite.shape, finite.dtype) == ((0,), torch.int64, (0,), torch.bool)


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(2, 64).half(), "logits is float16; expected float32"),
        (torch.zeros(64), r"logits has shape \[64\]; expected \[any, any\]"),
        (torch.zeros(64, 64).t(), "logits has stride 64 in its last dimension; expected 1"),
        (torch.zeros(2, 0), "logits has 0 columns; at least 1 is expected"),
    ],
)
def test_launcher_names_what_is_wrong(logits: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REGISTRY["greedy_tokens"].launch(logits)


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        (torch.zeros(63).long(), r"vocabulary has shape \[63\]; expected \[64\]"),
        (torch.zeros(64).int(), "vocabulary is int32; expected int64"),
        (torch.zeros(64, device="meta").long(), "vocabulary is on meta; expected cpu"),
    ],
)
def test_launcher_names_what_is_wrong_with_a_vocabulary(vocabulary: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REGISTRY["greedy_tokens"].launch(torch.zeros(2, 64), vocabulary)


@pytest.mark.gpu
@pytest.mark.alone
def test_kernel_past_two_to_the_31_elements() -> None:
    vocab_size = 151_936
    num_rows = 2**31 // vocab_size + 2
    logits = torch.zeros(num_rows, vocab_size, device="cuda")
    logits[-1, 151_935] = 1.0
    logits[-2, 5] = math.nan
    token_ids, finite = REGISTRY["greedy_tokens"].launch(logits)
    assert int(token_ids[-1]) == 151_935
    assert finite[-3:].tolist() == [True, False, True]
    assert not token_ids[:-2].any()
