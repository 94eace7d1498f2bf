"""The Sizing page against figures worked out by hand, and against what an engine allocates."""

from __future__ import annotations

from typing import Any

import pytest

from app.components import sizing_form
from app.components.sizing_allocated import predictions
from app.components.sizing_state import CARD
from backend.analysis.presets import MODEL_PRESETS
from backend.config import EngineConfig
from backend.engine.loading import load_engine
from backend.workload.spec import Workload
from tests.app.pages import page, words
from tests.app.sizing_pages import Machine, key, metrics, table
from tests.app.stored_runs import FakeServices

MIB, GIB = 2**20, 2**30

# Llama-3.1-8B: 2 × 32 layers × 8 KV heads × 128 × 2 bytes a token, 8,030,261,248 weights of 2 bytes.
TOKEN = 131_072
WEIGHTS = 16_060_522_496
H100 = 81_559 * MIB


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cards everywhere."""
    monkeypatch.setattr(sizing_form, "environment", Machine())


def test_the_untouched_page_answers_for_llama_3_1_8b_on_an_h100(services: FakeServices) -> None:
    """1,000 + 250 tokens are 79 blocks of 16; the null block and 2 GiB of activations come off 90 % of the card."""
    room = int(H100 * 0.9) - WEIGHTS - 2 * GIB - 16 * TOKEN
    app = page("sizing")
    assert metrics(app) == {
        "KV per token": "128 KiB",
        "KV per request": "156 MiB",
        "Weights": "15.0 GiB",
        "Requests that fit": str(room // (79 * 16 * TOKEN)),
        "Longest context": "131,072",
    }
    text = words(app)
    assert "2 × 32 layers × 8 KV heads × 128 × 2 bytes = 131,072 bytes" in text
    assert f"= {room:,} bytes" in text
    assert app.query_params["llm"] == "Llama-3.1-8B"
    assert len(app.get("vega_lite_chart")) == 1
    assert not app.error
    assert not app.warning


def test_dtypes_are_compared_with_the_bytes_of_their_scales(services: FakeServices) -> None:
    rows = {row["KV dtype"]: row for row in table(page("sizing"), "KV dtype")}
    sizes = {"auto (bfloat16)": 128 * 2, "fp8_e4m3": 128 + 2, "int8": 128 + 2, "int4": 64 + 2 + 2}
    assert list(rows) == list(sizes)
    for name, vector in sizes.items():
        token = 2 * 32 * 8 * vector
        room = int(H100 * 0.9) - WEIGHTS - 2 * GIB - 16 * token
        assert rows[name]["Bytes per token"] == f"{token:,}"
        assert rows[name]["Factor"] == f"×{vector / 256:.3g}" if vector < 256 else "×1.00"
        assert rows[name]["Requests that fit"] == f"{room // (79 * 16 * token):,}"


def test_a_chosen_dtype_is_the_pages_and_stands_beside_the_others(services: FakeServices) -> None:
    app = page("sizing", kv="float32")
    assert metrics(app)["KV per token"] == "256 KiB"
    rows = table(app, "KV dtype")
    assert (rows[-1]["KV dtype"], rows[-1]["Factor"]) == ("float32", "×2.00")


def test_paged_and_contiguous_layouts(services: FakeServices) -> None:
    """A request of 1,250 tokens lies in 79 blocks, 1,264 slots, or in a piece of as many as are asked for."""
    contiguous, paged = table(page("sizing", context="5000"), "Layout")
    assert contiguous["Layout"] == "contiguous, 5,000 tokens each"
    assert (contiguous["Never used"], paged["Never used"]) == ("75.0 %", "1.1 %")
    room = int(H100 * 0.9) - WEIGHTS - 2 * GIB - 16 * TOKEN
    assert contiguous["Requests that fit"] == str(room // (5000 * TOKEN))
    assert paged["Requests that fit"] == str(room // (1264 * TOKEN))
    assert "not within 0 and max_model_len 1,000" in words(page("sizing", context="1000"))


@pytest.mark.parametrize(
    ("model", "token", "request_bytes"),
    [
        ("SmolLM2-135M", 2 * 30 * 3 * 64 * 2, None),
        ("Llama-3.1-70B", 2 * 80 * 8 * 128 * 2, None),
        ("Qwen2.5-7B", 2 * 28 * 4 * 128 * 2, None),
        ("Qwen3-8B", 2 * 36 * 8 * 128 * 2, None),
        ("Mixtral-8x7B", 2 * 32 * 8 * 128 * 2, None),
        ("GPT-2", 2 * 12 * 768 * 2, None),
        ("DeepSeek-V3", 61 * (512 + 64) * 2, None),
        ("Mistral-7B-v0.1", 131_072, 4096 * 131_072),
        # 5 of 34 layers are full, the others keep 1,024 tokens; 4 KV heads of 256.
        ("Gemma-3-4B", 34 * 4096, (6000 * 5 + 1024 * 29) * 4096),
    ],
)
def test_every_kind_of_model(services: FakeServices, model: str, token: int, request_bytes: int | None) -> None:
    app = page("sizing", llm=model, prompt="5000", output="1000", context="8000")
    request_bytes = request_bytes or 6000 * token
    text = words(app)
    assert f"= {token:,} bytes" in text
    assert f"{request_bytes:,} bytes (" in text
    assert f"of {MODEL_PRESETS[model].source.split()[2]} on Hugging Face" in text


def test_the_misquoted_figure_is_told_where_it_is_looked_for(services: FakeServices) -> None:
    told = [block.value for block in page("sizing", llm="Llama-3-8B").code]
    assert any("20 times too much" in text for text in told)
    assert not any("too much" in block.value for block in page("sizing").code)


def test_a_model_that_does_not_fit_is_one_error_with_a_remedy(services: FakeServices) -> None:
    """671,026,404,352 weights of two bytes; each H100 has 90 % of its memory less 2 GiB for them."""
    app = page("sizing", llm="DeepSeek-V3")
    cards = -(-2 * (671_026_419_200 - 58 * 256) // (int(H100 * 0.9) - 2 * GIB))
    assert len(app.error) == 1
    assert f"at least {cards} cards like this one" in words(app)
    assert "The checkpoint is quantized" in words(app)
    assert metrics(app)["Requests that fit"] == "0"


def test_a_block_larger_than_the_card_is_named(services: FakeServices) -> None:
    """Of 10^12 tokens of 131,072 bytes, the one block that serves no request."""
    app = page("sizing", block=str(10**12))
    assert len(app.error) == 1
    assert "the null block, of 1,000,000,000,000 tokens, takes 116 PiB" in words(app)
    assert "Choose a smaller block size" in words(app)
    assert "weight dtype or a larger card" not in words(app)


def test_a_request_longer_than_the_model_is_warned_of(services: FakeServices) -> None:
    assert "longer than the model's max_position_embeddings, 1,024" in words(page("sizing", llm="GPT-2"))


# The machine and its runs


def test_this_machines_card_comes_first(services: FakeServices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing_form, "environment", Machine("NVIDIA T4", 15 * GIB))
    app = page("sizing", weights="int4")
    assert app.selectbox(key=key(CARD)).options[0] == "this machine's NVIDIA T4"
    assert app.selectbox(key=key(CARD)).value == "here"
    assert "0.9 × 16,106,127,360 −" in words(app)


def test_an_engines_allocation_is_what_was_predicted(services: FakeServices) -> None:
    assert "No run has loaded a model here yet" in words(page("sizing"))
    config = EngineConfig().with_overrides(
        {"model.name": "dummy:tiny", "cache.block_size": 32, "cache.num_blocks": 9, "model.device": "cpu"}
    )
    run_id = store_run(services, config)
    run = services.repository.get(run_id)
    assert run is not None
    assert run.load is not None
    app = page("sizing", llm="dummy:tiny")
    rows = {row[""]: row for row in table(app, "")}
    assert list(rows) == ["Weights", "KV per token", "KV cache"]
    assert {row["Difference"] for row in rows.values()} == {"none"}
    assert f"({run.load['kv_cache_bytes']:,})" in rows["KV cache"]["Predicted"]
    assert "9 blocks of 32 tokens and the null block" in words(app)
    assert "No run of this model yet" not in words(app)
    assert "No run of this model yet; the newest of another. Run #1: dummy:tiny" in words(page("sizing"))


def test_an_allocation_that_differs_is_shown_in_percent(services: FakeServices) -> None:
    config = EngineConfig().with_overrides({"model.name": "dummy:tiny", "model.device": "cpu", "cache.num_blocks": 9})
    run_id = store_run(services, config, twice="kv_cache_bytes")
    rows = {row[""]: row for row in table(page("sizing"), "")}
    assert rows["KV cache"]["Difference"] == "×2.00"
    assert rows["Weights"]["Difference"] == "none"
    run = services.repository.get(run_id)
    assert run is not None
    weights, _, _ = predictions(run, MODEL_PRESETS["SmolLM2-135M"].config)
    assert weights.predicted == 4 * 134_515_008


@pytest.mark.parametrize(
    ("resolved", "model", "said"),
    [
        ({}, "gone", "cannot be predicted: there is no model 'gone'"),
        ({"model": {"dtype": "float16"}}, "dummy:tiny", "its record has no 'cache'"),
    ],
)
def test_a_run_that_cannot_be_predicted_says_why(
    services: FakeServices, resolved: dict[str, Any], model: str, said: str
) -> None:
    config = EngineConfig().with_overrides({"model.name": model})
    run_id = services.repository.create(config.to_dict(), Workload().to_dict())
    load = {"weights_bytes": 1, "kv_cache_bytes": 1, "kv_bytes_per_token": 1, "num_blocks": 1}
    services.repository.record(run_id, {"resolved_config": resolved or config.to_dict(), "load": load}, {})
    app = page("sizing")
    assert said in words(app)
    assert not app.error


def store_run(services: FakeServices, config: EngineConfig, twice: str | None = None) -> int:
    """A stored run with what a real engine allocated; `twice` names a figure to be doubled."""
    info = load_engine(config, lambda phase: None).info
    load = dict(info.load)
    if twice:
        load[twice] *= 2
    run_id = services.repository.create(config.to_dict(), Workload().to_dict())
    services.repository.record(
        run_id, {"resolved_config": info.resolved_config.to_dict(), "load": load, "environment": {"cpu": "CPU"}}, {}
    )
    return run_id
