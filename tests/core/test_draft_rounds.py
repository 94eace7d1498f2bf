"""Rounds of which a part is left out: as if no more had been drafted."""

from __future__ import annotations

import numpy as np

from backend.core.output import DraftRounds


def make_rounds() -> DraftRounds:
    """Three drafts of 5, 5 and 3 tokens, of which 4, 5 and 0 are accepted."""
    drafts = np.array([[10, 11, 12, 13, 14], [20, 21, 22, 23, 24], [30, 31, 32, 0, 0]])
    probs = np.arange(45, dtype=np.float32).reshape(3, 3, 5)
    return DraftRounds(["a", "b", "c"], [5, 5, 3], [4, 5, 0], [19, 29, 39], drafts, probs, 1.0, 2.0)


def test_a_cut_draft_ends_with_the_bonus_token_that_came_in_the_next_one_s_place() -> None:
    rounds = make_rounds()
    rounds.cut(0, 2)  # accepted beyond that: the third drafted token is what comes behind two
    rounds.cut(1, 5)  # no cut
    rounds.cut(2, 1)  # the first one was refused all the same
    assert (rounds.num_draft_tokens, rounds.num_accepted, rounds.token_ids) == ([2, 5, 1], [2, 5, 0], [12, 29, 39])
    rounds = make_rounds()
    rounds.cut(0, 4)  # the refused one is gone, and what came in its place is a bonus
    assert (rounds.num_draft_tokens[0], rounds.num_accepted[0], rounds.token_ids[0]) == (4, 4, 19)


def test_rounds_are_left_out_whole() -> None:
    rounds, whole = make_rounds(), make_rounds()
    rounds.leave_out({"b", "somebody else"})
    assert (rounds.request_ids, rounds.num_draft_tokens, rounds.num_accepted) == (["a", "c"], [5, 3], [4, 0])
    assert rounds.token_ids == [19, 39]
    np.testing.assert_array_equal(rounds.draft_token_ids, whole.draft_token_ids[[0, 2]])
    np.testing.assert_array_equal(rounds.probs, whole.probs[:, [0, 2]])
    rounds.leave_out({"a", "c"})
    assert not rounds.request_ids
    assert rounds.draft_token_ids.shape == (0, 5)
