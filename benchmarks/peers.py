"""What the peer reaches by the protocol of `benchmarks/engine.py`, by card, model and figure.

vLLM 0.26 with torch.compile, CUDA graphs and FlashAttention 3, offline, the same lengths, greedy, EOS ignored. Start to first
token is rounded, and one number stands for an empty and a full cache of compiled kernels. "fp8" behind a model: weights and
activations in E4M3.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

PEER = "vLLM 0.26"

_START = {"start, cold": 60.0, "start, warm": 60.0}

PEER_FIGURES: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "H100": {
        "dummy:llama-3.1-8b": {
            "decode 1": 154,
            "decode 8": 1203,
            "decode 32": 4494,
            "decode 128": 14070,
            "prefill 1x2048": 41400,
            "prefill 16x1024": 43900,
            "mix 256": 8531,
            **_START,
        },
        "dummy:llama-3.1-8b, fp8": {
            "decode 1": 235,
            "decode 8": 1821,
            "decode 32": 6385,
            "decode 128": 18404,
            "prefill 1x2048": 49200,
            "prefill 16x1024": 66200,
        },
        "dummy:smollm2-135m": {
            "decode 1": 366,
            "decode 8": 2628,
            "decode 32": 8770,
            "decode 128": 21083,
            "mix 256": 23459,
        },
    },
    "H200": {
        "dummy:llama-3.1-8b": {
            "decode 1": 202,
            "decode 8": 1582,
            "decode 32": 5786,
            "decode 128": 17115,
            "prefill 1x2048": 42500,
            "prefill 16x1024": 43500,
            "mix 256": 10040,
            **_START,
        },
        "dummy:llama-3.1-8b, fp8": {
            "decode 1": 289,
            "decode 8": 2248,
            "decode 32": 7072,
            "decode 128": 21773,
            "prefill 1x2048": 66100,
            "prefill 16x1024": 68200,
        },
        "dummy:smollm2-135m": {
            "decode 1": 564,
            "decode 8": 4891,
            "decode 32": 15531,
            "decode 128": 41156,
            "mix 256": 36219,
        },
    },
}

MIX_REQUESTS = 256
MIX_MIN_LEN, MIX_MAX_LEN = 100, 1024  # tokens, both ends included
_LOWEST_ID, _HIGHEST_ID = 3, 128255


def card_kind(card: str | None) -> str | None:
    """ "H100" or "H200" of a card's name, of which there are several for each; None for any other."""
    found = re.search(r"\bH[12]00\b", card or "")
    return found.group() if found else None


def peer_figure(card: str | None, model: str, name: str) -> float | None:
    return PEER_FIGURES.get(card_kind(card) or "", {}).get(model, {}).get(name)


def mix_lengths(num_requests: int) -> list[tuple[int, int]]:
    """(prompt, output) tokens of the mix: the peer's for `MIX_REQUESTS`, 140,857 and 141,116 in all.

    One `random.Random(0)` draws a prompt's length and then its ids, prompt after prompt, and then all output lengths; the
    ids are drawn here only because the lengths after them depend on how many there were.
    """
    generator = random.Random(0)
    prompts = []
    for _ in range(num_requests):
        prompts.append(generator.randint(MIX_MIN_LEN, MIX_MAX_LEN))
        for _ in range(prompts[-1]):
            generator.randint(_LOWEST_ID, _HIGHEST_ID)
    return [(prompt, generator.randint(MIX_MIN_LEN, MIX_MAX_LEN)) for prompt in prompts]
