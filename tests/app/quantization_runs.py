"""Plausible quantization runs for the pages and the command line to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.services import Services
from backend.experiments.layer_error import KINDS
from backend.experiments.quantization_config import REFERENCE, QuantizationLabConfig
from backend.experiments.ranges import EXPECTED_ORDER
from backend.metrics.stats import RunEnd, RunStart, RunStatus
from db.recorder import RunRecorder

NUM_LAYERS = 3
_FURTHEST = ("activations", 1, "down")
ENVIRONMENT = {"cpu": "CPU", "gpu": None, "versions": {"torch": "2.13.0"}}


def layer_errors(scale: float) -> list[dict[str, Any]]:
    """Channel 7 of layer 1's MLP output stands out."""
    return [
        {
            "layer": layer,
            "kind": kind,
            "output_error": scale * (1 + layer),
            "weight_error": scale,
            "bits_per_weight": 4.5,
            "largest_channels": [
                {
                    "channel": 7 if (layer, kind) == (1, "down") else 3,
                    "ratio": 40.0 if (layer, kind) == (1, "down") else 2.0,
                }
            ],
        }
        for layer in range(NUM_LAYERS)
        for kind in KINDS
    ]


def result(variant: str, **changes: Any) -> dict[str, Any]:
    """Of a variant with a quarter of the reference's bytes."""
    sizes = {"bits_per_weight": 8.25, "weights_bytes": 100 * 2**20, "kv_bytes_per_token": 768, "num_layers": 12}
    quality = {
        "num_tokens": 2046,
        "perplexity": 20.5,
        "kl_mean": 0.003,
        "kl_p50": 0.002,
        "kl_p99": 0.01,
        "kl_max": 0.1,
        "top1_agreement": 0.97,
        "delta_p": -0.27,
        "delta_p_standard_error": 0.02,
    }
    speeds = {"emulated": False, "decode_1_tok_s": 40.0, "decode_32_tok_s": 300.0, "prefill_tok_s": 400.0}
    times = {"prepare_s": 1.0, "measure_s": 2.0}
    settings = {
        "quantization": {"method": variant, "group_size": 64, "bits": None, "skip": []},
        "cache": {"dtype": "auto"},
    }
    return {
        "variant": variant,
        "settings": settings,
        **sizes,
        **quality,
        **speeds,
        **times,
        "layers": layer_errors(0.01),
    } | changes


def reference(**changes: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(
        ("kl_mean", "kl_p50", "kl_p99", "kl_max", "top1_agreement", "delta_p", "delta_p_standard_error")
    )
    own = {"bits_per_weight": 32.0, "weights_bytes": 400 * 2**20, "perplexity": 20.0, "decode_1_tok_s": 20.0}
    return result(REFERENCE, layers=None, num_layers=0, **nothing) | own | changes


def emulated(variant: str, **changes: Any) -> dict[str, Any]:
    slow = {"emulated": True, "decode_1_tok_s": None, "decode_32_tok_s": None, "prefill_tok_s": None}
    return result(variant) | slow | {"weights_bytes": 60 * 2**20, "bits_per_weight": 4.2, "kl_mean": 0.2} | changes


def failed(variant: str, problem: str) -> dict[str, Any]:
    return {"variant": variant, "problem": problem}


def scan(variant: str, costs: Mapping[str, float]) -> list[dict[str, Any]]:
    """The rows of a sensitivity scan: what each part costs alone."""
    return [result(variant, part=part, kl_mean=cost, layers=None) for part, cost in costs.items()]


def layer_costs(scale: float) -> dict[str, float]:
    """By layer, and all of them together. The MLP output of layer 1 costs most, queries and keys of layer 0 nothing."""
    costs = {f"layers.{layer}.{name}": scale for layer in range(NUM_LAYERS) for name in KINDS.values()}
    return costs | {"layers.1.mlp.down": 10 * scale, "layers.0.attention.qkv": 0.0, "all": 15 * scale}


def ranges(variant: str, scale: float = 1.0) -> list[dict[str, Any]]:
    """The rows of a variant, in an order of groups that is not the expected one; input 7 of layer 1's MLP output stands out."""
    reaches = {"weights": 9.0, "activations": 3.0, "KV": 20.0, "attention logits": 30.0}
    parts = {"weights": KINDS, "activations": KINDS, "KV": ("keys", "values"), "attention logits": ("scores",)}
    outliers = {
        "weights": {"output": 1, "input": 2},
        "activations": {"input": 7},
        "KV": {"head": 1, "channel": 5},
        "attention logits": {"head": 2},
    }
    return [
        {
            "variant": variant,
            "part": group,
            "num_tokens": 1024,
            "layers": [
                {
                    "group": group,
                    "layer": layer,
                    "part": part,
                    "max_abs": reaches[group] * scale * (100 if (group, layer, part) == _FURTHEST else 2),
                    "p999": reaches[group] * scale,
                    "kurtosis": 4.0,
                    "outlier": outliers[group],
                }
                for layer in range(NUM_LAYERS)
                for part in parts[group]
            ],
        }
        for group in EXPECTED_ORDER
    ]


DEFAULT_RESULTS = (
    reference(),
    result("int8"),
    emulated("nf4"),
    failed("gptq", "dummy:tiny has no files <b>at all</b>"),
)


def add_quantization_run(
    services: Services,
    results: Sequence[dict[str, Any]] = DEFAULT_RESULTS,
    *,
    model: str = "dummy:tiny",
    label: str | None = None,
    status: RunStatus = "finished",
    error: str | None = None,
    **settings: Any,
) -> int:
    """Store a run of the lab that has ended."""
    variants = list(dict.fromkeys(row["variant"] for row in results if row["variant"] != REFERENCE)) or ["int8"]
    config = QuantizationLabConfig.from_dict({"model": model, "variants": variants} | settings).to_dict()
    run_id = services.repository.create(config, {}, label, kind="quantization")
    recorder = RunRecorder(services.database, run_id)
    load = {"num_tokens": 2048, "window": 1024, "dtype": "float32"}
    recorder.on_run_start(RunStart(100.0, config, ENVIRONMENT, load, ("a notice",), {}, 0))
    for row in results:
        services.repository.add_quantization_result(run_id, row)
    recorder.on_run_end(RunEnd(status, 190.0, None, error))
    recorder.close()
    return run_id
