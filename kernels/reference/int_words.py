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
