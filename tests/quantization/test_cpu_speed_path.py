"""Quantized weights on a CPU: laid out for its kernels as a model is loaded, in the same bytes, with the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backend.config import EngineConfig, QuantizationSettings
from backend.engine.engine_host import EngineHost
from backend.layers.quantized_linear import QuantizedLinear
from backend.models.loader import LoadedModel, load_model
from backend.models.sources import ModelSource
from backend.quantization import int_weight, w8a8_int8
from backend.quantization.base import PackedWeight
from backend.quantization.int_weight import CpuIntWeight, IntWeight, quantize_by_rounding
from backend.quantization.w8a8_int8 import CpuW8A8Weight, W8A8Int8, W8A8Weight
from kernels.cpu import support
from kernels.cpu.support import has_cpu_kernels
from tests.engine.driving import tokens
from tests.helpers import make_tiny_llama, paged_logits

needs_kernels = pytest.mark.skipif(not has_cpu_kernels(), reason="needs an x86-64 CPU with AVX2, and llvmlite")

IDS = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(1)).tolist()
SETTINGS = [
    {"method": "w8a8_int8"},
    {"method": "int8", "head": "int8"},
    {"method": "int4", "group_size": 32, "zero_point": "none"},
    {"method": "int4", "group_size": -1, "zero_point": "integer"},
    {"method": "int4", "group_size": 32, "zero_point": "float", "head": "int8"},
]
# Of logits with a spread of about 3. Sums in another order move them by 1e-5, and by some hundredths where an activation lies
# so close to the middle of two codes that it takes the other one.
TOP2_GAP, TOP2_GAP_W8A8 = 1e-3, 0.05


def random_weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.05 + 0.01


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (int_weight, w8a8_int8):
        monkeypatch.setattr(module, "has_cpu_kernels", lambda: False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of layers with 64 and 160 inputs, 64, 96 and 320 outputs."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    return make_tiny_llama(tmp_path_factory.mktemp("model"), hidden_size=64, intermediate_size=160, **heads)


def load(folder: Path, settings: dict[str, object], dtype: torch.dtype = torch.float32) -> LoadedModel:
    source = ModelSource(str(folder), "folder", path=folder)
    quantization = QuantizationSettings.from_dict(settings)
    return load_model(source, device=torch.device("cpu"), dtype=dtype, quantization=quantization)


def packed_weights(loaded: LoadedModel) -> list[PackedWeight]:
    return [module.packed for module in loaded.model.modules() if isinstance(module, QuantizedLinear)]


@needs_kernels
@pytest.mark.parametrize("zero_point", int_weight.ZERO_POINTS)
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 96), (4, -1), (8, 64), (8, -1)])
def test_an_integer_weight_stays_what_it_is(bits: int, group_size: int, zero_point: int_weight.ZeroPoint) -> None:
    weight = quantize_by_rounding(random_weight(80, 192), bits, group_size, zero_point)
    prepared = weight.prepare()
    assert isinstance(prepared, CpuIntWeight)
    assert weight.emulated
    assert not prepared.emulated
    assert prepared.shape == (80, 192)
    assert prepared.nbytes == weight.nbytes
    assert torch.equal(prepared.dequantize(), weight.dequantize())
    x, bias = random_weight(5, 192), torch.linspace(-1, 1, 80)
    torch.testing.assert_close(prepared.linear(x, bias), weight.linear(x, bias), rtol=0, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize(("rows", "columns"), [(80, 192), (37, 71)])
def test_int8_for_weights_and_activations_stays_what_it_is(rows: int, columns: int) -> None:
    weight = W8A8Int8().quantize(random_weight(rows, columns))
    prepared = weight.prepare()
    assert isinstance(prepared, CpuW8A8Weight)
    assert (weight.emulated, prepared.emulated) == (True, False)
    assert prepared.shape == (rows, columns)
    assert torch.equal(prepared.dequantize(), weight.dequantize())
    x, bias = random_weight(5, columns), torch.linspace(-1, 1, rows)
    assert torch.equal(prepared.linear(x, bias), weight.linear(x, bias))


@needs_kernels
def test_rows_that_fill_no_tile_take_a_tile() -> None:
    """A vocabulary such as 50,257: of its last tile one row is used, which is far below 2 % of all bytes."""
    for weight in (
        quantize_by_rounding(random_weight(50257, 32), 4, 32, "float"),
        W8A8Int8().quantize(random_weight(50257, 32)),
    ):
        prepared = weight.prepare()
        assert prepared.nbytes / weight.nbytes == pytest.approx(50272 / 50257)
        assert prepared.shape == (50257, 32)
        assert torch.equal(prepared.dequantize(), weight.dequantize())


def test_weights_that_no_kernel_takes_stay_emulated() -> None:
    three_bits = quantize_by_rounding(random_weight(16, 64), 3, 32, "float")
    four_bits = quantize_by_rounding(random_weight(16, 64), 4, 32, "float")
    assert four_bits.minimums is not None
    others = [
        three_bits,
        IntWeight(4, 64, four_bits.words, four_bits.scales.bfloat16(), None, four_bits.minimums.bfloat16()),
        IntWeight(4, 64, four_bits.words, four_bits.scales, None, four_bits.minimums.float()),
        quantize_by_rounding(random_weight(16, 36), 4, 12, "none"),  # a group ends within a word
    ]
    for weight in others:
        assert weight.prepare() is weight
        assert weight.emulated
    codes = torch.ones(1, 1, dtype=torch.int8).expand(2, 133_200)  # more inputs than an int32 sum holds
    assert isinstance(W8A8Weight(codes, torch.ones(2, 1)).prepare(), W8A8Weight)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_where_there_is_no_kernel_the_reference_computes(
    folder: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_kernels(monkeypatch)
    loaded = load(folder, settings)
    assert loaded.emulated_quantization
    assert {type(weight) for weight in packed_weights(loaded)} <= {IntWeight, W8A8Weight}
    assert paged_logits(loaded.model, IDS).isfinite().all()


@pytest.mark.parametrize("missing", ["llvmlite", "avx2", "x86_64"])
def test_a_machine_without_the_means_has_no_kernels(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "llvmlite":
        monkeypatch.setattr(support, "find_spec", lambda name: None)
    elif missing == "x86_64":
        monkeypatch.setattr("platform.machine", lambda: "aarch64")
    else:
        binding = pytest.importorskip("llvmlite.binding")
        monkeypatch.setattr(binding, "get_host_cpu_features", lambda: {"fma": True, "f16c": True, "avx2": False})
    assert not has_cpu_kernels.__wrapped__()


@needs_kernels
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_models_logits_and_bytes_are_those_of_the_reference(
    folder: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(folder, settings)
    assert not loaded.emulated_quantization
    assert {type(weight) for weight in packed_weights(loaded)} <= {CpuIntWeight, CpuW8A8Weight}
    without_kernels(monkeypatch)
    expected = load(folder, settings)
    assert loaded.weights_bytes == expected.weights_bytes
    logits, reference = paged_logits(loaded.model, IDS), paged_logits(expected.model, IDS)
    tolerance = 0 if settings["method"] == "w8a8_int8" else 1e-4
    torch.testing.assert_close(logits, reference, rtol=0, atol=tolerance)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_16_bits(folder: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference rounds weights to the model's dtype too: logits differ by some roundings of it."""
    logits = paged_logits(load(folder, SETTINGS[4], dtype).model, IDS)
    without_kernels(monkeypatch)
    expected = paged_logits(load(folder, SETTINGS[4], dtype).model, IDS)
    difference = float((logits - expected).norm() / expected.norm())
    assert 0 < difference < 4 * torch.finfo(dtype).eps


@needs_kernels
def test_no_request_waits_for_a_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.cpu import int8_linear, int_linear

    int_linear._compile.cache_clear()
    int8_linear.compile_int8_linear.cache_clear()
    models = [load(folder, settings).model for settings in SETTINGS]
    for module in (int_linear, int8_linear):

        def fail(*args: object) -> None:
            raise AssertionError("compiled in a step")

        monkeypatch.setattr(module, "CompiledModule", fail)
    for model in models:
        for num_tokens in (1, 2, 7):
            assert paged_logits(model, IDS[:num_tokens]).shape == (num_tokens, 512)


@needs_kernels
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_greedy_tokens_of_the_engine_are_those_of_the_reference(
    folder: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight requests of 1 to 33 tokens at once, prefilled in chunks: the likeliest token, but for ties within `TOP2_GAP`."""
    config = EngineConfig().with_overrides(
        {"model.name": str(folder), "model.device": "cpu", "cache.num_blocks": 64, "kernels.cpu_threads": 1}
        | {"scheduler.max_num_batched_tokens": 24}
        | {f"quantization.{name}": value for name, value in settings.items()}
    )
    prompts = {str(length): IDS[:length] for length in (1, 2, 3, 5, 8, 13, 21, 33)}
    host = EngineHost()
    try:
        assert host.load(config).load["emulated_quantization"] is False
        given = tokens(host, prompts, max_tokens=12, ignore_eos=True)
    finally:
        host.close()
    without_kernels(monkeypatch)
    reference = load(folder, settings).model
    for name, prompt in prompts.items():
        logits = paged_logits(reference, prompt + given[name])[len(prompt) - 1 : -1]
        chosen = logits[torch.arange(12), torch.tensor(given[name])]
        assert (logits.amax(1) - chosen).max() < (TOP2_GAP_W8A8 if settings["method"] == "w8a8_int8" else TOP2_GAP)
