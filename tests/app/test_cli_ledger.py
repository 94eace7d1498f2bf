"""`servelab runs ledger`: the steps of a run that was really made."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from app.cli import main
from app.services import Services
from backend.core.block_events import BlockEventKind
from tests.app.stored_runs import add_run


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main(["runs", "ledger", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_steps_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Two prompts that share two blocks of sixteen tokens, one after the other."""
    settings = ["source.kind=shared_prefix", "source.groups=1", "source.prompts_per_group=2", "source.prefix_len=32"]
    settings += ["source.suffix_len=5", "arrivals.kind=closed_loop", "arrivals.concurrency=1", "output_len=4"]
    options = [part for setting in settings for part in ("--set", f"workload.{setting}")]
    assert main(["run", "--set", "model.name=dummy:tiny", "--set", "model.device=cpu", *options, "--json"]) == 0
    run_id = str(json.loads(capsys.readouterr().out)["run_id"])
    whole = lines(capsys, run_id)
    assert [step["step"] for step in whole] == list(range(len(whole)))
    ran = {}
    for step in whole:
        for request in step["requests"]:  # type: ignore[attr-defined]
            ran[request["request_id"]] = ran.get(request["request_id"], 0) + request["num_scheduled_tokens"]
    measured = [count for key, count in ran.items() if "warm" not in key]
    assert measured == [37 + 3, 37 + 3 - 32], "the second finds the prefix that the first has computed"
    shared = [event for step in whole for event in step["events"] if event["kind"] == "share"]  # type: ignore[attr-defined]
    assert [len(event["block_ids"]) for event in shared] == [2]
    last = len(whole) - 1
    (step,) = lines(capsys, f"#{run_id}", "--first", str(last), "--blocks")
    assert {key: step[key] for key in whole[last]} == whole[last]
    (held,) = step["held"].values()  # type: ignore[attr-defined]
    assert shared[0]["block_ids"] == held[0][:2]
    assert set(shared[0]["block_ids"]) <= set(step["cached"])  # type: ignore[arg-type]
    assert len(lines(capsys, run_id, "--first", "1", "--last", "2")) == 2


def test_the_help_knows_every_kind_of_event(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "ledger", "--help"]) == 0
    assert set(get_args(BlockEventKind)) <= set(re.findall(r"\w+", capsys.readouterr().out))


def test_steps_that_verified_drafts_have_their_rounds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What the rounds add up to is what the run's summary says, which `runs show` prints."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "".join(map(chr, range(32, 127)))}) + "\n")
    settings = ["speculative.method=ngram", "speculative.adaptive=false", f"workload.source.file={prompts}"]
    settings += ["workload.output_len=30", "workload.sampling.ignore_eos=true", "workload.warmup_requests=0"]
    options = [part for setting in settings for part in ("--set", setting)]
    assert main(["run", "--set", "model.name=dummy:tiny", "--set", "model.device=cpu", *options, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    summary, run_id = document["summary"], str(document["run_id"])
    whole = lines(capsys, run_id)
    rounds: list[Any] = [each for step in whole for each in step.get("rounds", ())]  # type: ignore[attr-defined]
    assert rounds
    assert "rounds" not in whole[0], "a prompt is no draft"
    drafted = sum(len(each["draft_token_ids"]) for each in rounds)
    delivered = [min(each["num_accepted"], each["num_emitted"]) for each in rounds]
    assert summary["draft_acceptance_rate"] == sum(delivered) / drafted
    assert summary["mean_acceptance_length"] == 1 + sum(delivered) / len(rounds)
    assert {len(each["target_probs"]) - len(each["draft_token_ids"]) for each in rounds} == {0}
    last = next(step for step in reversed(whole) if "rounds" in step)
    assert lines(capsys, run_id, "--first", str(last["step"]))[0] == last
    assert main(["runs", "show", run_id]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"^Draft acceptance rate +{100 * sum(delivered) / drafted:.1f} ?%$", shown, re.MULTILINE)
    assert "Mean acceptance length" in shown


def test_a_run_without_a_ledger_and_one_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with Services.open() as services:
        run_id = add_run(services)
    assert main(["runs", "ledger", str(run_id)]) == 1
    assert f"run #{run_id} has no step ledger" in capsys.readouterr().err
    assert main(["runs", "ledger", "999"]) == 1
    assert "999" in capsys.readouterr().err
