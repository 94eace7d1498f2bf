"""`CodeGrid`: what a weight's integer codes stand for, where an op takes codes in place of a matrix."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kernels.reference.int_linear import dequantize_int
from kernels.reference.int_words import from_chunks


class CodeGrid(NamedTuple):
    """`W[n, k] = (q[n, k] - z[n, g]) * s[n, g]`, or `q[n, k] * s[n, g] + m[n, g]`, g the group of k.

    A group is K / num_groups inputs that follow one another, a multiple of 32 or all of K. The codes q themselves are int32
    [N, cdiv(K, 128) * 4 * bits], see `kernels.reference.int_words.to_chunks`.
    """

    bits: int  # 4 or 8
    scales: Tensor  # s, float [N, num_groups]
    zero_points: Tensor | None = None  # z, int16 [N, num_groups]; None: with no minimums either, 2^(bits - 1)
    minimums: Tensor | None = None  # m, scales.dtype [N, num_groups]

    def dequantize(self, words: Tensor, num_columns: int) -> Tensor:
        """float32 [N, num_columns]."""
        codes = from_chunks(words, self.bits, num_columns)
        return dequantize_int(codes, self.scales, self.zero_points, self.minimums, self.bits, num_columns)
