"""What rounds add up to, against a count by hand and a naive loop; and speedups against the arithmetic of the paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from backend.analysis.draft_rounds import (
    RoundHistory,
    acceptance_length,
    acceptance_rate,
    rates_by_position,
    rolling_length,
)
from backend.analysis.measured_speedup import measure_speedup
from backend.core.output import DraftRounds
from backend.errors import DatabaseError
from backend.metrics.speculation_ledger import Round, RoundTable, SpeculationLedger
from tests.app.speculation_runs import Made, make_run, request_id


def history_of(made: Made) -> RoundHistory:
    history = RoundHistory()
    history.extend((chunk.encode(), chunk.first_step, chunk.last_step) for chunk in made.chunks)
    return history


def naive_rates(rounds: Sequence[Round]) -> list[tuple[int, int, int]]:
    tested: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for each in rounds:
        for index in range(len(each.draft_token_ids)):
            if index < each.num_accepted and index < each.num_emitted:
                tested[index + 1] += 1
                accepted[index + 1] += 1
            elif index == each.num_accepted and index <= each.num_emitted:
                tested[index + 1] += 1
    return [(position, tested[position], accepted[position]) for position in sorted(tested)]


def scripted(*rounds: tuple[int, int, int]) -> list[Round]:
    """Rounds of one request: drafted, accepted, emitted."""
    base = make_run().rounds[0]
    return [
        replace(
            base,
            step=step,
            draft_token_ids=(65,) * drafted,
            draft_probs=(1.0,) * drafted,
            target_probs=(0.5,) * drafted,
            accept_probs=(0.5,) * drafted,
            num_accepted=accepted,
            num_emitted=emitted,
        )
        for step, (drafted, accepted, emitted) in enumerate(rounds)
    ]


def read(rounds: list[Round]) -> RoundHistory:
    """A history of these rounds, one a step."""
    ledger, history = SpeculationLedger(), RoundHistory()
    for each in rounds:
        probs = np.array([each.target_probs, each.accept_probs, each.draft_probs], dtype=np.float32)[:, None]
        drafted = DraftRounds(
            request_ids=[each.request_id],
            num_draft_tokens=[len(each.draft_token_ids)],
            num_accepted=[each.num_accepted],
            token_ids=[each.token_id],
            draft_token_ids=np.array([each.draft_token_ids]),
            probs=probs,
            draft_ms=each.draft_ms,
            verify_ms=each.verify_ms,
        )
        ledger.append(each.step, drafted, {each.request_id: each.position}, {each.request_id: each.num_emitted})
    chunk = ledger.flush()
    assert chunk is not None
    history.extend([(chunk.encode(), chunk.first_step, chunk.last_step)])
    return history


def test_the_columns_are_those_of_the_rounds() -> None:
    made = make_run()
    history = history_of(made)
    assert len(made.chunks) > 2
    assert history.request_ids == [made.warmup[0].request_id, *(request_id(index) for index in range(3))]
    measured = history.of([request_id(index) for index in range(3)])
    assert measured.step.tolist() == [each.step for each in made.rounds]
    assert measured.num_drafted.tolist() == [len(each.draft_token_ids) for each in made.rounds]
    assert history.next_step == made.chunks[-1].last_step + 1
    own = [each for each in made.rounds if each.request_id == request_id(2)]
    assert history.totals_of(request_id(2)) == (
        len(own),
        pytest.approx(1 + sum(min(each.num_accepted, each.num_emitted) for each in own) / len(own)),
    )


def test_a_ledger_is_read_by_column_and_only_what_is_drawn_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    made, drawn, round_of = make_run(), [], RoundTable.round

    def counted(table: RoundTable, row: int) -> Round:
        drawn.append(row)
        return round_of(table, row)

    monkeypatch.setattr(RoundTable, "round", counted)
    history = history_of(made)
    assert len(history.columns.step) == len(made.rounds) + len(made.warmup)
    assert not drawn
    assert len(history.rounds(request_id(2), 3, 9)) == len(drawn) == 6


@pytest.mark.parametrize(("first", "end"), [(0, 5), (3, 60), (50, 1000), (70, 71), (5000, 6000)])
def test_rounds_of_a_request_come_out_of_all_chunks(first: int, end: int) -> None:
    made = make_run()
    own = [each for each in made.rounds if each.request_id == request_id(2)]
    assert history_of(made).rounds(request_id(2), first, end) == own[first:end]


def test_counts_by_position_are_those_of_a_naive_loop() -> None:
    for seed in range(5):
        made = make_run(seed=seed)
        rates = rates_by_position(history_of(made).of([request_id(index) for index in range(3)]))
        assert [(it.position, it.num_tested, it.num_accepted) for it in rates] == naive_rates(made.rounds)


def test_a_stop_inside_a_draft_counts_what_was_delivered() -> None:
    """Five accepted and a bonus; none; two drafted, one accepted; and an end behind the second of four that were accepted."""
    rounds = read(scripted((5, 5, 6), (5, 0, 1), (2, 1, 2), (5, 4, 2))).columns
    assert acceptance_rate(rounds) == (5 + 0 + 1 + 2) / (5 + 5 + 2 + 5)
    # Of the last round two tokens are delivered; the target's own, which the end cut off, counts all the same.
    assert acceptance_length(rounds) == (6 + 1 + 2 + (2 + 1)) / 4
    assert [(it.num_tested, it.num_accepted) for it in rates_by_position(rounds)] == [
        (4, 3),
        (3, 2),
        (1, 1),
        (1, 1),
        (1, 1),
    ]


def test_the_rolling_length_is_that_of_the_last_rounds() -> None:
    rounds = read(scripted((3, 3, 4), (3, 0, 1), (3, 1, 2), (3, 2, 3))).columns
    assert rolling_length(rounds, 2, 100) == [(1, 2.5), (2, 1.5), (3, 2.5)]
    assert rolling_length(rounds, 9, 100) == [(3, 2.5)]
    assert [step for step, _ in rolling_length(rounds, 1, 2)] == [0, 3]


def test_nothing_has_no_figures() -> None:
    nothing = RoundHistory().columns
    assert acceptance_rate(nothing) is None
    assert acceptance_length(nothing) is None
    assert rates_by_position(nothing) == []
    assert rolling_length(nothing, 10, 100) == []


def test_what_was_read_before_a_damaged_chunk_stays() -> None:
    made = make_run()
    history = RoundHistory()
    good = made.chunks[0]
    with pytest.raises(DatabaseError, match="damaged"):
        history.extend([(good.encode(), good.first_step, good.last_step), (b"damaged", 40, 79)])
    assert history.next_step == good.last_step + 1
    assert len(history.columns.step) > 0


def step_row(number: int, batch: int, execute: float, duration: float, prefill: int = 0) -> dict[str, float]:
    return {
        "step": number,
        "num_scheduled_requests": batch,
        "num_prefill_tokens": prefill,
        "num_decode_tokens": batch,
        "execute_ms": execute,
        "duration_ms": duration,
    }


def test_speedup_is_tokens_over_costs_in_plain_steps_of_the_same_batch() -> None:
    """Draft 1.5 and verify 6 ms; plain steps of one take 4 ms and of three 8, so those of two are taken to take 6."""
    rounds = read(scripted((3, 3, 4), (3, 0, 1), (3, 1, 2), (3, 2, 3))).columns
    rates = rates_by_position(rounds)
    steps = [step_row(number, 2, 7.0, 9.0) for number in range(3)] + [step_row(3, 2, 700.0, 900.0, prefill=5)]
    plain = [step_row(0, 1, 4.0, 5.0), step_row(1, 3, 8.0, 11.0), step_row(2, 2, 1000.0, 1000.0, prefill=9)]
    found = measure_speedup(rounds, rates, steps, plain, num_tokens=20, method="ngram")
    assert found is not None
    times = found.times
    assert (times.num_steps, times.draft_ms, times.verify_ms, times.other_ms) == (3, 1.5, 6.0, 1.5)
    assert (times.plain_ms, times.plain_other_ms) == (6.0, 2.0)
    assert found.rounds.speedup == pytest.approx(2.5 / (1.5 / 6 + 6 / 6))
    assert found.share == 10 / 20
    assert found.predicted == pytest.approx(1 / (0.5 / 2 + 0.5))
    # 3 of 4, 2 of 3, 1 of 2; verifying costs as much as a plain step however long it is, an n-gram draft once a round.
    expected = [1, 1.75 / 1.25, (1 + 3 / 4 + 3 / 4 * 2 / 3) / 1.25, (1 + 3 / 4 + 1 / 2 + 1 / 4) / 1.25]
    assert [each.speedup for each in found.each] == pytest.approx(expected)
    assert found.best.num_speculative_tokens == 3


def test_a_draft_model_costs_a_step_of_its_own_for_each_token() -> None:
    rounds = read(scripted((3, 0, 1), (3, 1, 2), (3, 1, 2), (3, 0, 1))).columns
    steps = [step_row(number, 1, 7.5, 8.0) for number in range(4)]
    found = measure_speedup(
        rounds, rates_by_position(rounds), steps, [step_row(0, 1, 3.0, 4.0)], num_tokens=6, method="draft_model"
    )
    assert found is not None
    # A plain step takes 3 ms; verifying three tokens beside the first 6, so 1 more each; drafting 0.5 each.
    # Nobody came to the third.
    costs = [(0.5 + 4) / 3, (1 + 5) / 3]
    assert [each.draft_cost + each.verify_cost for each in found.each[1:]] == pytest.approx(costs)
    assert found.best.num_speculative_tokens == 0


def test_there_is_no_speedup_without_steps_that_can_be_compared() -> None:
    rounds = history_of(make_run()).columns
    rates = rates_by_position(rounds)
    prompts = [step_row(int(step), 1, 1.0, 1.0, prefill=1) for step in rounds.step]
    assert measure_speedup(rounds, rates, prompts, [step_row(0, 1, 1.0, 1.0)], num_tokens=9, method="ngram") is None
    steps = [step_row(int(step), 1, 9.0, 9.0) for step in rounds.step]
    assert measure_speedup(rounds, rates, steps, prompts, num_tokens=9, method="ngram") is None
