"""`generate` and `run` with speculation: what the documents say of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli import main
from tests.app.test_cli_engine import run_json
from tests.engine.scripted import ids_of, make_scripted
from tests.helpers import make_tiny_llama

PLAIN = ["--set", "model.device=cpu"]
NGRAM = [*PLAIN, "--set", "speculative.method=ngram"]


@pytest.fixture(scope="module")
def circling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that goes round 'abcdef'."""
    folder = make_tiny_llama(tmp_path_factory.mktemp("models") / "circle")  # for its tokenizer
    ids = ids_of(folder, "abcdef")
    return make_scripted(folder, [[*ids, ids[0]]])


def test_generate_tells_how_drafts_fared(capsys: pytest.CaptureFixture[str], circling: Path) -> None:
    arguments = ["generate", "a", "--raw", "--model", str(circling), "--max-tokens", "48"]
    plain = run_json(capsys, *arguments, *PLAIN)
    drafted = run_json(capsys, *arguments, *NGRAM)
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["text"] == plain["text"]
    # After a circle of six tokens, seven rounds of five drafts, all right.
    assert drafted["metrics"]["mean_acceptance_length"] == 6
    assert drafted["metrics"]["draft_acceptance_rate"] == 1
    assert plain["metrics"]["mean_acceptance_length"] is None
    assert plain["metrics"]["draft_acceptance_rate"] is None


def test_a_proposer_that_does_not_exist_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a", "--model", "dummy:tiny", "--set", "speculative.method=crystal_ball"]) == 1
    assert "speculative.method = 'crystal_ball' is not supported" in capsys.readouterr().err
