"""Codes of 2 to 8 bits in 32-bit words, the first in the lowest bits, as the compressed-tensors format packs them."""

from __future__ import annotations

import torch
from torch import Tensor


def codes_per_word(bits: int) -> int:
    """A code never lies in two words: 3 bits take 3.2, 5 and 6 take 5.3 and 6.4, 7 take 8."""
    return 32 // bits


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Args:
        codes: integers [rows, columns] in 0 .. 2^bits - 1.
    Returns:
        int32 [rows, cdiv(columns, 32 // bits)]; what is left of the last word is 0.
    """
    per_word = codes_per_word(bits)
    rows, columns = codes.shape
    num_words = -(-columns // per_word)
    padded = torch.zeros(rows, num_words * per_word, dtype=torch.int64, device=codes.device)
    padded[:, :columns] = codes
    shifts = torch.arange(per_word, device=codes.device) * bits
    words = (padded.view(rows, num_words, per_word) << shifts).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_words(words: Tensor, bits: int, num_columns: int) -> Tensor:
    """uint8 [rows, num_columns], what `pack_words` took."""
    shifts = torch.arange(codes_per_word(bits), dtype=torch.int32, device=words.device) * bits
    codes = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return codes.flatten(1)[:, :num_columns].to(torch.uint8)


CHUNK = 32  # columns


def to_chunks(words: Tensor, bits: int) -> Tensor:
    """Words as kernels take them: the 32 codes of a chunk are dealt out over its words, one after the other.

    Word w of a chunk holds columns w, w + bits, w + 2 bits, ...: what stands at one place of neighbouring words are
    neighbouring columns, whose activations are then loaded together.

    Args:
        words: int32 [rows, columns * bits / 32] of `pack_words`, 4 or 8 bits, columns a multiple of 32.
    """
    num_columns = words.shape[1] * codes_per_word(bits)
    codes = unpack_words(words, bits, num_columns).view(len(words), -1, codes_per_word(bits), bits)
    return pack_words(codes.transpose(2, 3).reshape(len(words), num_columns), bits)


def from_chunks(words: Tensor, bits: int) -> Tensor:
    """What `to_chunks` took."""
    num_columns = words.shape[1] * codes_per_word(bits)
    codes = unpack_words(words, bits, num_columns).view(len(words), -1, bits, codes_per_word(bits))
    return pack_words(codes.transpose(2, 3).reshape(len(words), num_columns), bits)
