"""What heads draft for a model of few tokens, which they can learn in a moment."""

from __future__ import annotations

from typing import Any

import torch

from tests.spec_decode.tiny_heads import random_ids

VOCAB_SIZE = 40
VOCABULARY = torch.tensor([*range(9), *range(10, VOCAB_SIZE)])  # token 9 is never drafted
# They begin differently: the entry at the end of a shared block would hold what came next in another prompt.
PROMPTS = {
    f"p{length}": [first, *random_ids(VOCAB_SIZE, length - 1, seed=length).tolist()]
    for first, length in enumerate((1, 2, 15, 16, 17, 40, 100))
}
GREEDY: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
