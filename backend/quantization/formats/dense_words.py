"""Codes of 1 to 8 bits in 32-bit words without a gap: a code may lie in two words, and 32 codes take `bits` words.

So does the compressed-tensors library (0.20); with 2, 4 and 8 bits it is what `kernels.reference.int_words`
holds, with others it is denser.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 32
_MASK = 2**_WORD - 1


def num_words(num_codes: int, bits: int) -> int:
    return -(-num_codes * bits // _WORD)


def pack_dense(codes: Tensor, bits: int) -> Tensor:
    """Args:
        codes: integers [rows, columns] in 0 .. 2^bits - 1.
    Returns:
        int32 [rows, cdiv(columns * bits, 32)], the first code in the lowest bits.
    """
    rows, columns = codes.shape
    blocks = -(-columns // _WORD)
    padded = torch.zeros(rows, blocks * _WORD, dtype=torch.uint8, device=codes.device)
    padded[:, :columns] = codes
    places = padded.view(rows, blocks, _WORD)
    words = torch.zeros(rows, blocks, bits, dtype=torch.int64, device=codes.device)
    for place in range(_WORD):
        word, offset = divmod(place * bits, _WORD)
        shifted = places[:, :, place].long() << offset
        words[:, :, word] |= shifted & _MASK
        if offset + bits > _WORD:
            words[:, :, word + 1] |= shifted >> _WORD
    signed = torch.where(words >= 2 ** (_WORD - 1), words - 2**_WORD, words).to(torch.int32)
    return signed.flatten(1)[:, : num_words(columns, bits)].contiguous()


def unpack_dense(words: Tensor, bits: int, num_columns: int) -> Tensor:
    """uint8 [rows, num_columns], what `pack_dense` took."""
    rows = words.shape[0]
    blocks = -(-num_columns // _WORD)
    padded = torch.zeros(rows, blocks * bits, dtype=torch.int64, device=words.device)
    padded[:, : words.shape[1]] = words.long() & _MASK
    values = padded.view(rows, blocks, bits)
    codes = torch.empty(rows, blocks, _WORD, dtype=torch.uint8, device=words.device)
    for place in range(_WORD):
        word, offset = divmod(place * bits, _WORD)
        value = values[:, :, word] >> offset
        if offset + bits > _WORD:
            value = value | (values[:, :, word + 1] << (_WORD - offset))
        codes[:, :, place] = (value & ((1 << bits) - 1)).to(torch.uint8)
    return codes.flatten(1)[:, :num_columns]
