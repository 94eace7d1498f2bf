"""The map of the pool: a canvas with one cell a block, drawn in the browser from the blocks that requests hold.

What goes there are the held lists themselves as 32-bit numbers, so that a pool of 100,000 blocks is a few hundred kilobytes;
who holds a block, and which of its tokens, is looked up there when somebody points at it. Texts of blocks are there only if
somebody has asked for them.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from streamlit.components.v2 import component

from app.components import palette
from app.components.kv_cache_text import BlockTexts
from backend.metrics.kv_use import KVUse
from backend.metrics.pool_history import PoolMoment

_ASSETS = Path(__file__).resolve().parents[1] / "assets"
_SCRIPTS = ("kv_cache_pool.js", "kv_cache_pixels.js", "kv_cache.js")
_mount = component(
    "servelab_kv_cache",
    html=(_ASSETS / "kv_cache.html").read_text(encoding="utf-8"),
    css=(_ASSETS / "kv_cache.css").read_text(encoding="utf-8"),
    js="\n".join((_ASSETS / name).read_text(encoding="utf-8") for name in _SCRIPTS),
)

# Runs' colours but for those with a meaning on this page; the two that follow have none anywhere.
_COLOURS = (
    *(
        colour
        for colour in palette.run_colours(range(7), None).values()
        if colour not in (palette.CACHED, palette.ERROR)
    ),
    "#7B61C4",
    "#A65A2A",
)
_NUMBERED = re.compile(r"(?:.*?-)??(?:(warmup-)?(\d+)(/\d+)?|c(\d+)-t(\d+))")  # as the runner names its requests
_OF_RUN = re.compile(r"run(\d+)-")


def request_name(request_id: str) -> str:
    """What stands behind "request": its number in the workload, "warm-up 0", "7/1" for the second sample of a prompt, "c2-t1"
    for the second turn of the third conversation, or an id of another kind as it is."""
    match = _NUMBERED.fullmatch(request_id)
    if match is None:
        return request_id
    if match[4]:
        return f"c{match[4]}-t{match[5]}"
    return f"{'warm-up ' if match[1] else ''}{match[2]}{match[3] or ''}"


def run_of(request_id: str) -> int | None:
    """The run whose request it is, as the runner names them."""
    match = _OF_RUN.match(request_id)
    return int(match[1]) if match else None


def request_colour(request_id: str) -> str:
    """Of the id alone, so that a request keeps it from step to step; neighbours in the workload differ."""
    match = _NUMBERED.fullmatch(request_id)
    place = int(match[2] or match[4]) if match else zlib.crc32(request_id.encode())
    return _COLOURS[place % len(_COLOURS)]


def show(moment: PoolMoment, use: KVUse, num_blocks: int, texts: BlockTexts | None = None) -> None:
    _mount(key="kv-map", data=encode(moment, use, num_blocks, texts))


def encode(moment: PoolMoment, use: KVUse, num_blocks: int, texts: BlockTexts | None = None) -> bytes:
    """As `kv_cache_pool.js` reads it: u32 size of the header, a JSON header, then block ids as u32; all little-endian."""
    held = moment.blocks.held
    lists = [
        (place, group, blocks) for place, groups in enumerate(held.values()) for group, blocks in enumerate(groups)
    ]
    header: dict[str, Any] = {
        "step": moment.step.step,
        "num_blocks": num_blocks,
        "block_size": use.block_size,
        "evictable": palette.CACHED,
        "legend": _COLOURS[:3],
        "requests": [
            {
                "id": request_id,
                "name": request_name(request_id),
                "colour": request_colour(request_id),
                "tokens": use.requests[request_id].num_tokens,
                "blocks": use.requests[request_id].num_blocks,
            }
            for request_id in held
        ],
        "lists": [(place, group, len(blocks)) for place, group, blocks in lists],
    }
    if texts is not None:
        header["texts"] = {"lines": texts.lines, "note": texts.note}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    ids = chain(chain.from_iterable(blocks for _, _, blocks in lists), sorted(moment.blocks.cached))
    return struct.pack("<I", len(text)) + text + np.fromiter(ids, dtype="<u4").tobytes()
