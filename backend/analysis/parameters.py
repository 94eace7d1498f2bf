"""How many weights a model has and how many bytes they take, by part, from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from backend.analysis.attention_shape import read_attention_shape
from backend.analysis.config_fields import ConfigFields
from backend.analysis.weight_tensors import QUANTIZED_BITS, UNQUANTIZED_BYTES, Part, WeightTensor, weight_tensors

WeightDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3", "int8", "int4"]
PARTS: tuple[Part, ...] = get_args(Part)

_NOT_COUNTED = (
    ("vision_config", "the vision tower and its projector"),
    ("audio_config", "the audio tower and its projector"),
    ("num_nextn_predict_layers", "the layers that predict further tokens"),
)


@dataclass(frozen=True, slots=True)
class PartTotals:
    """Weights, or their bytes, by part. A tied head is the embedding, and counts there."""

    embedding: int  # of tokens, and of positions where they are learned
    head: int
    attention: int
    mlp: int  # dense, or all experts with their router
    norms: int
    arithmetic: tuple[str, ...]  # a line for each part that has weights

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.attention + self.mlp + self.norms


@dataclass(frozen=True, slots=True)
class ModelWeights:
    tensors: tuple[WeightTensor, ...]
    checkpoint_dtype: str | None  # as the config says; None where it does not
    not_counted: tuple[str, ...]  # what the checkpoint holds beside the decoder, in words

    def parameters(self) -> PartTotals:
        """Number of weights, biases and norm scales; buffers are none."""
        lines = []
        for part in PARTS:
            terms = [
                f"{t.count} × {t.rows:,}" + (f" × {t.columns:,}" if t.columns > 1 else "") + f" ({t.name})"
                for t in self._of(part)
            ]
            if terms:
                lines.append(f"{part}: {' + '.join(terms)} = {sum(t.num_parameters for t in self._of(part)):,}")
        return self._totals({part: sum(t.num_parameters for t in self._of(part)) for part in PARTS}, lines)

    def num_bytes(self, dtype: WeightDtype = "auto", *, group_size: int = 128) -> PartTotals:
        """Bytes of the weights in memory.

        Args:
            dtype: auto: the config's own, bfloat16 where it names none. fp8_e4m3, int8 and int4 are those of the linear
                layers alone; embedding, head, router, norms and biases stay in bfloat16. fp8_e4m3 and int8 add one fp16
                scale per output feature, int4 an fp16 scale and an fp16 minimum per group.
            group_size: input features that share a scale in int4; a last group may be smaller.

        Raises:
            ValueError: the dtype is not one of these, or `group_size` is below 1.
        """
        resolved = dtype if dtype != "auto" else self.checkpoint_dtype or "bfloat16"
        if resolved not in UNQUANTIZED_BYTES and resolved not in QUANTIZED_BITS:
            raise ValueError(f"weight dtype {resolved!r} is not one of {', '.join(get_args(WeightDtype))}")
        if group_size < 1:
            raise ValueError(f"group_size {group_size} is below 1")
        sizes: dict[Part, int] = {
            part: sum(t.num_bytes(resolved, group_size) for t in self._of(part)) for part in PARTS
        }
        lines = [
            f"{part}: {sum(t.num_parameters for t in self._of(part)):,} weights in {resolved} = {sizes[part]:,} bytes"
            for part in PARTS
            if sizes[part]
        ]
        return self._totals(sizes, lines)

    def _of(self, part: Part) -> list[WeightTensor]:
        return [tensor for tensor in self.tensors if tensor.part == part]

    @staticmethod
    def _totals(sizes: dict[Part, int], lines: list[str]) -> PartTotals:
        lines.append(f"total: {' + '.join(f'{size:,}' for size in sizes.values() if size)} = {sum(sizes.values()):,}")
        return PartTotals(**sizes, arithmetic=tuple(lines))


def read_weights(config: Mapping[str, Any]) -> ModelWeights:
    """The weights of the decoder that a Hugging Face config describes.

    Raises:
        ValueError: a field is missing or wrong, or `model_type` is none of those whose layers are known.
    """
    fields, shape = ConfigFields(config), read_attention_shape(config)
    not_counted = tuple(words for name, words in _NOT_COUNTED if fields.anywhere(name))
    return ModelWeights(tuple(weight_tensors(fields, shape)), shape.checkpoint_dtype, not_counted)
