"""The benchmark of certificates: a tiny model by the command line on the CPU, what is kept of a verdict, and the table."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from backend.experiments.certificate import Verdict
from benchmarks import certificate_table, table
from benchmarks.certificates import figures, main
from tests.experiments.test_certificate import Diverging, Fake, decide, near_ties, probs


def test_a_process_for_each_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dummy's tokens go in circles, which n-grams find; no head can be trained for it, which costs the others nothing."""
    path = tmp_path / "certificates_tiny.json"
    sizes = ["--model", "dummy:tiny", "--samples", "40", "--set", "scheduler.max_num_seqs=20"]
    main([*sizes, "--methods", "eagle,ngram", "-o", str(path)])
    (result,) = certificate_table.load_results(tmp_path)
    assert (result["model"], result["options"]["samples"]) == ("dummy:tiny", 40)
    assert result["environment"]["versions"]["torch"]
    eagle, ngram = result["results"]
    assert (eagle["method"], ngram["method"]) == ("eagle", "ngram")
    assert eagle["error"].startswith("dummy:tiny has random weights")
    assert "verdict" not in eagle
    # Forty samples by each are too few to find a fault, whatever else there is.
    assert (ngram["verdict"], len(ngram["reasons"])) == ("inconclusive", 1)
    assert "40 samples are too few" in ngram["reasons"][0]
    greedy, sampled = ngram["greedy"], ngram["sampled"]
    # Eight prompts ship, of 48 tokens each; the first token of each comes out of the prompt.
    assert (greedy["num_prompts"], greedy["num_tokens"], greedy["num_checked"]) == (8, 8 * 48, 8 * 48)
    assert greedy["from_rounds"]["accepted"] > 0
    assert sum(greedy["from_rounds"].values()) <= 8 * 47
    assert (sampled["num_samples"], sum(sampled["origins"].values())) == (40, 3 * 40)
    assert 0 <= sampled["p_value"] <= 1
    assert all(row["seconds"] > 0 for row in result["results"])
    captured = capsys.readouterr()
    assert "ngram: inconclusive; 40 samples" in captured.err
    assert "Certificates of dummy:tiny, scheduler.max_num_seqs=20" in captured.out


def test_an_unknown_method_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--methods", "ngram,synthetic"])
    assert "unknown: synthetic" in capsys.readouterr().err


def excusing() -> Verdict:
    """Of three prompts with nine tokens each, two of the second's differ by less than the bound, in logits that are told."""
    table_of_ties = near_ties(5e-4)
    return decide(Fake(table_of_ties), Diverging(table_of_ties, "accepted", ranks={4: 1, 6: 1}))


def test_greedy_tokens_of_rounds_are_told_from_sampled_ones() -> None:
    """All tokens but the first of an answer are of one origin: eight of each greedy answer, three of each sample."""
    for origin in ("accepted", "recovered"):
        kept = figures(decide(Fake(probs()), Fake(probs(), origin)))
        assert kept["verdict"] == "exact"
        assert kept["greedy"]["from_rounds"] == {"accepted": 0, "recovered": 0, "bonus": 0} | {origin: 3 * 8}
        assert kept["sampled"]["origins"] == {origin: 3 * 2000}
    plain = figures(decide(Fake(probs()), Fake(probs())))
    assert not any(plain["greedy"]["from_rounds"].values())


def test_differences_that_are_excused_are_kept_with_their_gaps() -> None:
    greedy = figures(excusing())["greedy"]
    assert (greedy["num_tokens"], greedy["num_checked"], greedy["num_forced"]) == (27, 27, 5)
    assert [(each["prompt"], each["position"]) for each in greedy["excused"]] == [(1, 4), (1, 6)]
    assert [each["logit_gap"] for each in greedy["excused"]] == pytest.approx([5e-4, 5e-4])
    unexcused = figures(decide(Fake(near_ties(5e-3)), Diverging(near_ties(5e-3), "accepted", ranks={4: 1})))
    assert (unexcused["verdict"], unexcused["greedy"]["excused"]) == ("rejected", [])


def stored() -> dict[str, Any]:
    equal = figures(decide(Fake(probs()), Fake(probs(), "accepted")))
    rejected = figures(decide(Fake(probs()), Fake(probs(bias=0.2), "accepted")))
    bitwise = figures(decide(Fake(probs()), Fake(probs(), "accepted"), bound=None))
    rejected["reasons"] = ["sampled tokens differ", "and so do others"]
    for row in (equal, rejected, bitwise):
        row["sampled"] |= {"p_value": 0.5, "total_variation": 0.0512, "total_variation_limit": 0.1}
    return {
        "benchmark": "certificates",
        "card": "Card",
        "driver": "570.1",
        "date": "2026-12-01",
        "commit": "0123456789",
        "limits": None,
        "environment": {"versions": {"torch": "2.11", "triton": "3.6"}},
        "model": "m",
        "options": {"methods": [], "set": ["model.dtype=float32"], "samples": 2000},
        "results": [
            {"method": "ngram", "seconds": 12.3, **equal},
            {"method": "eagle", "seconds": 1234.0, **figures(excusing())},
            {"method": "draft_model", "seconds": 12.0, **rejected},
            {"method": "lookahead", "seconds": 12.0, **bitwise},
            {"method": "medusa", "seconds": 2.0, "error": "no head"},
        ],
    }


def test_a_stored_result_becomes_a_table_that_says_what_is_not_exact(tmp_path: Path) -> None:
    (tmp_path / "certificates.json").write_text(json.dumps(stored()))
    lines = certificate_table.markdown(certificate_table.load_results(tmp_path)).splitlines()
    assert lines[:2] == ["**Card, driver 570.1, torch 2.11, triton 3.6, 2026-12-01, commit 0123456**", ""]
    assert lines[2] == (
        "| Certificates of m, model.dtype=float32 | verdict | greedy tokens checked | of rounds | accepted | excused "
        "| samples by each | p of χ² | total variation (limit) | seconds |"
    )
    assert lines[4] == "| ngram | exact | 27 of 27 | 24 | 24 | 0 | 2,000 | 0.5 | 0.051 (0.100) | 12 |"
    assert lines[5].startswith("| eagle | exact | 27 of 27 | 24 | 24 | 2, up to 0.0005 of 0.001 | 2,000 | ")
    assert lines[5].endswith(" | 1,234 |")
    assert lines[6].startswith("| draft_model | rejected | 27 of 27 | ")
    assert "| none may be |" in lines[7]
    assert lines[8] == "| medusa | – | – | – | – | – | – | – | – | 2 |"
    assert lines[9:] == ["", "draft_model: sampled tokens differ; and so do others.", "", "medusa: no head."]
    assert "medusa: no head." in certificate_table.text_table(stored())
    # It is part of the README's section.
    assert "| ngram | exact | 27 of 27 |" in table.performance(tmp_path)


def test_what_is_kept_is_plain_data() -> None:
    kept = figures(excusing())
    assert json.loads(json.dumps(kept)) == kept
    assert kept["sampled"].keys() == {*asdict(excusing().sampled), "origins"}
