"""The window and pool of lookahead decoding, by hand and against a scan."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from backend.sampling_params import SamplingParams
from backend.spec_decode.lookahead import LookaheadProposer, LookaheadWindow, NgramPool, WindowLayout
from backend.spec_decode.proposer import DraftRequest


def test_a_window_by_hand() -> None:
    """Three columns, n-grams of four. Behind the last token, at place 0, nodes stand as deep as in

    1 2 3
    2 3 4
    3 4 5
    """
    layout = WindowLayout(num_columns=3, ngram=4)
    assert layout.depths.tolist() == [1, 2, 3, 2, 3, 4, 3, 4, 5]
    seen = [np.flatnonzero(row).tolist() for row in layout.ancestors]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 3], [0, 1, 4], [0, 1, 2, 5], [0, 3, 6], [0, 1, 4, 7], [0, 1, 2, 5, 8]]
    # Behind the last token and two drafts, bits 0 to 2: the window sees the first alone, and its own from bit 3 on.
    bits = layout.tree_bits(2).tolist()
    assert bits[:3] == [0b1, 0b11, 0b111]
    assert [bin(each) for each in bits[3:6]] == ["0b1001", "0b11001", "0b111001"]
    assert bin(bits[-2]) == "0b10010011001", "rows 3, 4 of the first row, then one of each row below"


@pytest.mark.parametrize(("num_columns", "ngram"), [(1, 2), (5, 2), (1, 6), (4, 3), (14, 5)])
def test_a_node_sees_a_line_of_one_node_at_each_depth(num_columns: int, ngram: int) -> None:
    """Without that it would not be a text that the target reads."""
    layout = WindowLayout(num_columns, ngram)
    assert layout.num_nodes == num_columns * (ngram - 1)
    for node, sees in enumerate(layout.ancestors):
        line = np.flatnonzero(sees)
        assert sorted(layout.depths[line].tolist()) == list(range(1, layout.depths[node] + 1))
        assert line[-1] == node, "nothing behind itself"


def test_iterations_by_hand() -> None:
    """Rows move up; with two tokens more the window moves on by two columns. N-grams are those that the target has made, but
    for their first token."""
    window = LookaheadWindow(np.array([[1, 2, 3], [11, 12, 13]]))
    assert window.next_guess == [1, 11]
    assert window.advance([21, 22, 23]) == []
    assert window.token_ids.tolist() == [[11, 12, 13], [21, 22, 23]]
    assert window.advance([31, 32, 33]) == [[11, 21, 31], [12, 22, 32], [13, 23, 33]]
    window.slide(np.array([[7, 8], [17, 18]]))
    assert window.token_ids.tolist() == [[23, 7, 8], [33, 17, 18]]
    assert window.next_guess == [23, 33]
    assert window.advance([41, 42, 43]) == [[23, 33, 41]]
    assert window.advance([51, 52, 53]) == [[33, 41, 51], [17, 42, 52], [18, 43, 53]]


def test_a_mask_may_need_every_bit() -> None:
    """64 rows: the last bit of an int64 is its sign. None of them is -1, which is no mask."""
    bits = WindowLayout(29, 3).tree_bits(5)
    assert len(bits) == 64
    assert int(bits[-1]) & 2**64 - 1 == 2**63 | (2**35 - 2**6) | 1
    assert -1 not in bits.tolist()


def test_a_pool_by_hand() -> None:
    pool = NgramPool()
    assert pool.continuation(1, 5) == []
    pool.add([1, 2, 3])
    pool.add([3, 4, 1])
    pool.add([9, 9, 9])
    assert pool.continuation(1, 5) == [2, 3, 4, 1, 2]
    assert pool.continuation(1, 3) == [2, 3, 4]
    assert pool.continuation(2, 3) == []
    pool.add([1, 5, 6])  # the newest that begins so
    assert pool.continuation(1, 5) == [5, 6]
    assert pool.continuation(3, 5) == [4, 1, 5, 6]


def test_a_pool_keeps_the_newest_of_many() -> None:
    rng, pool, added = random.Random(1), NgramPool(), []
    for _ in range(300):
        added.append([rng.randrange(12) for _ in range(3)])
        pool.add(added[-1])
        first = rng.randrange(12)
        newest = next((ngram[1:] for ngram in reversed(added) if ngram[0] == first), [])
        assert pool.continuation(first, 2) == newest


def request(request_id: str, max_tokens: int) -> DraftRequest:
    return DraftRequest(request_id, max_tokens, SamplingParams(), 0, 0, 1)


def test_rounds_of_a_proposer_by_hand() -> None:
    """Two columns, n-grams of three: four nodes. Rounds that accept nothing, one that accepts a token, a step without one."""
    proposer = LookaheadProposer(WindowLayout(2, 3), torch.device("cpu"))
    proposer.begin("a", [5, 6, 7, 8], 0)
    (first,) = proposer.windows(["a"]).tolist()
    following = {5: 6, 6: 7, 7: 8, 8: 5}
    assert [following[token_id] for token_id in first[:2]] == first[2:], "columns are pieces of the text"
    output = proposer.propose([request("a", 3 + 4)])
    assert output.num_tokens == [2], "the pool is empty: the first column"
    assert output.token_ids.tolist() == [[first[0], first[2]]]
    assert output.probs is None

    proposer.observe(["a"], torch.tensor([[20, 21]]))
    proposer.extend("a", [9])
    assert proposer.windows(["a"]).tolist() == [[*first[2:], 20, 21]]
    assert proposer.propose([request("a", 1 + 4)]).token_ids.tolist() == [[first[2]]], "no n-gram is whole yet"
    proposer.observe(["a"], torch.tensor([[30, 31]]))
    proposer.extend("a", [10, first[2]])
    (third,) = proposer.windows(["a"]).tolist()
    assert (third[0], third[2]) == (21, 31), "up by a row for the round, and left by a column for the accepted token"
    # The pool has (first[2], 20, 30) and (first[3], 21, 31), one of which begins with the last token.
    assert proposer.propose([request("a", 2 + 4)]).token_ids.tolist() == [
        [20, 30] if first[2] != first[3] else [21, 31]
    ]

    proposer.extend("a", [first[3]])
    (fourth,) = proposer.windows(["a"]).tolist()
    assert (fourth[0], fourth[2]) == (third[1], third[3]), (
        "by a step without a window its columns go, and its rows stay"
    )
    output = proposer.propose([request("a", 9 + 4), request("a", 1 + 4)])
    assert output.num_tokens == [2, 1]
    assert output.token_ids.tolist() == [[21, 31], [21, 0]]


def test_requests_have_windows_and_pools_of_their_own() -> None:
    proposer = LookaheadProposer(WindowLayout(2, 3), torch.device("cpu"))
    for key in "ab":
        proposer.begin(key, [1, 1, 1], 0)
    proposer.observe(["b", "a"], torch.tensor([[4, 5], [6, 7]]))
    proposer.forget("b")
    proposer.begin("b", [1, 1, 1], 0)  # again, after its preemption
    proposer.extend("a", [1])
    proposer.extend("b", [1])
    assert proposer.windows(["a", "b"]).tolist() == [[1, 1, 6, 7], [1, 1, 1, 1]]
    proposer.observe(["a", "b"], torch.tensor([[8, 9], [2, 3]]))
    proposer.extend("a", [1])
    proposer.extend("b", [1])
    assert proposer.propose([request("a", 6), request("b", 6)]).token_ids.tolist() == [[7, 9], [1, 2]]
