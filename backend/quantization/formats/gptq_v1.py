"""Weights as AutoGPTQ (0.7) stores them, and GPTQModel after it by default.

A projection `p` has `p.qweight` int32 [in * bits / 32, out] of codes, `p.qzeros` int32 [groups, out * bits / 32] of zero
points less one, `p.scales` float [groups, out] and `p.g_idx` int32 [in], the group of each input: `w = (q - z) * s`. Codes are
packed along the inputs and zero points along the outputs, without a gap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.errors import ModelError
from backend.quantization.base import PackedWeight
from backend.quantization.formats.dense_words import num_words, pack_dense, unpack_dense
from backend.quantization.formats.grids import FLOATS, ReadTensor, check_finite, num_groups, stored_weight
from backend.quantization.formats.scheme import StoredScheme
from backend.quantization.permuted_weight import PermutedWeight

_WORD = 32


def decode(name: str, read: ReadTensor, scheme: StoredScheme, shape: tuple[int, int]) -> PackedWeight:
    """The weight of a projection, code for code; where groups lie scattered (desc_act), a `PermutedWeight`.

    Args:
        shape: (out_features, in_features), as config.json has it.
    Raises:
        ModelError: by `read`, or for numbers that are no weights.
    """
    rows, columns = shape
    bits, groups = scheme.bits, num_groups(name, scheme, columns)
    words = read(f"{name}.qweight", [(num_words(columns, bits), rows)], (torch.int32,))
    zeros = _zero_points(read(f"{name}.qzeros", [(groups, num_words(rows, bits))], (torch.int32,)), bits, rows)
    scales = read(f"{name}.scales", [(groups, rows)], FLOATS)
    check_finite(f"{name}.scales", scales)
    group_of = read(f"{name}.g_idx", [(columns,)], (torch.int32, torch.int64)).long()
    order = group_of.argsort(stable=True)
    if not torch.equal(group_of[order], torch.arange(groups).repeat_interleave(columns // groups)):
        raise ModelError(
            f"{name}.g_idx (desc_act) does not give {columns // groups:,} inputs to each of {groups:,} groups"
        )
    if torch.equal(order, torch.arange(columns)):
        return stored_weight(words.t(), columns, scales.t(), zeros.t(), bits)
    permuted = pack_dense(unpack_dense(words.t(), bits, columns)[:, order], bits)
    return PermutedWeight(stored_weight(permuted, columns, scales.t(), zeros.t(), bits), order)


def _zero_points(words: Tensor, bits: int, rows: int) -> Tensor:
    """uint8 [groups, rows].

    Where no field lies in two words, the one was taken from whole words: what a zero point of 0 borrowed is paid back so.
    """
    if _WORD % bits:
        return (unpack_dense(words, bits, rows) + 1) & ((1 << bits) - 1)
    return unpack_dense(words + sum(1 << place for place in range(0, _WORD, bits)), bits, rows)
