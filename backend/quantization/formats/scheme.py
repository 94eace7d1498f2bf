"""How a checkpoint stores its linear layers, and how a `quantization_config` in the form of compressed-tensors says so.

Plain JSON: neither torch nor that library is needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from backend.quantization.group_size import CHANNEL

# The first three are compressed-tensors', the others of the tools that are named so.
Format = Literal["pack-quantized", "int-quantized", "float-quantized", "awq-gemm", "gptq-v1"]
ScaleOf = Literal["group", "channel", "tensor"]
ActivationScaleOf = Literal["token", "tensor"]

QUANT_METHOD = "compressed-tensors"
HEAD = "lm_head"
_VERSION = "0.20.0"  # of the library whose form this is
_LINEAR = "Linear"  # a target that names the class: all linear layers, the output head too
REGEX = "re:"


@dataclass(frozen=True, slots=True)
class StoredScheme:
    """How the weight of a linear layer is stored.

    Attributes:
        group_size: inputs that share a scale, or `CHANNEL`.
        symmetric: codes lie around the middle of their range; otherwise around a stored code per group.
        activation_scale_of: inputs are rounded to the weight's type as they come, with a scale for each token or one for all;
            None: they stay as they are.
    """

    format: Format
    bits: int
    scale_of: ScaleOf
    group_size: int = CHANNEL
    symmetric: bool = True
    activation_scale_of: ActivationScaleOf | None = None

    def __str__(self) -> str:
        kind = "float" if self.format == "float-quantized" else "int"
        of = f"groups of {self.group_size}" if self.scale_of == "group" else f"a scale per {self.scale_of}"
        zeros = "" if self.symmetric else ", zero points"
        activations = f", activations too, per {self.activation_scale_of}" if self.activation_scale_of else ""
        return f"{self.format}, {kind}{self.bits}, {of}{zeros}{activations}"

    def to_dict(self) -> dict[str, Any]:
        """A group of the config, its targets aside."""
        kind = "float" if self.format == "float-quantized" else "int"
        activations = {
            "num_bits": self.bits,
            "type": kind,
            "symmetric": True,
            "strategy": self.activation_scale_of,
            "group_size": None,
            "dynamic": True,
        }
        return {
            "format": self.format,
            "weights": {
                "num_bits": self.bits,
                "type": kind,
                "symmetric": self.symmetric,
                "strategy": self.scale_of,
                "group_size": self.group_size if self.scale_of == "group" else None,
                "dynamic": False,
            },
            "input_activations": activations if self.activation_scale_of else None,
            "output_activations": None,
        }


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """Of a checkpoint. Targets and ignored names are those of linear layers, of their class, or `re:` and a pattern."""

    groups: tuple[tuple[tuple[str, ...], StoredScheme], ...]
    ignore: tuple[str, ...] = ()

    def __str__(self) -> str:
        heads = [scheme for targets, scheme in self.groups if targets == (HEAD,)]
        layers = dict.fromkeys(str(scheme) for targets, scheme in self.groups if targets != (HEAD,))
        return " and ".join(layers) + "".join(f"; output head {scheme}" for scheme in heads)

    def scheme_of(self, name: str) -> StoredScheme | None:
        """How a linear layer is stored; None: as it is. A name goes before a pattern, and that before the class."""
        if any(_matches(pattern, name) for pattern in self.ignore):
            return None
        found = [
            (_rank(target), target, scheme)
            for targets, scheme in self.groups
            for target in targets
            if _matches(target, name)
        ]
        return min(found, key=lambda match: match[:2])[2] if found else None

    def to_dict(self) -> dict[str, Any]:
        """`quantization_config` of config.json, where the formats are compressed-tensors'."""
        formats = {scheme.format for _, scheme in self.groups}
        return {
            "quant_method": QUANT_METHOD,
            "version": _VERSION,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{index}": {"targets": list(targets)} | scheme.to_dict()
                for index, (targets, scheme) in enumerate(self.groups)
            },
            "ignore": list(self.ignore),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


def all_layers_but(
    scheme: StoredScheme, ignored: tuple[str, ...], head: StoredScheme | None = None
) -> StoredQuantization:
    """Every linear layer in one scheme, but for `ignored`, which are names or patterns, and the output head.

    Args:
        head: its scheme; None: it is stored as it is.
    """
    layers = ((_LINEAR,), scheme)
    return (
        StoredQuantization((layers, ((HEAD,), head)), ignored)
        if head
        else StoredQuantization((layers,), (*ignored, HEAD))
    )


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith(REGEX):
        return re.match(pattern.removeprefix(REGEX), name) is not None
    return pattern in (name, _LINEAR)


def _rank(target: str) -> int:
    return 2 if target == _LINEAR else int(target.startswith(REGEX))
