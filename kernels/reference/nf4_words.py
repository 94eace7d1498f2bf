"""NormalFloat4's codes as kernels take them: in an order, and in words, from which registers of numbers are made quickly."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.int_words import CHUNK, pack_words, unpack_words

_WORDS = 16  # of a chunk

# What stands for each level, the lowest level first. Codes c and c + 8 stand for numbers alike in sign and in the top bit of
# their lower byte, as bfloat16 and, a little larger, as float16: see `kernels.ops.nf4_levels`.
STORED_CODES = (0, 2, 10, 1, 9, 3, 8, 11, 4, 6, 7, 5, 13, 14, 15, 12)
_LEVELS = tuple(STORED_CODES.index(code) for code in range(16))


def to_nf4_chunks(words: Tensor, num_columns: int) -> Tensor:
    """Words in chunks of 128 columns: word w of a chunk has column 32 p + 2 w + h at bits 8 p + 4 h, p < 4, h < 2.

    What is missing of the last chunk is filled with zeros.

    Args:
        words: int32 [rows, cdiv(num_columns, 8)] of `pack_words`, of indices of levels.
    Returns:
        int32 [rows, cdiv(num_columns, 128) * 16], of `STORED_CODES`.
    """
    rows, num_chunks = len(words), -(-num_columns // CHUNK)
    stored = torch.tensor(STORED_CODES, dtype=torch.uint8, device=words.device)
    codes = torch.zeros(rows, num_chunks * CHUNK, dtype=torch.uint8, device=words.device)
    codes[:, :num_columns] = stored[unpack_words(words, 4, num_columns).int()]
    in_words = codes.view(rows, num_chunks, 4, _WORDS, 2).transpose(2, 3)  # chunk, word, place, half
    return pack_words(in_words.reshape(rows, -1), 4)


def from_nf4_chunks(words: Tensor, num_columns: int) -> Tensor:
    """What `to_nf4_chunks` took, but for what was behind the last column."""
    levels = torch.tensor(_LEVELS, dtype=torch.uint8, device=words.device)
    codes = unpack_words(words, 4, words.shape[1] * 8).view(len(words), -1, _WORDS, 4, 2).transpose(2, 3)
    return pack_words(levels[codes.reshape(len(words), -1)[:, :num_columns].int()], 4)
