"""Calibration: texts and windows, and what comes into each linear layer, against transformers' model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from backend.errors import ConfigError, ModelError
from backend.models.model_config import load_decoder_config
from backend.quantization.calibration import DEFAULT_TEXT, InputStats, LayerRunner, cut_windows, read_texts
from backend.quantization.single_layer import SingleLayer
from tests.helpers import load_oracle, make_tiny_model

CPU = torch.device("cpu")
MODULES = {
    "attention.qkv": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp.gate_up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def test_windows_are_pieces_of_the_text_spread_over_it() -> None:
    tokens = [token * 7 for token in range(1000)]
    windows = cut_windows(tokens, 8, 50, seed=3)
    assert windows.shape == (8, 50)
    for index, window in enumerate(windows.tolist()):
        start = window[0] // 7
        assert window == tokens[start : start + 50]
        assert index * 951 / 8 <= start < (index + 1) * 951 / 8  # each in its share
    assert torch.equal(windows, cut_windows(tokens, 8, 50, seed=3))
    assert not torch.equal(windows, cut_windows(tokens, 8, 50, seed=4))


def test_few_tokens_make_windows_that_overlap_and_too_few_make_none() -> None:
    assert cut_windows(list(range(50)), 3, 50, seed=0).tolist() == [list(range(50))] * 3
    assert cut_windows(list(range(60)), 20, 50, seed=0).max() < 60
    with pytest.raises(ConfigError, match="has 49 tokens, fewer than the 50 of one window"):
        cut_windows(list(range(49)), 1, 50, seed=0)


def test_texts_are_read_whole_or_by_lines_of_json(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read_texts(tmp_path / "a.txt") == ["one\n\ntwo\n"]
    records = [{"text": "first", "id": 1}, {"prompt": "second"}, {"text": None, "prompt": "third"}]
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    assert read_texts(tmp_path / "b.jsonl") == ["first", "second", "third"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_json_lines_end_where_json_does(tmp_path: Path, end: str) -> None:
    """Not at what Unicode calls line ends, which a string may hold; nor does it matter what an editor put in front of them."""
    texts = ["a\u2028b\u2029c", "d\x85e\x0bf", "g\nh"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "a.JSONL").write_bytes(b"\xef\xbb\xbf" + end.join(lines).encode() + end.encode())
    assert read_texts(tmp_path / "a.JSONL") == texts


@pytest.mark.parametrize("line", ['{"text": 3}', "[1]", "{", '"text"', "[" * 100_000])
def test_a_line_without_a_text_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: no JSON object with a string in text or prompt"):
        read_texts(tmp_path / "a.jsonl")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    for name in ("a.txt", "none.txt"):
        with pytest.raises(ConfigError, match=rf"{name} cannot be read as UTF-8 text"):
            read_texts(tmp_path / name)


def test_the_text_that_ships_is_long_enough_for_the_windows_that_are_the_default() -> None:
    (text,) = read_texts(DEFAULT_TEXT)
    assert 50_000 < len(text.encode()) < 70_000
    assert len(text.split()) > 512 * 10  # a word is a token or more
    assert " @-@ " not in text  # as WikiText spells a hyphen
    assert " = " not in text.splitlines()[0]


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Llama", {}),
        ("Mistral", {"sliding_window": 9}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 500, "max_window_layers": 1}),
    ],
)
def test_what_comes_into_each_layer_is_what_transformers_has(
    tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    """Over several windows, none of which sees another, and more of them than go through a layer at once."""
    folder = make_tiny_model(tmp_path, architecture, **changes)
    config, oracle = load_decoder_config(folder), load_oracle(folder)
    windows = torch.randint(0, 512, (7, 24), generator=torch.Generator().manual_seed(0))
    inputs: dict[tuple[int, str], Tensor] = {}
    for index, layer in enumerate(oracle.model.layers):
        for name, theirs in MODULES.items():
            layer.get_submodule(theirs).register_forward_pre_hook(
                lambda module, args, key=(index, name): inputs.__setitem__(key, args[0].flatten(0, 1))
            )
    with torch.no_grad():
        states = oracle(windows, output_hidden_states=True).hidden_states
    single, runner = SingleLayer(config, CPU), LayerRunner(config, 24, CPU)
    tensors = load_file(folder / "model.safetensors")
    hidden = F.embedding(windows, tensors["model.embed_tokens.weight"])
    for index, window in enumerate(config.windows):
        torch.testing.assert_close(hidden, states[index], atol=1e-4, rtol=1e-4)
        single.load(index, tensors.__getitem__)
        before = hidden.clone()
        for name, stats in runner.collect(single.layer, single.linears, hidden, window).items():
            x = inputs[index, name].double()
            torch.testing.assert_close(stats.hessian.double(), x.t() @ x / len(x), atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(stats.mean_abs.double(), x.abs().mean(0), atol=1e-4, rtol=1e-3)
        assert torch.equal(hidden, before)
        runner.advance(single.layer, hidden, window)


def test_windows_go_through_a_layer_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path, "Llama")
    config, tensors = load_decoder_config(folder), load_file(folder / "model.safetensors")
    single, runner = SingleLayer(config, CPU), LayerRunner(config, 24, CPU)
    single.load(0, tensors.__getitem__)
    hidden = torch.randn(7, 24, config.hidden_size, generator=torch.Generator().manual_seed(0))
    (whole,) = runner.run(single.layer, hidden, None)
    stats = runner.collect(single.layer, single.linears, hidden, None)
    monkeypatch.setattr("backend.quantization.calibration._TOKENS_AT_ONCE", 50)
    parts = list(runner.run(single.layer, hidden, None))
    assert [len(part) for part in parts] == [2, 2, 2, 1]
    torch.testing.assert_close(torch.cat(parts), whole)
    for name, each in runner.collect(single.layer, single.linears, hidden, None).items():
        torch.testing.assert_close(each.hessian, stats[name].hessian)
        torch.testing.assert_close(each.mean_abs, stats[name].mean_abs)


def test_errors_of_outputs_need_no_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    x, difference = torch.randn(50, 12, generator=generator), torch.randn(5, 12, generator=generator)
    stats = InputStats(x.t() @ x / 50, x.abs().mean(0))
    expected = float((x.double() @ difference.double().t()).square().sum() / 50)
    assert stats.squared_error(difference) == pytest.approx(expected, rel=1e-5)
    scales = torch.rand(12, generator=generator) + 0.5
    scaled = stats.scaled(scales)
    torch.testing.assert_close(scaled.hessian, (x / scales).t() @ (x / scales) / 50)
    torch.testing.assert_close(scaled.mean_abs, (x / scales).abs().mean(0))


def test_windows_above_the_context_are_refused(tmp_path: Path) -> None:
    config = load_decoder_config(make_tiny_model(tmp_path, "Llama"))
    with pytest.raises(ConfigError, match=r"window of 1,025 tokens is above the model's context, 1,024 tokens"):
        LayerRunner(config, 1025, CPU)


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "Llama")
    config, tensors = load_decoder_config(folder), load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][1, 2] = torch.inf
    single = SingleLayer(config, CPU)
    single.load(1, tensors.__getitem__)
    with pytest.raises(ModelError, match=r"model\.layers\.2\.mlp\.up_proj\.weight has 1 values"):
        single.load(2, tensors.__getitem__)


@pytest.mark.gpu
def test_statistics_on_the_gpu_are_those_on_the_cpu(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "Llama")
    config, tensors = load_decoder_config(folder), load_file(folder / "model.safetensors")
    hidden = torch.randn(7, 24, config.hidden_size, generator=torch.Generator().manual_seed(0))
    found = []
    for device in (CPU, torch.device("cuda")):
        single, runner = SingleLayer(config, device), LayerRunner(config, 24, device)
        single.load(0, tensors.__getitem__)
        found.append(runner.collect(single.layer, single.linears, hidden.to(device), None))
    for name, stats in found[0].items():
        torch.testing.assert_close(found[1][name].hessian.cpu(), stats.hessian, atol=1e-3, rtol=1e-3)
