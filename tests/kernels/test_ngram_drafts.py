"""`ngram_drafts` against the proposer on the host, and both against a search through the whole text."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.spec_decode.ngram import NgramText
from kernels.registry import REGISTRY
from tests.kernels.oracle import GuardBands

OP = REGISTRY["ngram_drafts"]
IMPLEMENTATIONS = ["reference", "launch"]


def search(text: list[int], count: int, n_min: int, n_max: int) -> list[int]:
    """By the definition: each length from the longest on, each place from the last on."""
    for n in range(min(n_max, len(text)), n_min - 1, -1):
        for place in range(len(text) - 1, n - 1, -1):
            if text[place - n : place] == text[-n:]:
                return [text[place + index % (len(text) - place)] for index in range(count)]
    return []


def round_of(
    texts: list[list[int]],
    news: list[list[int]],
    granted: list[int],
    device: torch.device,
    *,
    k: int,
    max_len: int,
    rows: list[int] | None = None,
    num_texts: int | None = None,
    n_min: int = 1,
    n_max: int = 3,
) -> dict[str, Any]:
    """Inputs in which each text has just got such tokens, at most k + 1; what lies behind a text, or in other rows, is junk."""
    rows = list(range(len(texts))) if rows is None else rows
    num_texts = num_texts or max(rows) + 2
    held = torch.randint(0, 3, (num_texts, max_len)).int()
    lengths = torch.randint(0, max_len, (num_texts,))
    for row, text in zip(rows, texts, strict=True):
        held[row, : len(text)] = torch.tensor(text).int()
        lengths[row] = len(text)
    ids = [[*new, *[-1] * (k + 1 - len(new)), len(new) - 1, 1, *range(k)] for new in news]
    tensors = {
        "ids": torch.tensor(ids),
        "rows": torch.tensor(rows),
        "num_granted": torch.tensor(granted),
        "texts": held,
        "lengths": lengths,
        "drafts": torch.full((len(texts), k), 55),
        "counts": torch.full((len(texts),), 55),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()} | {"n_min": n_min, "n_max": n_max}


def check(which: str, inputs: dict[str, Any], texts: list[list[int]], news: list[list[int]]) -> list[list[int]]:
    """One call: drafts, counts, texts and lengths are those of the host's proposer, and no other row has changed."""
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
    assert getattr(OP, which)(**inputs) is None
    drafts, n_min, n_max = [], inputs["n_min"], inputs["n_max"]
    held, lengths = before["texts"].clone(), before["lengths"].clone()
    rows = zip(before["rows"].tolist(), before["num_granted"].tolist(), texts, news, strict=True)
    for row, granted, text, new in rows:
        if not granted:
            drafts.append([])
            continue
        whole = [*text, *new][: held.shape[1]]
        held[row, : len(whole)] = torch.tensor(whole).int()
        lengths[row] = len(whole)
        drafts.append(NgramText(whole, n_min, n_max).continuation(granted))
        assert drafts[-1] == search(whole, granted, n_min, n_max)
    k = before["drafts"].shape[1]
    assert inputs["drafts"].tolist() == [[*draft, *[-1] * (k - len(draft))] for draft in drafts]
    assert inputs["counts"].tolist() == [len(draft) for draft in drafts]
    assert torch.equal(inputs["texts"], held)
    assert torch.equal(inputs["lengths"], lengths)
    assert all(torch.equal(inputs[name], value) for name, value in before.items() if name not in OP.mutates)
    return drafts


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize(("n_min", "n_max"), [(1, 1), (1, 3), (2, 3), (3, 3), (4, 9), (1, 16)])
def test_drafts_are_those_of_the_proposer_on_the_host(n_min: int, n_max: int, which: str, device: torch.device) -> None:
    """Texts of one to a few different tokens, shorter than the shortest end and longer than the longest, in rows in no order."""
    rng = random.Random(n_min * 17 + n_max)
    found = 0
    for k in (1, 3, 5, 8):
        alphabet = rng.randint(1, 4)
        texts = [[rng.randrange(alphabet) for _ in range(rng.randint(0, 30))] for _ in range(12)]
        news = [[rng.randrange(alphabet) for _ in range(rng.randint(1, k + 1))] for _ in texts]
        granted = [rng.randint(0, k) for _ in texts]
        rows = rng.sample(range(16), 12)
        options: dict[str, Any] = {"rows": rows, "num_texts": 16, "n_min": n_min, "n_max": n_max}
        inputs = round_of(texts, news, granted, device, k=k, max_len=40, **options)
        drafts = check(which, inputs, texts, news)
        found += sum(map(bool, drafts))
    assert found


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_round_follows_round(which: str, device: torch.device) -> None:
    """Of the tokens that came of the rounds before, which only the device has put there."""
    rng = random.Random(4)
    texts = [[1, 2, 3, 4], [7], []]
    inputs = round_of(texts, [[0]] * 3, [4, 3, 2], device, k=4, max_len=60)
    inputs["rows"], inputs["lengths"] = torch.tensor([2, 0, 1]).to(device), torch.zeros(4).long().to(device)
    for row, text in zip([2, 0, 1], texts, strict=True):
        inputs["texts"][row, : len(text)] = torch.tensor(text).int()
        inputs["lengths"][row] = len(text)
    num_found = []
    for _ in range(10):
        news = [[rng.randrange(3) for _ in range(rng.randint(1, 5))] for _ in texts]
        ids = [[*new, *[-1] * (5 - len(new)), len(new) - 1, 1, 0, 0, 0, 0] for new in news]
        inputs["ids"].copy_(torch.tensor(ids))
        num_found.append(sum(map(bool, check(which, inputs, texts, news))))
        texts = [[*text, *new] for text, new in zip(texts, news, strict=True)]
    assert num_found[-1] == 3


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("text", "new", "draft"),
    [
        ([1, 2, 9, 1], [2], [9, 1, 2, 9, 1]),  # runs into the text's end, and begins anew
        ([7], [7], [7, 7, 7, 7, 7]),
        ([5, 1, 8, 1, 6], [1], [6, 1, 6, 1, 6]),  # of places that fit as well the last one
        ([3, 1, 2, 8, 1, 2, 6, 3, 1], [2], [8, 1, 2, 6, 3]),  # but a longer end first
        ([1, 2, 3], [4], []),
        ([], [4], []),
        ([], [4, 4], [4, 4, 4, 4, 4]),
        ([1, 2], [3, 1, 2, 3], [1, 2, 3, 1, 2]),  # all of what fits may be new
    ],
)
def test_what_followed_the_last_time(
    text: list[int], new: list[int], draft: list[int], which: str, device: torch.device
) -> None:
    inputs = round_of([text], [new], [5], device, k=5, max_len=16)
    assert check(which, inputs, [text], [new]) == [draft]


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_padding_shares_a_row_and_leaves_it_alone(which: str, device: torch.device) -> None:
    texts, news = [[1, 2, 1], [4, 4], [5, 5], [5, 5]], [[2], [4], [5], [5]]
    inputs = round_of(texts, news, [2, 0, 0, 0], device, k=2, max_len=8, rows=[1, 0, 3, 3])
    assert check(which, inputs, texts, news) == [[1, 2], [], [], []]


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_nothing_is_written_behind_the_longest_text(which: str, device: torch.device) -> None:
    texts, news = [[1, 2, 3, 1, 2, 3, 1], [6] * 8], [[2, 3, 1], [6, 6]]
    inputs = round_of(texts, news, [3, 3], device, k=3, max_len=8)
    bands = GuardBands(value=77)
    inputs |= {name: bands.wrap(inputs[name]) for name in OP.mutates}
    assert check(which, inputs, texts, news) == [[3, 1, 2], [6, 6, 6]]
    bands.assert_untouched()


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_new", [1, 3])
def test_texts_of_several_blocks(num_new: int, which: str, device: torch.device) -> None:
    """What is found lies in any of them, at their edges too, or reaches from one into the next."""
    block = 2048
    rng = random.Random(num_new)
    new = [50_000, 50_001, 50_002][:num_new]
    texts = []
    for place in (3, block - 1, block, block + 1, 2 * block, 3 * block - 3, 3 * block + 4):
        text = [rng.randrange(40_000) for _ in range(3 * block + 7)]
        text[place - 3 : place] = [60_000, 60_001, 50_000]
        text[-2:] = [60_000, 60_001]
        texts.append(text)
    texts.append([rng.randrange(5) for _ in range(2 * block)])
    texts.append([rng.randrange(40_000) for _ in range(block - 1)])
    news = [new] * len(texts)
    inputs = round_of(texts, news, [5] * len(texts), device, k=5, max_len=3 * block + 10)
    drafts = check(which, inputs, texts, news)
    assert not drafts[-1]
    assert num_new > 1 or all(drafts[:-2])


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_takes_parts_of_wider_tensors(which: str, device: torch.device) -> None:
    texts, news = [[1, 2, 1], [3, 4, 3, 4]], [[2, 1], [3]]
    inputs = round_of(texts, news, [2, 1], device, k=2, max_len=9)
    for name in ("ids", "texts", "drafts"):
        wide = torch.full((inputs[name].shape[0] + 2, inputs[name].shape[1] + 3), -5, device=device)
        wide = wide.to(inputs[name].dtype)
        wide[1:-1, 1:-2] = inputs[name]
        inputs[name] = wide[1:-1, 1:-2]
    assert check(which, inputs, texts, news) == [[2, 1], [4]]
    assert all((inputs[name]._base[:, 0] == -5).all() for name in ("ids", "texts", "drafts"))


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_of_no_rows(which: str, device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device, num_rows=0)
    before = inputs["texts"].clone(), inputs["lengths"].clone()
    getattr(OP, which)(**inputs)
    assert torch.equal(inputs["texts"], before[0])
    assert torch.equal(inputs["lengths"], before[1])


def test_kernel_writes_nothing_but_what_it_says(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = OP.make_inputs(torch.float32, device, num_rows=7)
    referred = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    OP.reference(**referred)
    bands = GuardBands(value=77)
    inputs |= {name: bands.wrap(value) for name, value in inputs.items() if isinstance(value, Tensor)}
    monkeypatch.setattr(torch, "empty", bands.empty)
    OP.launch(**inputs)
    monkeypatch.undo()
    bands.assert_untouched()
    assert all(torch.equal(inputs[name], referred[name]) for name in OP.mutates)


def test_bytes_are_what_goes_in_and_comes_out() -> None:
    texts, news = [[1, 2, 1], [4, 4]], [[2, 1], [4]]
    inputs = round_of(texts, news, [2, 0], torch.device("cpu"), k=2, max_len=8)
    # A text; two new tokens in and out; row, grant, accepted, two drafts and their count of both; lengths, and one of them out.
    assert OP.bytes_moved(inputs) == 4 * 3 + 12 * 2 + 2 * 8 * (3 + 2 + 1) + 8 * (2 + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(6, 11).int()}, "ids is int32; expected int64"),
        ({"ids": torch.zeros(6, 12).long()}, r"ids has shape \[6, 12\]; expected \[6, 11\]"),
        ({"rows": torch.zeros(5).long()}, r"num_granted has shape \[6\]; expected \[5\]"),
        ({"rows": torch.zeros(6).int()}, "rows is int32; expected int64"),
        ({"num_granted": torch.zeros(6, device="meta").long()}, "num_granted is on meta; expected cpu"),
        ({"texts": torch.zeros(8, 40).long()}, "texts is int64; expected int32"),
        ({"texts": torch.zeros(8, 0).int()}, "texts has 0 columns; at least 1 is expected"),
        ({"texts": torch.zeros(8, 80).int()[:, ::2]}, "texts has stride 2"),
        ({"lengths": torch.zeros(7).long()}, r"lengths has shape \[7\]; expected \[8\]"),
        ({"drafts": torch.zeros(6, 0).long()}, "drafts has 0 columns; at least 1 is expected"),
        ({"drafts": torch.zeros(6, 4).int()}, "drafts is int32; expected int64"),
        ({"counts": torch.zeros(12).long()[::2]}, "counts has stride 2"),
        ({"n_min": 0}, "n_min is 0 and n_max 3"),
        ({"n_min": 4}, "n_min is 4 and n_max 3"),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    inputs = OP.make_inputs(torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        OP.launch(**(inputs | change))
