"""Quantized weights as the tensors of a checkpoint in the form of the compressed-tensors library (0.20), and back.

A projection `p` has, in

- pack-quantized: `p.weight_packed` int32 [out, cdiv(in * bits, 32)] of codes without a gap between them, `p.weight_scale`
  [out, groups], `p.weight_shape` int64 [2], and with zero points `p.weight_zero_point` int32 [cdiv(out * bits, 32), groups],
  packed along the outputs;
- int-quantized: `p.weight` int8 [out, in], `p.weight_scale` [out, 1], and with zero points `p.weight_zero_point` int8;
- float-quantized: `p.weight` float8_e4m3fn and `p.weight_scale`.

Signed codes and zero points lie 2^(bits-1) below ours; packed ones have that added again. What a group's codes start from
(`minimums`) has no place in that form. It is refused rather than stored in a form of our own: a folder that looks like a
model and that no other program can read helps nobody, and `zero_point = "integer"` costs no more bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from backend.config import QuantizationSettings
from backend.errors import ConfigError
from backend.quantization.base import PackedWeight
from backend.quantization.formats.dense_words import num_words, pack_dense, unpack_dense
from backend.quantization.formats.grids import FLOATS, ReadTensor, check_finite, num_groups, stored_weight
from backend.quantization.formats.scheme import StoredScheme
from backend.quantization.fp8 import FP8Weight
from backend.quantization.group_size import CHANNEL
from backend.quantization.int_weight import IntWeight
from backend.quantization.permuted_weight import PermutedWeight, common_order
from backend.quantization.w8a8_int8 import W8A8Weight
from kernels.reference.int_words import unpack_words

SAVABLE = ("int8", "int4", "w8a8_int8", "fp8")  # of `quantization.method`


def scheme_of(settings: QuantizationSettings) -> StoredScheme:
    """How `encode` stores what a method makes by resolved settings. Raises `ConfigError` for what the format does not have."""
    match settings.method:
        case "int4":
            if settings.zero_point == "float":
                raise ConfigError(
                    "zero_point = 'float' cannot be saved: the compressed-tensors format has no minimums; "
                    "allowed: 'none', 'integer'"
                )
            assert settings.bits is not None
            assert settings.group_size is not None
            return StoredScheme(
                "pack-quantized",
                settings.bits,
                scale_of="channel" if settings.group_size == CHANNEL else "group",
                group_size=settings.group_size,
                symmetric=settings.zero_point == "none",
            )
        case "int8":
            return StoredScheme("pack-quantized", 8, scale_of="channel")
        case "w8a8_int8":
            return StoredScheme("int-quantized", 8, scale_of="channel", activation_scale_of="token")
        case "fp8" if settings.granularity == "tensor":
            return StoredScheme("float-quantized", 8, scale_of="tensor", activation_scale_of="tensor")
        case "fp8":
            return StoredScheme("float-quantized", 8, scale_of="channel", activation_scale_of="token")
    raise ConfigError(
        f"method = {settings.method!r} cannot be saved: the compressed-tensors format does not have it; "
        f"what it has: {', '.join(SAVABLE)}"
    )


def encode(weight: PackedWeight, scheme: StoredScheme) -> dict[str, Tensor]:
    """A projection's tensors, on the CPU, by what follows its name and a dot."""
    match weight.to("cpu"):
        case IntWeight() as integers:
            tensors = _encode_integers(integers, packs=scheme.format == "pack-quantized")
        case W8A8Weight(codes, scales) | FP8Weight(codes, scales):
            tensors = {"weight": codes, "weight_scale": scales[0] if scheme.scale_of == "tensor" else scales}
        case _:
            raise AssertionError(type(weight))
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def decode(name: str, read: ReadTensor, scheme: StoredScheme, shape: tuple[int, int]) -> PackedWeight:
    """What `encode` took; its tensors may be views of what `read` gave.

    Args:
        name: of the projection.
        shape: (out_features, in_features), as config.json has it.
    Raises:
        ModelError: by `read`, or for numbers that are no weights.
    """
    rows, columns = shape
    groups = num_groups(name, scheme, columns)
    per_row = [(rows, groups)] if groups > 1 else [(rows, 1), (rows,)]
    scale_shapes = [(1,), ()] if scheme.scale_of == "tensor" else per_row

    def per_group(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1, groups).expand(rows, groups).contiguous()

    scales = per_group(read(f"{name}.weight_scale", scale_shapes, FLOATS))
    check_finite(f"{name}.weight_scale", scales)
    if scheme.format == "float-quantized":
        codes = read(f"{name}.weight", [shape], (torch.float8_e4m3fn,))
        return FP8Weight(codes, scales.float(), "tensor" if scheme.activation_scale_of == "tensor" else "channel")
    if scheme.format == "int-quantized" and scheme.activation_scale_of is not None:
        return W8A8Weight(read(f"{name}.weight", [shape], (torch.int8,)), scales.float())
    zeros = None
    if scheme.format == "pack-quantized":
        words = read(f"{name}.weight_packed", [(rows, num_words(columns, scheme.bits))], (torch.int32,))
        if not scheme.symmetric:
            packed = read(f"{name}.weight_zero_point", [(num_words(rows, scheme.bits), groups)], (torch.int32,))
            zeros = unpack_dense(packed.t(), scheme.bits, rows).t().contiguous()
    else:
        words = pack_dense(_unsigned(read(f"{name}.weight", [shape], (torch.int8,))), scheme.bits)
        if not scheme.symmetric:
            zeros = per_group(_unsigned(read(f"{name}.weight_zero_point", scale_shapes, (torch.int8,))))
    return stored_weight(words, columns, scales, zeros, scheme.bits)


def cut_rows(weight: PackedWeight, sizes: Sequence[int]) -> list[PackedWeight]:
    """Projections that lie side by side, each by itself."""
    parts = {name: tensor.split(list(sizes)) for name, tensor in weight.tensors().items()}
    return [
        replace(weight, **{name: parts[name][index] for name in parts})  # type: ignore[type-var]
        for index in range(len(sizes))
    ]


def join_rows(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Projections of one scheme side by side. Steps of two dtypes become float32.

    Raises:
        ValueError: their columns are not in one order.
    """
    permuted = [weight for weight in weights if isinstance(weight, PermutedWeight)]
    if permuted:
        return PermutedWeight(join_rows([weight.weight for weight in permuted]), common_order(weights))
    integers = [weight for weight in weights if isinstance(weight, IntWeight)]
    if len({weight.scales.dtype for weight in integers}) > 1:
        return IntWeight.join([replace(weight, scales=weight.scales.float()) for weight in integers])
    return type(weights[0]).join(weights)


def _encode_integers(weight: IntWeight, *, packs: bool) -> dict[str, Tensor]:
    codes, zeros = unpack_words(weight.words, weight.bits, weight.in_features), weight.zero_points
    # In float32, whatever holds them: the library multiplies in the type of the scales.
    tensors = {"weight_scale": weight.scales.float()}
    if packs:
        tensors["weight_packed"] = pack_dense(codes, weight.bits)
        tensors["weight_shape"] = torch.tensor(weight.shape)
        if zeros is not None:
            tensors["weight_zero_point"] = pack_dense(zeros.t(), weight.bits).t()
    else:
        tensors["weight"] = _signed(codes)
        if zeros is not None:
            tensors["weight_zero_point"] = _signed(zeros)
    return tensors


def _signed(codes: Tensor) -> Tensor:
    return (codes.to(torch.int16) - 128).to(torch.int8)


def _unsigned(codes: Tensor) -> Tensor:
    return (codes.to(torch.int16) + 128).to(torch.uint8)
