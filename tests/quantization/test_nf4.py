"""NormalFloat4: its levels from the normal distribution, the nearest of them, and what double quantization costs and keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import norm

from backend.config import QuantizationSettings
from backend.errors import ConfigError
from backend.quantization.group_size import CHANNEL
from backend.quantization.int_weight import quantize_by_rounding
from backend.quantization.methods import resolve_settings
from backend.quantization.nf4 import NF4, NF4Weight
from kernels.reference.int_words import unpack_words
from kernels.reference.nf4_linear import NF4_LEVELS, dequantize_magnitudes


def random_weight(rows: int = 24, columns: int = 576, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def magnitudes(packed: NF4Weight) -> torch.Tensor:
    """What is stored, in float64."""
    codes, steps, means = packed.magnitude_codes, packed.magnitude_steps, packed.magnitude_means
    return codes.double() * steps.double() + means.double()


def test_the_levels_are_quantiles_of_the_normal_distribution() -> None:
    """Appendix E of QLoRA: 8 above 0, 7 below, in equal steps of probability, the outermost at 1 and -1; and 0.

    The published levels were computed from probabilities in float32, of which the one below the outermost moves its level
    five times as far as itself.
    """
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    above = norm.ppf(np.linspace(outermost, 0.5, 9)[:-1])
    below = -norm.ppf(np.linspace(outermost, 0.5, 8)[:-1])
    levels = np.sort(np.concatenate((above, below, [0.0]))) / above.max()
    np.testing.assert_allclose(NF4_LEVELS, levels, rtol=0, atol=5 * 2**-24)


@pytest.mark.parametrize("block", [32, 64, 192, CHANNEL])
def test_each_weight_becomes_the_nearest_level_of_its_block(block: int) -> None:
    weight = random_weight()
    packed = NF4(block).quantize(weight)
    size = 576 if block == CHANNEL else block
    assert packed.block_size == size
    grid = torch.tensor(NF4_LEVELS, dtype=torch.float64) * magnitudes(packed).repeat_interleave(size, dim=1)[:, :, None]
    nearest = (grid - weight.double()[:, :, None]).abs().amin(2)
    error = (packed.dequantize().double() - weight.double()).abs()
    torch.testing.assert_close(error, nearest, rtol=0, atol=1e-7)
    codes = unpack_words(packed.words, 4, 576)
    chosen = torch.tensor(NF4_LEVELS)[codes.long()].view(24, -1, size) * magnitudes(packed).float()[:, :, None]
    assert torch.equal(packed.dequantize(), chosen.flatten(1))


def test_magnitudes_lie_within_half_a_step_around_their_rows_mean() -> None:
    weight = random_weight() * torch.logspace(-30, 30, 24)[:, None]
    packed = NF4(64).quantize(weight)
    largest = weight.double().view(24, 9, 64).abs().amax(2)
    torch.testing.assert_close(packed.magnitude_means.double(), largest.mean(1, keepdim=True), rtol=2**-8, atol=0)
    distance = (largest - packed.magnitude_means.double()).abs().amax(1, keepdim=True)
    step = distance / 127
    torch.testing.assert_close(packed.magnitude_steps.double(), step, rtol=2**-8, atol=0)
    # The step is rounded by 2^-9 of itself, by which 127 codes move by a quarter of one.
    assert ((magnitudes(packed) - largest).abs() <= step * 0.76).all()


def test_no_magnitude_is_negative_and_zero_blocks_are_exact() -> None:
    weight = random_weight(8)
    weight[0, :512] = 0  # eight blocks of nine: the mean is a ninth of the only magnitude
    weight[1, 64:128] = 0
    weight[2] = 0
    weight[3, :64] *= 1e-30
    packed = NF4(64).quantize(weight)
    assert (magnitudes(packed) >= 0).all()
    assert (dequantize_magnitudes(packed.magnitude_codes, packed.magnitude_steps, packed.magnitude_means) >= 0).all()
    dequantized = packed.dequantize()
    assert torch.equal(dequantized[weight == 0], torch.zeros(int((weight == 0).sum())))
    step = packed.magnitude_steps.float()[3]
    assert ((dequantized[3, :64] - weight[3, :64]).abs() <= step).all()


@pytest.mark.parametrize(
    ("in_features", "expected"), [(576, 4.1806), (1536, 4.1458), (4096, 4.1328)], ids=["576", "1536", "4096"]
)
def test_bits_per_weight(in_features: int, expected: float) -> None:
    """4, a code of 8 bits for 64 of them, and a row's step and mean in 16 bits each."""
    packed = NF4(64).quantize(random_weight(4, in_features))
    assert packed.bits_per_weight == pytest.approx(4 + 8 / 64 + 32 / in_features)
    assert packed.bits_per_weight == pytest.approx(expected, abs=1e-4)
    assert packed.nbytes == sum(tensor.numel() * tensor.element_size() for tensor in packed.tensors().values())


def test_rows_do_not_depend_on_each_other() -> None:
    weight = random_weight(30, 128)
    parts = [NF4(64).quantize(part) for part in weight.split([17, 6, 7])]
    together, joined = NF4(64).quantize(weight), NF4Weight.join(parts)
    assert joined.shape == (30, 128)
    for name, tensor in together.tensors().items():
        assert torch.equal(joined.tensors()[name], tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_product_is_that_of_the_dequantized_weight(dtype: torch.dtype) -> None:
    packed = NF4(64).quantize(random_weight())
    x = torch.randn(7, 576, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(24, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = x.double() @ packed.dequantize().to(dtype).double().t() + bias.double()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(packed.linear(x, bias).double(), expected, rtol=tolerance, atol=1e-5)


def test_normal_weights_lose_less_than_on_an_even_grid() -> None:
    """What the levels are made for: at 64 and no zero point, as the paper compares."""
    weight = random_weight(256, 1024)
    errors = [
        float((packed.dequantize() - weight).square().mean())
        for packed in (NF4(64).quantize(weight), quantize_by_rounding(weight, 4, 64, "none"))
    ]
    assert errors[0] < 0.9 * errors[1]


def test_double_quantization_costs_little() -> None:
    weight = random_weight(64, 1536)
    packed = NF4(64).quantize(weight)
    largest = weight.view(64, -1, 64).abs().amax(2, keepdim=True)
    levels = torch.tensor(NF4_LEVELS)
    exact = levels[(weight.view(64, -1, 64, 1) / largest[..., None] - levels).abs().argmin(3)] * largest
    plain = (exact.flatten(1) - weight).norm()
    assert (packed.dequantize() - weight).norm() == pytest.approx(float(plain), rel=0.01)


@pytest.mark.parametrize(
    ("in_features", "expected"),
    [((576, 1536), 64), ((4096, 14336), 64), ((64, 160), 32), ((96, 192), 32), ((72, 120), -1)],
)
def test_blocks_are_the_papers_where_they_divide_all_layers(in_features: tuple[int, ...], expected: int) -> None:
    layers = {f"layer {count}": count for count in in_features}
    assert resolve_settings(QuantizationSettings(method="nf4"), layers).group_size == expected


def test_a_block_that_does_not_divide_a_layer_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"group_size = 128 does not divide the 576 inputs of q_proj; .*32, 64, 96, 192"
    ):
        resolve_settings(QuantizationSettings(method="nf4", group_size=128), {"q_proj": 576, "down_proj": 1536})
