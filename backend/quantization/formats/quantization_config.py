"""What a checkpoint's `quantization_config` says of its layers, in the form of the tool that made it."""

from __future__ import annotations

from backend.models.json_fields import JsonFields
from backend.quantization.formats.compressed_tensors_config import read_compressed_tensors
from backend.quantization.formats.group_configs import read_awq, read_gptq
from backend.quantization.formats.scheme import QUANT_METHOD, StoredQuantization

_READERS = {QUANT_METHOD: read_compressed_tensors, "awq": read_awq, "gptq": read_gptq}


def read_quantization(fields: JsonFields) -> StoredQuantization | None:
    """Of a config.json; None where it has no `quantization_config`.

    Raises:
        ModelError: it is malformed, or something in it is not supported.
    """
    config = fields.table("quantization_config")
    if config is None:
        return None
    method = config.text("quant_method", "unnamed")
    return _READERS[config.one_of("quantization_config.quant_method", method, tuple(_READERS))](config)
