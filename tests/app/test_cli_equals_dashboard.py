"""The same settings give the same run from the page and from the command line: configuration, prompts and tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from app import resources
from app.cli import main
from app.components import widgets
from app.services import Services
from tests.app.pages import page, press
from tests.waiting import PATIENCE_S


@pytest.fixture
def real_services() -> Iterator[Services]:
    services = Services.open()
    resources.install(services)
    yield services
    resources.install(None)
    services.close()


def test_page_and_command_line_run_the_same(real_services: Services, capsys: pytest.CaptureFixture[str]) -> None:
    app = page()
    app.selectbox(key=widgets.key_of("model.name")).set_value("dummy:tiny")
    app.number_input(key=widgets.key_of("workload.output_len.value")).set_value(9)
    app.number_input(key=widgets.key_of("workload.sampling.temperature")).set_value(0.7).run()
    press(app, "Start")
    end = real_services.queue.wait(1, timeout=PATIENCE_S)
    assert end is not None
    assert end.status == "finished"

    arguments = ["--set", "model.name=dummy:tiny", "--set", "workload.output_len=9"]
    capsys.readouterr()
    assert main(["run", "--json", *arguments, "--set", "workload.sampling.temperature=0.7"]) == 0
    run_id = json.loads(capsys.readouterr().out)["run_id"]

    runs = [real_services.repository.get(number) for number in (1, run_id)]
    by_page, by_command = (run for run in runs if run is not None)
    for field in ("config", "workload", "resolved_config"):
        assert getattr(by_page, field) == getattr(by_command, field), field
    requests = [
        {
            (row["warmup"], row["index"]): (row["prompt"], row["num_prompt_tokens"], row["token_ids"])
            for row in real_services.repository.requests(run.run_id)
        }
        for run in (by_page, by_command)
    ]
    assert len(requests[0]) == 17
    assert requests[0] == requests[1]
