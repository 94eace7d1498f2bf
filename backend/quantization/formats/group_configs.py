"""`quantization_config` as AutoAWQ (0.2) and AutoGPTQ (0.7, and GPTQModel after it) write it.

Of what it says only that is read which decides how tensors are stored. The rest says how they were made or are to be run.
"""

from __future__ import annotations

import re

from backend.models.json_fields import JsonFields
from backend.quantization.formats.scheme import REGEX, Format, StoredQuantization, StoredScheme, all_layers_but
from backend.quantization.group_size import CHANNEL

_GPTQ_BITS = (2, 3, 4, 8)


def read_awq(config: JsonFields) -> StoredQuantization:
    """Raise `ModelError` where it is malformed, or for another layout than that of AutoAWQ's GEMM."""
    config.one_of("version of awq", config.text("version", "gemm").lower(), ("gemm",))
    config.one_of("checkpoint_format of awq", config.text("checkpoint_format", "gemm").lower(), ("gemm",))
    bits = config.integer("bits", most=64)
    if bits != 4:
        raise config.error(f"bits {bits} of awq is not supported; supported: 4")
    if not config.flag("zero_point", True):
        raise config.error("zero_point false of awq is not supported; supported: true")
    kept = config.get("modules_to_not_convert") or []
    if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
        raise config.error("modules_to_not_convert is not a list of names")
    return all_layers_but(_scheme(config, "awq-gemm", bits), tuple(f"{REGEX}.*{re.escape(name)}" for name in kept))


def read_gptq(config: JsonFields) -> StoredQuantization:
    """Raise `ModelError` where it is malformed, for another layout than AutoGPTQ's first, or where layers differ in theirs."""
    # GPTQModel writes both names of it, AutoGPTQ none.
    stored_as = config.text("checkpoint_format", config.text("format", "gptq")).lower()
    config.one_of("checkpoint_format of gptq", stored_as, ("gptq",))
    if config.get("is_marlin_format") not in (None, False):
        raise config.error("is_marlin_format is set: weights in marlin's layout are not supported; supported: gptq")
    config.one_of("pack_dtype of gptq", config.text("pack_dtype", "int32"), ("int32",))
    bits = config.integer("bits", most=64)
    if bits not in _GPTQ_BITS:
        raise config.error(f"bits {bits} of gptq is not supported; supported: {', '.join(map(str, _GPTQ_BITS))}")
    if config.get("lm_head") not in (None, False):
        raise config.error("a quantized output head (lm_head) is not supported")
    for key in ("dynamic", "modules_in_block_to_quantize"):
        if config.get(key) not in (None, {}, []):
            raise config.error(f"{key} is set: layers that are stored in different ways are not supported")
    return all_layers_but(_scheme(config, "gptq-v1", bits), ())


def _scheme(config: JsonFields, stored_as: Format, bits: int) -> StoredScheme:
    size = config.integer("group_size", 128, least=CHANNEL, most=2**20)
    if size == 0:
        raise config.error(f"group_size 0 is not an integer from 1, or {CHANNEL} (per channel)")
    return StoredScheme(stored_as, bits, "channel" if size == CHANNEL else "group", size, symmetric=False)
