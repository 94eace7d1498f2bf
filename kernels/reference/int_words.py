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


CHUNK = 128  # columns
_WORDS = 16  # of a chunk and a plane


def to_chunks(words: Tensor, bits: int) -> Tensor:
    """Words as kernels take them: chunks of 128 columns, of which 32 neighbours stand at one place of 16 words, in pairs.

    With 4 bits, word w of a chunk holds column 32 p + 2 w + h at bits 4 p + 16 h. With 8 bits a chunk has two such planes, of
    the codes' low halves and of their high ones. What is missing of the last chunk is filled with zeros.

    Args:
        words: int32 [rows, columns * bits / 32] of `pack_words`, 4 or 8 bits.
    Returns:
        int32 [rows, cdiv(columns, 128) * 4 * bits].
    """
    rows, num_columns = len(words), words.shape[1] * codes_per_word(bits)
    num_chunks = -(-num_columns // CHUNK)
    codes = torch.zeros(rows, num_chunks * CHUNK, dtype=torch.uint8, device=words.device)
    codes[:, :num_columns] = unpack_words(words, bits, num_columns)
    planes = [codes & 15] if bits == 4 else [codes & 15, codes >> 4]
    chunks = []
    for plane in planes:
        pairs = plane.view(rows, num_chunks, 4, _WORDS, 2).to(torch.int32)  # place, word, half
        chunk = torch.zeros(rows, num_chunks, _WORDS, dtype=torch.int32, device=words.device)
        for place in range(4):
            chunk |= (pairs[:, :, place, :, 0] << 4 * place) | (pairs[:, :, place, :, 1] << 4 * place + 16)
        chunks.append(chunk)
    return torch.cat(chunks, dim=2).flatten(1)


def from_chunks(words: Tensor, bits: int, num_columns: int) -> Tensor:
    """What `to_chunks` took, of `num_columns` columns."""
    rows, num_planes = len(words), bits // 4
    chunks = words.view(rows, -1, num_planes, 1, _WORDS, 1)
    places = torch.arange(4, dtype=torch.int32, device=words.device).view(4, 1, 1)
    halves = torch.arange(2, dtype=torch.int32, device=words.device)
    planes = (chunks >> (4 * places + 16 * halves)) & 15  # rows, chunk, plane, place, word, half
    codes = planes[:, :, 0] if num_planes == 1 else planes[:, :, 0] | (planes[:, :, 1] << 4)
    return pack_words(codes.flatten(1)[:, :num_columns], bits)
