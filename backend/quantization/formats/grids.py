"""What the formats of integer weights have in common as they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from backend.errors import ModelError
from backend.quantization.formats.dense_words import unpack_dense
from backend.quantization.formats.scheme import StoredScheme
from backend.quantization.int_weight import IntWeight
from kernels.reference.int_words import pack_words

# (name, shapes, dtypes) -> a tensor of the checkpoint, after a check that it has one of the shapes and of the dtypes.
ReadTensor = Callable[[str, Sequence[tuple[int, ...]], tuple[torch.dtype, ...]], Tensor]

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def num_groups(name: str, scheme: StoredScheme, columns: int) -> int:
    """Of a projection's inputs. Raises `ModelError` where they cannot be cut so."""
    if scheme.scale_of != "group":
        return 1
    if columns % scheme.group_size:
        raise ModelError(f"{name}: groups of {scheme.group_size} do not divide {columns:,} inputs")
    return columns // scheme.group_size


def check_finite(name: str, scales: Tensor) -> None:
    """Raise `ModelError` naming scales that no weights have."""
    if not scales.isfinite().all():
        raise ModelError(f"{name} has values that are infinite or NaN")


def stored_weight(words: Tensor, columns: int, scales: Tensor, zeros: Tensor | None, bits: int) -> IntWeight:
    """A weight of codes that lie without a gap.

    Args:
        words: int32 [out_features, cdiv(columns * bits, 32)], as `formats.dense_words` describes them.
        scales: float [out_features, groups].
        zeros: uint8 [out_features, groups].
    """
    is_whole = (
        columns * bits % 32 == 0 and 32 % bits == 0
    )  # no code lies in two words, and none of the last word is left
    held = words.contiguous() if is_whole else pack_words(unpack_dense(words, bits, columns), bits)
    return IntWeight(bits, columns, held, _narrowest(scales), None if zeros is None else zeros.contiguous())


def _narrowest(scales: Tensor) -> Tensor:
    """Steps in float16 where that holds them, as ours are, and in float32 where there is one per channel."""
    wide = scales.float().contiguous()
    half = wide.half()
    return half if scales.shape[1] > 1 and torch.equal(half.float(), wide) else wide
