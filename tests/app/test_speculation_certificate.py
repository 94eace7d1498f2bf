"""Certificates on the Speculation page: which one is shown for a run, what it says, and what the button starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app.components.run_table import table_key
from app.services import Services
from backend.config import EngineConfig
from backend.experiments.certificate import CHUNK_KIND, Verdict, certify
from backend.experiments.certificate_config import DEFAULT_NUM_SAMPLES, CertificateConfig
from backend.metrics.stats import Phase, RunEnd, RunStart
from db.recorder import RunRecorder
from tests.app.pages import page, press, tick, words
from tests.app.speculation_runs import NGRAM, add_plain_run, add_speculation_run
from tests.app.stored_runs import FakeServices
from tests.app.test_cli_spec import excused_lines, make_excused_verdict
from tests.experiments.test_certificate import PROMPTS, Fake, probs, teach


def make_verdict(bias: float = 0.0) -> Verdict:
    config = CertificateConfig.from_dict({"engine": {"speculative": {"method": "ngram"}}, "num_samples": 1000})
    decoders = {"plain": Fake(probs()), "speculative": Fake(probs(bias=bias), "accepted")}
    return certify(config, PROMPTS, **decoders, teacher=teach(probs()), logit_gap_bound=1e-3)


def add_certificate(services: Services, settings: dict[str, Any], verdict: Verdict, label: str | None = None) -> int:
    """Store a certificate's run that has ended."""
    config = CertificateConfig(model="dummy:tiny", engine=EngineConfig().with_overrides(settings))
    run_id = services.repository.create(config.to_dict(), {}, label, kind="certificate")
    recorder = RunRecorder(services.database, run_id)
    recorder.on_run_start(RunStart(100.0, config.to_dict(), {}, {}, (), {}, 0))
    recorder.on_chunk(CHUNK_KIND, verdict.encode, 0, 0)
    error = None if verdict.result == "exact" else f"{verdict.result}: {'; '.join(verdict.reasons)}"
    recorder.on_run_end(RunEnd("finished", 190.0, None, error))
    recorder.close()
    return run_id


def subheaders(app: AppTest) -> list[str]:
    return [element.value.replace("\\", "") for element in app.subheader]


@pytest.fixture
def exact() -> Verdict:
    return replace(make_verdict(), result="exact", reasons=[])


def test_the_latest_certificate_with_the_runs_settings_is_shown(services: FakeServices, exact: Verdict) -> None:
    run_id, _ = add_speculation_run(services)
    others = NGRAM | {"speculative.num_speculative_tokens": 4}
    app = page("speculation", run=str(run_id), view="Certificate")
    assert "No certificate has these settings yet" in words(app)
    # The model of a certificate is its own setting; that of its engine is not looked at.
    add_certificate(services, NGRAM, make_verdict(0.3), "older")
    add_certificate(services, NGRAM | {"model.name": "smollm2-135m"}, exact, "alike")
    newest = add_certificate(services, others, make_verdict(0.3), "other settings")
    app = page("speculation", run=str(run_id), view="Certificate")
    assert subheaders(app) == ["Certificate #3 alike"]
    assert "exact" in words(app)
    assert "χ² = " not in words(app)
    assert f"{exact.sampled.num_samples:,}" in app.table[0].value.to_string()
    history = app.dataframe[0].value
    assert history["Certificate"].tolist() == ["#4 other settings", "#3 alike", "#2 older"]
    assert history["Result"].tolist() == ["rejected", "exact", "rejected"]
    assert history["These settings"].tolist() == ["no", "yes", "yes"]
    app.selectbox(key="speculation-certificate-select").select(newest).run()
    assert app.query_params["certificate"] == str(newest)
    assert "Its settings are not those of the run above" in words(app)
    assert "sampled tokens: χ² = " in words(app)


def test_excused_differences_are_listed(services: FakeServices, exact: Verdict) -> None:
    excused = make_excused_verdict()
    ids = [add_certificate(services, NGRAM, verdict) for verdict in (excused, exact)]
    app = page("speculation", view="Certificate", certificate=str(ids[0]))
    listed = app.dataframe[0].value
    assert list(listed) == ["Prompt", "Output position", "Plain", "Speculation", "Logits below the best"]
    assert listed.to_numpy().tolist() == excused_lines(excused)
    assert "27 of 27" in app.table[0].value.to_string()
    app = page("speculation", view="Certificate", certificate=str(ids[1]))
    assert "Plain" not in app.dataframe[0].value


def test_the_button_starts_one_with_the_runs_settings(services: FakeServices) -> None:
    run_id, _ = add_speculation_run(services, NGRAM | {"cache.block_size": 32})
    app = page("speculation", run=str(run_id), view="Certificate")
    press(app, "Certify these settings")
    ((started, _),) = services.fake_queue.tasks
    stored = services.repository.get(started)
    assert stored is not None
    assert stored.kind == "certificate"
    config = CertificateConfig.from_dict(stored.config)
    assert config.speculative_engine == EngineConfig().with_overrides(
        NGRAM | {"cache.block_size": 32, "speculative.adaptive": False}
    )
    assert config.num_samples == DEFAULT_NUM_SAMPLES
    assert subheaders(app) == [f"Certificate #{started}"]


def test_how_long_one_takes_is_said_and_fewer_samples_are_offered(services: FakeServices, exact: Verdict) -> None:
    run_id, _ = add_speculation_run(services)
    app = page("speculation", run=str(run_id), view="Certificate")
    assert "The default model takes a few minutes on two CPU cores, with 4,096 samples" in words(app)
    samples = app.number_input(key="speculation-certificate-samples")
    assert samples.value == DEFAULT_NUM_SAMPLES
    samples.set_value(19).run()
    press(app, "Certify these settings")
    assert "num_samples = 19" in words(app)
    assert not services.fake_queue.tasks
    app.number_input(key="speculation-certificate-samples").set_value(20).run()
    press(app, "Certify these settings")
    ((started, _),) = services.fake_queue.tasks
    stored = services.repository.get(started)
    assert stored is not None
    assert CertificateConfig.from_dict(stored.config).num_samples == 20
    ended = add_certificate(services, NGRAM, exact)
    app = page("speculation", run=str(run_id), view="Certificate")
    assert f"Last time 4,096 samples took 1 min 30 s (#{ended})" in words(app)


def test_a_run_without_speculation_has_nothing_to_certify(services: FakeServices) -> None:
    run_id, _ = add_plain_run(services)
    app = page("speculation", run=str(run_id), view="Certificate")
    assert "There is no certificate yet" in words(app)
    assert "Certify these settings" not in [button.label for button in app.button]


def test_an_address_that_names_a_certificate_leads_to_it(services: FakeServices, exact: Verdict) -> None:
    """Also where no workload has run, and from Run detail and History."""
    certificate = add_certificate(services, NGRAM, exact)
    older = add_certificate(services, NGRAM, make_verdict(0.3))
    for name in ("speculation", "detail"):
        app = page(name, run=str(certificate))
        assert subheaders(app) == [f"Certificate #{certificate}"]
    add_speculation_run(services)
    app = page("speculation", run=str(certificate), **{"with": str(older)})
    assert subheaders(app) == [f"Certificate #{certificate}"]
    assert not app.warning
    app = page("history")
    runs = services.repository.list()
    tick(app, runs, 1, 2)
    assert app.session_state[table_key(runs)]
    press(app, "Compare")
    assert subheaders(app) == [f"Certificate #{older}"]
    assert not app.warning


def test_a_certificate_that_another_process_makes_says_how_far_it_is(services: FakeServices) -> None:
    config = CertificateConfig(model="dummy:tiny", engine=EngineConfig().with_overrides(NGRAM))
    run_id = services.repository.create(config.to_dict(), {}, kind="certificate")
    recorder = RunRecorder(services.database, run_id)
    recorder.on_phase(Phase("plain decoding"))
    recorder.close()
    app = page("speculation", view="Certificate")
    assert subheaders(app) == [f"Certificate #{run_id}"]
    assert "plain decoding (process " in words(app)
    assert "Its verdict is here when it ends" in words(app)


def test_a_certificate_that_is_gone_is_said(services: FakeServices) -> None:
    run_id, _ = add_speculation_run(services)
    app = page("speculation", run=str(run_id), view="Certificate", certificate="9")
    assert "There is no certificate #9" in words(app)
