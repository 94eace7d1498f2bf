"""Weights as AutoAWQ (0.2, version "gemm") stores them.

A projection `p` of 4 bits has `p.qweight` int32 [in, out / 8] of codes, `p.qzeros` int32 [groups, out / 8] of zero points and
`p.scales` float16 [groups, out]: `w = (q - z) * s`. Both are packed along the outputs, eight in a word, of which the lowest
four bits hold the first, the next the third, and so on in the order of `_ORDER`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.quantization.formats.dense_words import num_words, pack_dense, unpack_dense
from backend.quantization.formats.grids import FLOATS, ReadTensor, check_finite, num_groups, stored_weight
from backend.quantization.formats.scheme import StoredScheme
from backend.quantization.int_weight import IntWeight

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # place in a word -> output


def decode(name: str, read: ReadTensor, scheme: StoredScheme, shape: tuple[int, int]) -> IntWeight:
    """The weight of a projection, code for code.

    Args:
        shape: (out_features, in_features), as config.json has it.
    Raises:
        ModelError: by `read`, or for numbers that are no weights.
    """
    rows, columns = shape
    groups, words = num_groups(name, scheme, columns), num_words(rows, scheme.bits)
    codes = _unpack(read(f"{name}.qweight", [(columns, words)], (torch.int32,)), rows)
    zeros = _unpack(read(f"{name}.qzeros", [(groups, words)], (torch.int32,)), rows)
    scales = read(f"{name}.scales", [(groups, rows)], FLOATS)
    check_finite(f"{name}.scales", scales)
    return stored_weight(pack_dense(codes.t(), scheme.bits), columns, scales.t(), zeros.t(), scheme.bits)


def _unpack(words: Tensor, rows: int) -> Tensor:
    """uint8 [any, rows]."""
    places = unpack_dense(words, 4, words.shape[1] * len(_ORDER)).unflatten(1, (-1, len(_ORDER)))
    codes = torch.empty_like(places)
    codes[:, :, list(_ORDER)] = places
    return codes.flatten(1)[:, :rows]
