"""Figures of a variant as the quantization lab hands them on, by column of the results' table. No torch at module level."""

from __future__ import annotations

from typing import Any

from backend.experiments.quality import Quality
from backend.experiments.quantization_config import Variant
from backend.experiments.text_pass import TextModel

Result = dict[str, Any]


def stored_settings(model: TextModel, variant: Variant | None = None) -> dict[str, Any]:
    """Of an engine that does the same, defaults filled in; a checkpoint says itself how it is stored."""
    return {
        "quantization": model.loaded.quantization.to_dict(),
        "cache": {"dtype": variant.cache_dtype if variant else "auto"},
    }


def storage(model: TextModel) -> Result:
    return {
        "bits_per_weight": bits_per_weight(model),
        "weights_bytes": model.loaded.weights_bytes,
        "kv_bytes_per_token": model.shape.group.bytes_per_token,
        "num_layers": model.loaded.num_quantized_layers,
    }


def bits_per_weight(model: TextModel) -> float:
    """Of the linear layers, scales included, those that are left as they are among them; without embedding and head."""
    from backend.layers.linear import Linear
    from backend.layers.quantized_linear import QuantizedLinear

    num_bits, num_weights = 0, 0
    width = model.loaded.model.final_norm.weight.dtype.itemsize * 8
    for module in model.loaded.model.layers.modules():
        if isinstance(module, Linear | QuantizedLinear):
            size = module.in_features * module.out_features
            num_bits += module.packed.nbytes * 8 if isinstance(module, QuantizedLinear) else size * width
            num_weights += size
    return num_bits / num_weights


def figures(quality: Quality) -> Result:
    kl = quality.kl
    result = {"num_tokens": quality.num_tokens, "perplexity": quality.perplexity}
    if kl is None:
        return result
    return result | {
        "kl_mean": kl.mean,
        "kl_p50": kl.p50,
        "kl_p99": kl.p99,
        "kl_max": kl.max,
        "top1_agreement": quality.top1_agreement,
        "delta_p": quality.delta_p,
        "delta_p_standard_error": quality.delta_p_standard_error,
    }
