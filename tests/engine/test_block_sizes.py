"""Known fault KN-6: a block size that layer, kernel and allocator hold different opinions of (Wenyueh/MinivLLM#34).

Tests at the default size never see it; neither do those of one KV dtype, or without blocks that are found again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.engine.engine_host import EngineHost
from tests.engine.driving import answers, config_of
from tests.engine.test_equivalence import prompts_of

BLOCK_SIZES = (1, 8, 16, 128, 256)
PROMPTS = prompts_of([1, 7, 100, 300])


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8", "int4"])
def test_compressed_keys_and_values_are_the_same_at_every_block_size(
    host: EngineHost, tiny_llama: Path, dtype: str, prefix_caching: bool
) -> None:
    """A token's scale is its own, so that no block has a say in what is stored; a second time, cached blocks are read."""
    expected: dict[str, list[int]] = {}
    for block_size in BLOCK_SIZES:
        settings = {"cache__dtype": dtype, "cache__enable_prefix_caching": prefix_caching}
        host.load(config_of(tiny_llama, cache__block_size=block_size, **settings))
        for attempt in ("first", "second"):
            found = answers(host, PROMPTS, max_tokens=12, ignore_eos=True)
            ids = {key: answer.token_ids for key, answer in found.items()}
            expected = expected or ids
            assert ids == expected, f"blocks of {block_size}, {attempt} time"
            cached = {key: answer.last.num_cached_tokens or 0 for key, answer in found.items()}
            hit = prefix_caching and attempt == "second"
            assert cached["p300"] == (299 // block_size * block_size if hit else 0)
