"""Layers whose scales are folded into others: against scales that were chosen, and against the whole model as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.config import EngineConfig
from backend.errors import ConfigError
from backend.experiments.layer_error import comparable_layers, measure_layer_errors, scan_sensitivity
from backend.experiments.quality import measure_quality
from backend.experiments.text_pass import TextModel, load_text_model
from backend.models.sources import ModelSource
from backend.quantization.int_weight import quantize_by_rounding
from backend.quantization.quantize_model import SavedMethod, grid_settings, quantize_model
from backend.quantization.unfolded_weight import UnfoldedWeight
from backend.quantization.work_folder import WorkFolder
from tests.helpers import load_oracle, make_tiny_llama

IDS = torch.randint(0, 512, (90,), generator=torch.Generator().manual_seed(3)).tolist()
WINDOWS = torch.randint(0, 512, (6, 40), generator=torch.Generator().manual_seed(4))
# 8 query heads share 2 KV heads; layers have 64 and 160 inputs, and biases.
SHAPE = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 64,
    "intermediate_size": 160,
    "attention_bias": True,
    "mlp_bias": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "model", **SHAPE)


@pytest.fixture(scope="module")
def reference(folder: Path) -> TextModel:
    return load(folder)


def load(folder: Path) -> TextModel:
    return load_text_model(ModelSource(str(folder), "folder", path=folder), EngineConfig())


def stored(folder: Path, method: SavedMethod, output: Path) -> TextModel:
    """The model in a checkpoint of the method."""
    settings = grid_settings(method, group_size=32 if method in ("int4", "gptq", "awq") else None)
    source, work = ModelSource(str(folder), "folder", path=folder), WorkFolder(output, force=False)
    quantize_model(source, method, settings, WINDOWS, work, device=torch.device("cpu"))
    return load(output)


def fold(folder: Path, output: Path, layers: range, parts: str = "norms and rows") -> dict[str, Tensor]:
    """The same model with random scales folded in: a copy whose layers compute the same. Gives the scales by projection."""
    tensors, scales = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(5)

    def draw(size: int) -> Tensor:
        return torch.exp2(2 * torch.rand(size, generator=generator) - 1)  # 1/2 to 2

    for index in layers:
        prefix = f"model.layers.{index}."
        before = {
            "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
        }
        for norm, names in before.items() if "norms" in parts else ():
            chosen = draw(64)
            tensors[f"{prefix}{norm}.weight"] /= chosen
            for name in names:
                tensors[f"{prefix}{name}.weight"] *= chosen
                scales[prefix + name] = chosen
        values, up = draw(16), draw(160)
        of_heads = values.view(2, 1, 8).expand(2, 4, 8).flatten()
        for first, own, second, others in (
            ("self_attn.v_proj", values, "self_attn.o_proj", of_heads),
            ("mlp.up_proj", up, "mlp.down_proj", up),
        ):
            tensors[f"{prefix}{first}.weight"] /= own[:, None]
            tensors[f"{prefix}{first}.bias"] /= own
            tensors[f"{prefix}{second}.weight"] *= others
            scales[f"{prefix}{first} rows"], scales[prefix + second] = own, others
    output.mkdir()
    for file in folder.iterdir():
        (output / file.name).write_bytes(file.read_bytes())
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    return scales


def expected_errors(folder: Path, folded: Path, scales: dict[str, Tensor]) -> dict[tuple[int, str], float]:
    """Of each layer's output in float64, from transformers' activations and the scales that were folded in."""
    kinds = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "output": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }
    oracle = load_oracle(folder).double()
    inputs: dict[str, Tensor] = {}
    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, x, name=name: inputs.update({name: x[0][0]}))
    with torch.inference_mode():
        oracle(torch.tensor([IDS]), use_cache=False)
    weights, changed = load_file(folder / "model.safetensors"), load_file(folded / "model.safetensors")
    found = {}
    for layer in range(3):
        for kind, projections in kinds.items():
            names = [f"model.layers.{layer}.{name}" for name in projections]
            signal = noise = 0.0
            for name in names:
                weight = weights[f"{name}.weight"].double()
                rounded = quantize_by_rounding(changed[f"{name}.weight"], 4, 32, "integer").dequantize().double()
                rounded = rounded / scales.get(name, torch.ones(1)) * scales.get(f"{name} rows", torch.ones(1))[:, None]
                x = inputs[name]
                signal += float((x @ weight.t()).square().sum())
                noise += float((x @ (weight - rounded).t()).square().sum())
            found[layer, kind] = (noise / signal) ** 0.5
    return found


@pytest.mark.parametrize("parts", ["norms and rows", "rows"])
def test_errors_are_those_with_the_scales_taken_out(
    folder: Path, reference: TextModel, tmp_path: Path, parts: str
) -> None:
    """Of a model whose layers 0 and 2 are scaled, rounded to nearest as it is then."""
    folded = tmp_path / "folded"
    scales = fold(folder, folded, range(0, 3, 2), parts)
    model = stored(folded, "int4", tmp_path / "stored")
    expected = expected_errors(folder, folded, scales)
    measured = {(error.layer, error.kind): error for error in measure_layer_errors(model, reference, IDS)}
    assert measured.keys() == expected.keys()
    for place, error in expected.items():
        assert 0.03 < error < 0.5
        # Where rows were scaled, by how much is known to some tenths of a percent only.
        assert measured[place].output_error == pytest.approx(error, rel=0.02), place
        assert measured[place].bits_per_weight == 4.75


@pytest.mark.parametrize("method", ["awq", "int4"])
def test_all_layers_together_are_the_model(
    folder: Path, reference: TextModel, tmp_path: Path, method: SavedMethod
) -> None:
    """What is taken out before a layer is put in behind it: by whatever factor, so that estimates cancel."""
    if method == "int4":
        fold(folder, tmp_path / "folded", range(3))
    model = stored(tmp_path / "folded" if method == "int4" else folder, method, tmp_path / "stored")
    scan = scan_sensitivity(model, reference, IDS, "kind")
    whole = measure_quality(model, IDS, reference=reference)
    together = scan[-1].quality
    assert (scan[-1].part, scan[-1].num_layers) == ("all", 12)
    assert whole.kl is not None
    assert together.kl is not None
    assert together.kl.mean == pytest.approx(whole.kl.mean, rel=1e-3)
    assert together.perplexity == pytest.approx(whole.perplexity, rel=1e-4)
    assert all(0 < part.quality.kl.mean < 2 * whole.kl.mean for part in scan if part.quality.kl)


def test_awq_errs_less_than_rounding_to_nearest_in_most_layers(
    folder: Path, reference: TextModel, tmp_path: Path
) -> None:
    """On the text that it was calibrated on: each layer's scales were chosen for the least error of its output there."""
    ids = WINDOWS.flatten().tolist()
    errors = {}
    for method in ("awq", "int4"):
        model = stored(folder, method, tmp_path / method)
        errors[method] = [error.output_error or 0.0 for error in measure_layer_errors(model, reference, ids, window=40)]
    better = [awq < rounded for awq, rounded in zip(errors["awq"], errors["int4"], strict=True)]
    assert sum(better) >= 9, errors
    assert max(errors["awq"]) < 2 * max(errors["int4"])


def test_layers_without_scales_are_the_models_own(folder: Path, reference: TextModel, tmp_path: Path) -> None:
    model = stored(folder, "gptq", tmp_path / "gptq")
    layers = comparable_layers(model, reference)
    assert len(layers) == 12
    assert all(layers[path] is model.loaded.model.get_submodule(path) for path in layers)
    folded = stored(folder, "awq", tmp_path / "awq")
    assert any(isinstance(layer.packed, UnfoldedWeight) for layer in comparable_layers(folded, reference).values())


def test_a_checkpoint_of_another_model_is_refused(folder: Path, reference: TextModel, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path / "other", **SHAPE, seed=1)
    for method in ("awq", "int8"):
        model = stored(other, method, tmp_path / method)
        with pytest.raises(ConfigError, match="has little in common with that of the reference: it is another model"):
            measure_layer_errors(model, reference, IDS)
