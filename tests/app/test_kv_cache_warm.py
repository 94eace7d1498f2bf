"""Runs that begin with a warm cache: their misses know the prompts of the runs before. Real runs, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import update

from app import resources
from app.components import kv_cache_earlier
from app.components.kv_cache_prefix_source import View
from app.services import Services, start_run
from backend.config import EngineConfig
from backend.workload.spec import Workload
from db.models import RunRow
from db.session import Database
from tests.app.pages import page, words

BLOCK_SIZE = 16
CONFIG = EngineConfig().with_overrides(
    {"model.name": "dummy:tiny", "model.device": "cpu", "cache.num_blocks": 120, "cache.block_size": BLOCK_SIZE}
)
TAB = "Prefix cache"

FIRST = (
    "The harbour master writes down every ship that enters, its flag and its cargo.",
    "A recipe for bread: flour, water, salt, and a night of patience before the oven.",
    "List the rivers that flow into the northern sea, from the longest to the shortest one.",
)
SECOND = (
    "The harbour master writes down every ship that leaves before the tide turns.",
    "A recipe for bread: flour, water, salt, and a night of patience before the hearth is lit.",
    "What is the price of a ticket to the moon, and who sells them on Sundays?",
    "The harbour master writes down every ship that leaves before the fog comes in, as they have done for forty years.",
)


@pytest.fixture
def real() -> Iterator[Services]:
    services = Services(Database.open())
    resources.install(services)
    yield services
    resources.install(None)
    services.close()


def run(services: Services, texts: tuple[str, ...], config: EngineConfig = CONFIG) -> int:
    """One request after the other, as text of which each byte is a token."""
    workload = Workload.from_dict(
        {
            "source": {"kind": "prompts", "prompts": list(texts), "chat": False},
            "arrivals": {"kind": "closed_loop", "concurrency": 1},
            "output_len": 3,
            "warmup_requests": 0,
            "reset_prefix_cache": False,
        }
    )
    run_id = start_run(services, config, workload)
    end = services.queue.wait(run_id, 60)
    assert end is not None
    assert end.status == "finished", end.error
    return run_id


def tokens(services: Services, run_id: int) -> dict[str, tuple[list[int], list[int]]]:
    """Request -> prompt and answer, in the order in which they ran."""
    rows = sorted(services.repository.requests(run_id), key=lambda row: row["finish_time"])
    return {row["request_id"]: (list(row["prompt"].encode()), row["token_ids"]) for row in rows}


def common(first: list[int], second: list[int]) -> int:
    num = 0
    while num < min(len(first), len(second)) and first[num] == second[num]:
        num += 1
    return num


def view_of(app: object) -> View:
    return app.session_state["kv-prefix-source"].view  # type: ignore[attr-defined]


def test_the_second_run_misses_beside_the_first_ones_prompts(real: Services) -> None:
    first, second = run(real, FIRST), run(real, SECOND)
    stored = real.repository.get(second)
    assert stored is not None
    assert stored.cache_state is not None
    assert stored.cache_state["state"] == "warm"
    app = page("kv_cache", run=str(second), view=TAB)
    assert f"left by run #{first}: those prompts are compared as well." in words(app)
    before, ours = tokens(real, first), tokens(real, second)
    for key, (prompt, _) in ours.items():
        # Everything is still there, so the nearest is the one with most first tokens in common.
        mine = list(ours)
        others = {**before, **{other: ours[other] for other in mine[: mine.index(key)]}}
        longest = max(common(prompt, [*it, *answer]) for it, answer in others.values())
        fate = view_of(app).cache.fate(key)
        row = next(row for row in real.repository.requests(second) if row["request_id"] == key)
        assert (
            fate.num_cached_tokens
            == row["num_cached_tokens"]
            == min(longest, len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        )
        assert fate.nearest is not None
        assert fate.nearest.num_common == longest
        assert common(prompt, [*others[fate.nearest.request_id][0], *others[fate.nearest.request_id][1]]) == longest
        assert fate.knows_all
    # In words: run by run and token by token.
    for place, source in ((0, 0), (1, 1)):
        app.selectbox(key="kv-prefix-select").set_value(str(place)).run()
        at = common(list(SECOND[place].encode()), list(FIRST[source].encode()))
        assert 40 < at < len(FIRST[source])
        assert f"It differs at token {at} from the prompt of request {source} of run #{first}, the nearest." in words(
            app
        )
        assert f"computed by request {source} of run #{first}." in words(app)
    app.selectbox(key="kv-prefix-select").set_value("2").run()
    assert "Nothing like it was cached" in words(app)
    app.selectbox(key="kv-prefix-select").set_value("3").run()
    assert "from the prompt of request 0, the nearest." in words(app), "its own run's first request is nearer"


def test_the_walk_goes_back_to_the_run_that_began_cold_and_no_further(
    real: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(real, SECOND)
    run(real, FIRST, CONFIG.with_overrides({"cache.num_blocks": 121}))  # another engine: the cache begins empty
    cold = run(real, FIRST[:1])
    assert (real.repository.get(cold).cache_state or {})["state"] == "cold"  # type: ignore[union-attr]
    run(real, FIRST[1:2])
    warm = run(real, SECOND[:2])
    app = page("kv_cache", run=str(warm), view=TAB)
    assert f"left by runs #{cold} and #{cold + 1}: those" in words(app)
    monkeypatch.setattr(kv_cache_earlier, "MAX_RUNS", 1)
    app = page("kv_cache", run=str(warm), view=TAB)
    assert f"left by run #{cold + 1}: those" in words(app)
    assert f"Runs before #{cold + 1} are left out: at most 1 are looked at." in words(app)


def test_what_cannot_be_had_again_is_said(real: Services) -> None:
    first, second, third = run(real, FIRST), run(real, FIRST[:1]), run(real, SECOND)
    real.repository.delete([first])
    app = page("kv_cache", run=str(third), request="1", view=TAB)
    assert (
        f"Run #{first} has been deleted: what it, and runs before it, may have left in the cache is not known."
        in words(app)
    )
    assert "What it found was left by an earlier run, whose prompts are not known here." in words(app)
    app.selectbox(key="kv-prefix-select").set_value("0").run()
    assert f"of request 0 of run #{second}, the nearest that is known." in words(app)
    with real.database.write() as session:
        changed = {"source": {"kind": "synthetic"}, "output_len": 3}
        session.execute(
            update(RunRow).where(RunRow.run_id == second).values(workload=Workload.from_dict(changed).to_dict())
        )
    app = page("kv_cache", run=str(third), request="0", view=TAB)
    assert "left by earlier runs whose prompts are not known here." in words(app)
    assert (
        f"The prompts of run #{second} cannot be had again: the prompts drawn from the run's workload today"
        in words(app)
    )
    real.repository.delete([second])
    app = page("kv_cache", run=str(third), request="0", view=TAB)
    assert f"Run #{second} has been deleted" in words(app)
