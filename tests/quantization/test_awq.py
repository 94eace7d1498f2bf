"""AWQ: a scaled model computes the same, and scales and narrowed ranges never make the outputs worse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.models.loader import load_model
from backend.models.model_config import load_decoder_config
from backend.models.sources import resolve_source
from backend.quantization.awq import AWQ, clip_groups, find_scales, rounded_values
from backend.quantization.calibration import InputStats, LayerRunner
from backend.quantization.formats.scheme import StoredScheme
from backend.quantization.group_size import CHANNEL
from backend.quantization.int_weight import ZERO_POINTS, ZeroPoint, quantize_by_rounding
from backend.quantization.single_layer import SingleLayer
from tests.helpers import make_tiny_model, paged_logits

CPU = torch.device("cpu")
IDS = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(1)).tolist()
MODULES = ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")


def stats_of(x: Tensor) -> InputStats:
    return InputStats(x.t() @ x / len(x), x.abs().mean(0))


def problem(seed: int) -> tuple[Tensor, Tensor]:
    """Weights, and inputs of which a few are far larger than the rest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(400, 64, generator=generator)
    x[:, torch.randperm(64, generator=generator)[:3]] *= 30
    return torch.randn(24, 64, generator=generator) * 0.05, x


@pytest.mark.parametrize(
    ("architecture", "changes", "modules"),
    [
        ("Llama", {}, MODULES),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, MODULES),
        *(("Qwen2", {}, (module,)) for module in MODULES),
        ("Qwen3", {"head_dim": 16}, MODULES),
    ],
)
def test_a_scaled_model_computes_the_same(
    tmp_path: Path, architecture: str, changes: dict[str, object], modules: tuple[str, ...]
) -> None:
    """Query heads share KV heads, and activations of their values differ."""
    folder = make_tiny_model(tmp_path / "model", architecture, **changes)
    config = load_decoder_config(folder)
    tensors = load_file(folder / "model.safetensors")
    single, runner = SingleLayer(config, CPU), LayerRunner(config, 32, CPU)
    hidden = torch.randn(4, 32, config.hidden_size, generator=torch.Generator().manual_seed(0))
    scaled, scheme = dict(tensors), StoredScheme("pack-quantized", 4, "group", 8)
    for index in range(config.num_layers):
        single.load(index, tensors.__getitem__)
        stats = runner.collect(single.layer, single.linears, hidden, None)
        now = AWQ(config, 3, 8, "integer").scale(single.layer, stats, modules)
        measured = runner.collect(single.layer, single.linears, hidden, None)
        for module in MODULES:
            torch.testing.assert_close(now[module].hessian, measured[module].hessian, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(now[module].mean_abs, measured[module].mean_abs, rtol=1e-3, atol=1e-4)
        scaled |= single.encode(index, {}, scheme, lambda name: torch.float32)
    (tmp_path / "scaled").mkdir()
    save_file(scaled, tmp_path / "scaled" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "scaled" / "config.json").write_text((folder / "config.json").read_text())
    logits = [
        paged_logits(load_model(resolve_source(str(each)), device=CPU, dtype=torch.float32).model, IDS)
        for each in (folder, tmp_path / "scaled")
    ]
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=0)
    changed = {name.split(".", 3)[-1] for name in tensors if not torch.equal(scaled[name], tensors[name])}
    assert {f"{name}.weight" for module in modules for name in single.projections(module)} <= changed


def test_scales_make_outputs_err_less_where_few_inputs_are_large() -> None:
    for seed in range(5):
        weight, x = problem(seed)
        stats = stats_of(x)
        for zero_point in ZERO_POINTS:
            scales = find_scales(weight, stats.mean_abs, stats, 3, 32, zero_point)
            scaled = quantize_by_rounding(weight * scales, 3, 32, zero_point).dequantize() / scales
            plain = quantize_by_rounding(weight, 3, 32, zero_point).dequantize()
            errors = [float((x @ (rounded - weight).t()).square().sum()) for rounded in (scaled, plain)]
            assert errors[0] < errors[1]
            large = stats.mean_abs > 10 * stats.mean_abs.median()
            assert scales[large].min() > scales[~large].max()


def test_inputs_alike_and_inputs_that_are_never_there_get_no_scales() -> None:
    weight, x = problem(0)
    stats = stats_of(x)
    alike = find_scales(weight, torch.full((64,), 0.37), stats, 3, 32, "integer")
    torch.testing.assert_close(alike, torch.ones(64))
    nothing = stats_of(torch.zeros(10, 64))
    assert torch.equal(find_scales(weight, nothing.mean_abs, nothing, 3, 32, "integer"), torch.ones(64))
    x[:, 5] = 0
    some = find_scales(weight, stats_of(x).mean_abs, stats_of(x), 3, 32, "integer")
    assert some.isfinite().all()
    assert 1e-2 * 0.999 <= float(some.min()) <= float(some.max()) <= 1e2 * 1.001


@pytest.mark.parametrize("zero_point", ZERO_POINTS)
@pytest.mark.parametrize("group_size", [16, CHANNEL])
def test_a_narrowed_range_is_the_best_of_those_tried(group_size: int, zero_point: ZeroPoint) -> None:
    """By each group's share of the outputs, from inputs as they are."""
    weight, x = problem(2)
    weight[:, 7] *= 8  # a weight that stretches its group
    size = 64 if group_size == CHANNEL else group_size
    clipped = clip_groups(weight, stats_of(x).hessian, 3, group_size, zero_point)
    shares = {}
    for name, each in (
        ("clipped", clipped),
        ("whole", weight),
        *(
            (
                str(part),
                torch.cat(
                    [
                        group.clamp(group.amin(1, True) * part, group.amax(1, True) * part)
                        for group in weight.split(size, 1)
                    ],
                    1,
                ),
            )
            for part in (0.5, 0.75, 0.95)
        ),
    ):
        difference = quantize_by_rounding(each, 3, group_size, zero_point).dequantize() - weight
        shares[name] = torch.stack(
            [
                (inputs @ part.t()).square().sum(0)
                for inputs, part in zip(x.split(size, 1), difference.split(size, 1), strict=True)
            ]
        )
    for name in ("whole", "0.5", "0.75", "0.95"):
        assert (shares["clipped"] <= shares[name] * (1 + 1e-3) + 1e-9).all()
    assert float(shares["clipped"].sum()) < 0.95 * float(shares["whole"].sum())


@pytest.mark.parametrize("zero_point", ZERO_POINTS)
@pytest.mark.parametrize(("bits", "group_size"), [(2, 16), (3, CHANNEL), (4, 32), (8, 64)])
def test_values_are_those_that_are_stored(bits: int, group_size: int, zero_point: ZeroPoint) -> None:
    weight, _ = problem(3)
    weight[3], weight[4, :16], weight[5] = 0.0, 1e-30, 0.25
    stored = quantize_by_rounding(weight, bits, group_size, zero_point).dequantize()
    assert torch.equal(rounded_values(weight, bits, group_size, zero_point), stored)


def test_ranges_of_queries_and_keys_stay_whole(tmp_path: Path) -> None:
    config = load_decoder_config(make_tiny_model(tmp_path, "Llama"))
    weight = torch.randn(120, 72, generator=torch.Generator().manual_seed(0))
    x = torch.randn(300, 72, generator=torch.Generator().manual_seed(1))
    awq, stats = AWQ(config, 3, 24, "integer"), stats_of(x)
    packed = awq.quantize("attention.qkv", weight, stats).dequantize()
    plain = quantize_by_rounding(weight, 3, 24, "integer").dequantize()
    kv_size = config.num_kv_heads * config.head_dim
    assert torch.equal(packed[:-kv_size], plain[:-kv_size])
    assert not torch.equal(packed[-kv_size:], plain[-kv_size:])
    values = awq.quantize("mlp.down", weight[-kv_size:], stats).dequantize()
    assert torch.equal(packed[-kv_size:], values)
