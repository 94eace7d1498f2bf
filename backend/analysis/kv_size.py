"""How large a KV cache is: bytes of a token, of a request and of a block, from a Hugging Face config.

A layer keeps of each token 2 × num_kv_heads vectors of head_dim values (MHA, GQA, MQA: Shazeer 2019, Ainslie et al. 2023), or
one latent of kv_lora_rank and one rotated key of qk_rope_head_dim (MLA: DeepSeek-AI 2024). A layer with a window keeps the
last `window` tokens only, the token at hand among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from backend.analysis.attention_shape import AttentionShape, read_attention_shape
from backend.core.kv_groups import group_layers

KVDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3", "int8", "int4"]

_VALUE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8_e4m3": 8, "int8": 8, "int4": 4}
_FP16_BYTES = 2
# Beside each vector, which is a token's key or value in one head: a scale, and for the asymmetric int4 a minimum.
_SCALE_BYTES = {"fp8_e4m3": _FP16_BYTES, "int8": _FP16_BYTES, "int4": 2 * _FP16_BYTES}
_SCALE_NAME = {"fp8_e4m3": "scale", "int8": "scale", "int4": "scale and minimum"}


@dataclass(frozen=True, slots=True)
class KVLayerGroup:
    """Layers that keep their tokens equally long."""

    num_layers: int
    window: int | None  # tokens; None keeps all
    bytes_per_token: int  # in all layers of the group
    arithmetic: str

    def tokens_held(self, num_tokens: int) -> int:
        return num_tokens if self.window is None else min(num_tokens, self.window)

    def peak_blocks(self, num_tokens: int, block_size: int) -> int:
        """The most blocks that hold a token in reach of the newest one, while a request grows to `num_tokens`.

        A window that does not begin where a block does touches one more block than its size needs.
        """
        if self.window is None or num_tokens <= self.window:
            return -(-num_tokens // block_size)
        whole, rest = divmod(self.window - 1, block_size)
        straddles = rest > 0 and num_tokens - self.window >= block_size - rest
        return whole + 1 + straddles

    def most_unused_slots(self, block_size: int) -> int:
        """The most slots of a request's blocks, in each layer, that hold no token in reach: what blocks waste at worst."""
        if self.window is None or (rest := (self.window - 1) % block_size) == 0:
            return block_size - 1
        return 2 * block_size - 1 - rest


@dataclass(frozen=True, slots=True)
class RequestKV:
    """The KV of one request at one length."""

    num_tokens: int
    num_bytes: int
    group_bytes: tuple[int, ...]  # one per layer group
    arithmetic: str


@dataclass(frozen=True, slots=True)
class KVSize:
    """The KV cache of a model in one element type."""

    shape: AttentionShape
    dtype: str  # the element type, "auto" resolved
    groups: tuple[KVLayerGroup, ...]  # layers with full attention first, then by window

    @property
    def bytes_per_token(self) -> int:
        """In all layers: what one more token takes until a window is full."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def arithmetic(self) -> str:
        return _sum_up([group.arithmetic for group in self.groups], self.bytes_per_token)

    def request(self, num_tokens: int) -> RequestKV:
        """KV of a request of `num_tokens` (prompt + output), without the rounding up to blocks.

        Raises:
            ValueError: `num_tokens` is below 1.
        """
        _at_least_one("num_tokens", num_tokens)
        held = [group.tokens_held(num_tokens) for group in self.groups]
        parts = tuple(tokens * group.bytes_per_token for tokens, group in zip(held, self.groups, strict=True))
        lines = [
            f"{_tokens(tokens, num_tokens)} × {group.bytes_per_token:,} bytes = {part:,}"
            for tokens, group, part in zip(held, self.groups, parts, strict=True)
        ]
        total = sum(parts)
        return RequestKV(num_tokens, total, parts, f"{_sum_up(lines, total)} bytes ({in_gib(total)})")

    def blocks(self, block_size: int) -> KVBlocks:
        """The same cache in blocks of `block_size` tokens. Raises ValueError for a size below 1."""
        _at_least_one("block_size", block_size)
        return KVBlocks(self, block_size)


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """A KV cache laid out in blocks of one pool. A block has its slots in equally many layers, whichever they are.

    Layers that keep their tokens equally long share out among blocks, see `backend.core.kv_groups`: the last of those blocks
    may have room for more layers than there are.
    """

    kv: KVSize
    block_size: int  # tokens

    @property
    def layers_per_block(self) -> int:
        """All layers of a model whose layers are all alike."""
        return _layers_per_block(self.kv.shape.windows)

    @property
    def bytes_per_block(self) -> int:
        return self.layers_per_block * self._bytes_per_layer * self.block_size

    @property
    def group_block_bytes(self) -> tuple[int, ...]:
        """Per layer group, of the blocks with the same tokens in all of its layers."""
        shares = [-(-group.num_layers // self.layers_per_block) for group in self.kv.groups]
        return tuple(share * self.bytes_per_block for share in shares)

    @property
    def arithmetic(self) -> str:
        if len(self.kv.groups) == 1:
            return f"{self.block_size} tokens × {self.kv.bytes_per_token:,} bytes = {self.bytes_per_block:,}"
        layers = f"{self.layers_per_block} layer{'s' * (self.layers_per_block > 1)}"
        return f"{self.block_size} tokens × {layers} × {self._bytes_per_layer:,} bytes = {self.bytes_per_block:,}"

    @property
    def _bytes_per_layer(self) -> int:
        return self.kv.bytes_per_token // self.kv.shape.num_layers

    def request_blocks(self, num_tokens: int) -> tuple[int, ...]:
        """Blocks per group that a request needs at most on its way to `num_tokens`, prefill chunks in flight aside."""
        return tuple(group.peak_blocks(num_tokens, self.block_size) for group in self.kv.groups)

    def request_bytes(self, num_tokens: int) -> int:
        counts = self.request_blocks(num_tokens)
        return sum(count * size for count, size in zip(counts, self.group_block_bytes, strict=True))

    @property
    def most_wasted_bytes(self) -> int:
        """What no request's blocks exceed its tokens by: below one block, or two where a window moves through them.

        Room for layers that there are not is not counted.
        """
        return sum(group.most_unused_slots(self.block_size) * group.bytes_per_token for group in self.kv.groups)


def kv_size(config: Mapping[str, Any], dtype: KVDtype = "auto") -> KVSize:
    """KV cache of the model that a Hugging Face config describes.

    Args:
        config: a config.json as a dictionary, nested under `text_config` or not.
        dtype: element type. auto: the config's own, bfloat16 where it names none. fp8_e4m3 and int8 add one fp16 scale to
            each key and each value of a token and KV head; int4 packs two values a byte and adds an fp16 scale and an fp16
            minimum. Of MLA the latent and the rotated key count as the one key and the one value.

    Raises:
        ValueError: a field of the config is missing or wrong, or the dtype is not one of these.
    """
    shape = read_attention_shape(config)
    resolved = _resolved(dtype, shape.checkpoint_dtype)
    windows = sorted(set(shape.windows), key=lambda window: (window is not None, window or 0))
    groups = tuple(_group(shape, shape.windows.count(window), window, resolved) for window in windows)
    return KVSize(shape, resolved, groups)


def misquoted_llama_3_8b() -> str:
    """Where the often-quoted 2.5 MB a token, 320 GB at 131,072 tokens, of Llama-3-8B come from, as lines to show.

    It is the product of another model: the 80 layers of the 70B, with a key and a value for each of its 64 query heads.
    """
    llama = {"model_type": "llama", "dtype": "bfloat16"}
    right = kv_size(
        llama | {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    )
    wrong = kv_size(llama | {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64})
    times_layers = wrong.shape.num_layers / right.shape.num_layers
    times_heads = wrong.shape.num_kv_heads // right.shape.num_kv_heads
    return (
        f"Llama-3-8B: {right.arithmetic} bytes a token; {right.request(131_072).arithmetic}\n"
        f"Quoted as 2.5 MB and 320 GB: {wrong.arithmetic} bytes a token; {wrong.request(131_072).arithmetic}\n"
        f"That is Llama-3-70B without GQA: {wrong.shape.num_layers}/{right.shape.num_layers} layers × "
        f"{wrong.shape.num_kv_heads}/{right.shape.num_kv_heads} KV heads = {times_layers:g} × {times_heads} = "
        f"{wrong.bytes_per_token / right.bytes_per_token:g} times too much"
    )


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"


def count_of(number: int, thing: str) -> str:
    """ "1 block", "1,024 blocks"."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


@lru_cache(maxsize=8)
def _layers_per_block(windows: tuple[int | None, ...]) -> int:
    """Asked for with every length that is tried, and found layer by layer."""
    return max(len(group.layers) for group in group_layers(windows))


def _group(shape: AttentionShape, num_layers: int, window: int | None, dtype: str) -> KVLayerGroup:
    bits, scale = _VALUE_BITS[dtype], _SCALE_BYTES.get(dtype, 0)
    for _, length in shape.vectors:
        if length * bits % 8:
            raise ValueError(
                f"KV dtype {dtype} packs two values a byte, and a vector of {length} values has an odd one"
            )
    per_layer = sum(count * (length * bits // 8 + scale) for count, length in shape.vectors)
    total = num_layers * per_layer
    kind = "layers" if window is None else f"layers of window {window:,}"
    per_value = f"{bits // 8} byte{'s' * (bits > 8)}" if bits >= 8 else "1/2 byte"
    scales = f"{scale} bytes of {_SCALE_NAME[dtype]}" if scale else ""
    if shape.rope_dim is None:
        vector = f"{shape.head_dim} × {per_value}"
        vector = f"({vector} + {scales})" if scales else vector
        line = f"2 × {num_layers} {kind} × {shape.num_kv_heads} KV head{'s' * (shape.num_kv_heads > 1)} × {vector}"
    else:
        values = f"({shape.head_dim} + {shape.rope_dim}) × {per_value}"
        line = f"{num_layers} {kind} × " + (f"({values} + 2 × {scales})" if scales else values)
    return KVLayerGroup(num_layers, window, total, f"{line} = {total:,}")


def _resolved(dtype: str, checkpoint_dtype: str | None) -> str:
    if dtype not in get_args(KVDtype):
        raise ValueError(f"KV dtype {dtype!r} is not one of {', '.join(get_args(KVDtype))}")
    if dtype != "auto":
        return dtype
    resolved = checkpoint_dtype or "bfloat16"
    if resolved not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"dtype {resolved!r} of the config is not one of float32, bfloat16, float16; name the KV dtype"
        )
    return resolved


def _tokens(held: int, num_tokens: int) -> str:
    return f"{held:,} tokens" if held == num_tokens else f"{held:,} of {num_tokens:,} tokens"


def _sum_up(lines: list[str], total: int) -> str:
    """One line as it is; several joined, with their sum."""
    return lines[0] if len(lines) == 1 else f"{' + '.join(f'[{line}]' for line in lines)} = {total:,}"


def _at_least_one(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} {value!r} is not an integer of at least 1")
