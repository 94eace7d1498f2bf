"""Presets against what is published, the chart's numbers, and layouts against the closed form in slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.components import sizing_charts, sizing_state
from app.components.sizing_figures import compare_dtypes, compare_layouts, size_up
from app.components.sizing_state import parameters, read_address, write_address
from backend.analysis import kv_size as kv_size_module
from backend.analysis.config_fields import MAX_LAYERS
from backend.analysis.kv_size import kv_size
from backend.analysis.memory_waste import memory_waste
from backend.analysis.parameters import read_weights
from backend.analysis.presets import CARD_PRESETS, MODEL_PRESETS
from backend.core.kv_groups import LayerGroup, group_layers
from tests.analysis import published

KNOWN = parameters(("card", "typed"))
DEFAULTS = {name: parameter.default for name, parameter in KNOWN.items()}
GIB = 2**30


def chart_rows(model: str, length: int) -> dict[str, dict[int, int]]:
    rows: dict[str, dict[int, int]] = {}
    for point in sizing_charts.length_points(kv_size(MODEL_PRESETS[model].config), length):
        rows.setdefault(point.series, {})[point.tokens] = point.num_bytes
    return rows


@pytest.mark.parametrize(
    ("model", "num_parameters"),
    [
        ("Llama-3-8B", 8_030_261_248),
        ("Llama-3.1-8B", 8_030_261_248),
        ("Llama-3.1-70B", 70_553_706_496),
        ("SmolLM2-135M", 134_515_008),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Qwen3-8B", 8_190_735_360),
        ("Mistral-7B-v0.1", 7_241_732_096),
        ("Mixtral-8x7B", 46_702_792_704),
        ("DeepSeek-V3", 671_026_419_200 - 58 * 256),  # as published, less the experts' biases, which are buffers
        ("GPT-2", 124_439_808),
    ],
)
def test_presets_have_as_many_weights_as_published(model: str, num_parameters: int) -> None:
    assert read_weights(MODEL_PRESETS[model].config).parameters().total == num_parameters


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Gemma-3-4B", "DeepSeek-V3"])
def test_the_most_layers_there_may_be_are_grouped_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every length that is tried asks for the size of a block, which is found layer by layer."""
    calls: list[int] = []

    def counted(windows: Sequence[int | None]) -> tuple[LayerGroup, ...]:
        calls.append(len(windows))
        return group_layers(windows)

    monkeypatch.setattr(kv_size_module, "group_layers", counted)
    kv_size_module._layers_per_block.cache_clear()
    config = dict(MODEL_PRESETS[model].config)
    text = {name: value for name, value in config.get("text_config", config).items() if name != "layer_types"}
    text["num_hidden_layers"] = MAX_LAYERS
    config = config | {"text_config": text} if "text_config" in config else text
    sizing = size_up(config, DEFAULTS, 2**50)
    assert len(compare_dtypes(config, DEFAULTS, sizing)) == 4
    assert calls == [MAX_LAYERS]


def test_the_text_model_of_gemma_3_4b() -> None:
    config = MODEL_PRESETS["Gemma-3-4B"].config
    assert read_weights(config).parameters() == read_weights(published.GEMMA_3_4B).parameters()
    assert kv_size(config) == kv_size(published.GEMMA_3_4B)


def test_cards_have_about_the_memory_in_their_name() -> None:
    for name, card in CARD_PRESETS.items():
        named = int(name.split()[-2])
        assert 0.93 * named * GIB < card.memory_bytes < 1.01 * named * GIB, name


# The chart


def test_windows_bend_the_line_where_they_are_full() -> None:
    rows = chart_rows("Mistral-7B-v0.1", 1250)
    assert rows["KV"][4096] == rows["KV"][32_768] == 4096 * 131_072
    assert rows["without windows"][32_768] == 32_768 * 131_072
    assert all(size == tokens * 131_072 for tokens, size in rows["KV"].items() if tokens <= 4096)
    assert rows["request"] == {1250: 1250 * 131_072}


def test_mixed_windows_grow_on_with_their_full_layers() -> None:
    rows = chart_rows("Gemma-3-4B", 1250)
    assert 1024 in rows["KV"]
    assert rows["KV"][131_072] == (131_072 * 5 + 1024 * 29) * 4096
    assert set(chart_rows("Llama-3-8B", 1250)) == {"KV", "request"}


@pytest.mark.parametrize("length", [1, 64, 8192, 10**6])
def test_the_chart_reaches_from_short_requests_to_the_models_limit_and_the_request(length: int) -> None:
    tokens = list(chart_rows("Llama-3-8B", length)["KV"])
    assert (tokens[0], tokens[-1]) == (min(64, length), max(8192, length))
    assert len(tokens) <= 65
    assert length in tokens


@pytest.mark.parametrize("model", ["Llama-3-8B", "Mistral-7B-v0.1", "Gemma-3-4B"])
@pytest.mark.parametrize("room", [None, -5, 0, 2**36])
def test_the_cards_room_is_drawn_where_there_is_one(model: str, room: int | None) -> None:
    spec = sizing_charts.kv_over_length(kv_size(MODEL_PRESETS[model].config), 1250, room).to_dict()
    marks = [layer["mark"]["type"] for layer in spec["layer"]]
    assert marks.count("rule") == (room == 2**36)
    assert marks.count("line") == (1 if model == "Llama-3-8B" else 2)
    names = {row.get("series") for rows in spec["datasets"].values() for row in rows}
    assert ("without windows" in names) == (model != "Llama-3-8B")


@given(low=st.floats(1, 1e12), factor=st.floats(4, 1e12))
def test_ticks_are_few_even_powers_of_two_within_the_axis(low: float, factor: float) -> None:
    ticks = sizing_charts.powers_of_two(low, low * factor)
    assert 1 <= len(ticks) <= 6
    assert all(low * (1 - 1e-9) <= tick <= low * factor * (1 + 1e-9) and math.log2(tick).is_integer() for tick in ticks)
    assert len({math.log2(after) - math.log2(tick) for tick, after in pairwise(ticks)}) <= 1


# Layouts


@given(
    prompt=st.integers(1, 3000), output=st.integers(1, 1000), block_size=st.integers(1, 300), more=st.integers(0, 9000)
)
def test_layouts_in_bytes_agree_with_the_closed_form_in_slots(
    prompt: int, output: int, block_size: int, more: int
) -> None:
    length = prompt + output
    values = DEFAULTS | {"prompt": prompt, "output": output, "block": block_size, "context": length + more}
    config = MODEL_PRESETS["SmolLM2-135M"].config
    layouts = compare_layouts(values, size_up(config, values, 24 * GIB))
    waste = memory_waste([length], length + more, block_size)
    for row, slots in ((layouts.contiguous, waste.contiguous), (layouts.paged, waste.paged)):
        assert row.unused_share == pytest.approx(slots.wasted_share, abs=1e-12)
        assert row.reserved_bytes == slots.reserved * 2 * 30 * 3 * 64 * 2


def test_a_contiguous_layer_with_a_window_reserves_the_window() -> None:
    """Mistral: 4,096 slots a layer, of which a request of 1,250 tokens uses its own."""
    values = DEFAULTS | {"context": 32_768}
    layouts = compare_layouts(values, size_up(MODEL_PRESETS["Mistral-7B-v0.1"].config, values, 24 * GIB))
    assert layouts.contiguous.reserved_bytes == 4096 * 131_072
    assert layouts.contiguous.unused_share == pytest.approx(1 - 1250 / 4096)
    assert layouts.arithmetic is None


# The address


@given(
    values=st.fixed_dictionaries(
        {
            "llm": st.sampled_from(["Llama-3-8B", "smollm2-135m", "/a folder"]),
            "card": st.sampled_from(["card", "typed"]),
            "prompt": st.none() | st.integers(-(10**12), 10**12),
            "kv": st.sampled_from(KNOWN[sizing_state.KV_DTYPE].options),
            "share": st.floats(-2, 2).map(lambda x: float(f"{x:.12g}")),
            "context": st.none() | st.integers(1, 10**6),
            "weights_gib": st.none() | st.integers(0, 2000).map(float),
        }
    )
)
def test_an_address_is_read_back_as_it_was_written(values: dict[str, Any]) -> None:
    values = DEFAULTS | values
    back, problems = read_address(write_address(values, KNOWN), KNOWN)
    # An emptied field is an error on the page, and no part of a link.
    expected = {name: KNOWN[name].default if value is None else value for name, value in values.items()}
    assert (back, problems) == (expected, [])
