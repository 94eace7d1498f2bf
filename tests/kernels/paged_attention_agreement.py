"""The paged attention kernel against its reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.ops.attention_tiles import TileSizes, tile_sizes
from kernels.ops.paged_attention import paged_attention
from kernels.reference.paged_attention import paged_attention as reference
from kernels.registry import REGISTRY
from tests.kernels.oracle import GuardBands


def short_shares(inputs: dict[str, Any]) -> TileSizes:
    """The tiles of these inputs, but that their keys are cut into shares of 16 and more."""
    query, key_cache = inputs["query"], inputs["key_cache"]
    num_tokens, num_heads, head_dim = query.shape
    group, num_reqs = num_heads // key_cache.shape[2], len(inputs["seq_lens"])
    return tile_sizes(num_tokens, num_reqs, group, head_dim, query.element_size())._replace(min_keys=16)


def assert_agrees(inputs: dict[str, Any], tiles: TileSizes | None = None) -> Tensor:
    output = paged_attention(**inputs, tiles=tiles)
    tolerance = REGISTRY["paged_attention"].tolerances[output.dtype]
    torch.testing.assert_close(output, reference(**inputs), atol=tolerance.atol, rtol=tolerance.rtol)
    return output


def assert_agrees_between_bands(inputs: dict[str, Any]) -> None:
    """Also where NaN lies before and after the query and both caches."""
    bands = GuardBands()
    for name in ("query", "key_cache", "value_cache"):
        inputs[name] = bands.wrap(inputs[name])
    assert_agrees(inputs)
    bands.assert_untouched()
