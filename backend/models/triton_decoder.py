"""`TritonDecoder`: a loaded `Decoder`'s step through the fused kernels, as few launches as its number of tokens allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from backend.attention.backend import AttentionBackend
from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.layers.attention import Attention
from backend.layers.linear import Linear
from backend.layers.quantized_linear import QuantizedLinear
from backend.models.decoder import Decoder, DecoderLayer
from backend.models.feature_taps import FeatureTaps
from backend.models.quantized_products import add_gated_codes, gated_product, normed_product, queries
from backend.quantization.int_weight import KernelIntWeight
from kernels.ops.code_launch import MAX_FEW_TOKENS
from kernels.ops.embed_tokens import embed_tokens
from kernels.ops.norm_gated_linear import norm_gated_linear
from kernels.ops.norm_linear import norm_linear
from kernels.ops.norm_qkv_rotary_store import norm_qkv_rotary_store
from kernels.ops.projection import SMALL_WEIGHT_BYTES, Tiles, is_small
from kernels.ops.rms_norm import rms_norm
from kernels.ops.rotary_and_store import rotary_and_store
from kernels.ops.silu_and_mul import silu_and_mul
from kernels.reference.code_grid import CodeGrid
from kernels.reference.deferred_norm import DeferredNorm
from kernels.tuning import LinearOp, Shape, TileTable, load_table

# One cut for every number of tokens: sums then run in one order.
INVARIANT_TILES = Tiles(block_m=16, block_n=64, block_k=64, num_warps=4, num_stages=4)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The tiles of each product at some number of tokens; None: the library's product and the ops around it.

    They are those of matrices: a layer of codes is fused wherever its kernel takes the tokens, by tiles of its own.
    """

    qkv: Tiles | None
    output: Tiles | None
    gate_up: Tiles | None
    down: Tiles | None
    head: Tiles | None
    # Whether the norms between the products need no kernel of their own: they are begun and ended in the kernels around.
    defers_norm: bool


class _Fused(NamedTuple):
    """What a product's fused kernel takes of a layer."""

    weight: Tensor
    bias: Tensor | None
    code_grid: CodeGrid | None
    tiles: Tiles | None


class _Stream(NamedTuple):
    """Where a layer finds the residual stream, float [num_tokens, hidden] each, and leaves it behind its halves; may be one."""

    residual: Tensor
    middle: Tensor
    output: Tensor


class TritonDecoder:
    """Runs on the weights of a `Decoder`, of which it is an executor: same arguments, same results within rounding.

    Args:
        model: loaded, on CUDA.
        batch_invariant: every product by one kernel and one cut, so that a token's values do not depend on its batch.
    """

    def __init__(self, model: Decoder, *, batch_invariant: bool = False) -> None:
        self._model = model
        self._layers = cast(list[DecoderLayer], list(model.layers))
        self._batch_invariant = batch_invariant
        self._table: TileTable = load_table(model.embedding.device, model.embedding.dtype)
        self._plans: dict[int, _Plan] = {}
        self._has_codes = any(
            isinstance(linear, QuantizedLinear) for layer in range(len(self._layers)) for linear in self._linears(layer)
        )

    @property
    def launch_bound(self) -> bool:
        return all(
            linear.packed.nbytes <= SMALL_WEIGHT_BYTES
            if isinstance(linear, QuantizedLinear)
            else is_small(_parameters(linear)[0])
            for linear in self._linears()
        )

    def _linears(self, layer: int = 0) -> tuple[Linear | QuantizedLinear, ...]:
        """Of one layer; those of the others have the same sizes."""
        attention, mlp = self._layers[layer].attention, self._layers[layer].mlp
        return attention.qkv, attention.output, mlp.gate_up, mlp.down

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        rows: Tensor,
        sampled_token_ids: Tensor,
        layer_caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        attention: AttentionBackend,
        taps: FeatureTaps | None = None,
    ) -> Tensor:
        """Run one step's tokens through the layers.

        Args:
            token_ids: int64 [num_tokens]; negative: the last token sampled in the request's row.
            rows: int64 [num_tokens], each token's row in `sampled_token_ids`.
            sampled_token_ids: int64 [num_rows].
            layer_caches: one per layer; the tokens' keys and values are stored in them.
            taps: filled on the way.
        Returns:
            float [num_tokens, hidden], before the final norm, which `compute_logits` applies.
        """
        plan = self._plan(token_ids.shape[0])
        layers = self._layers
        norm_weights = [layer.attention_norm.weight if plan.defers_norm else None for layer in layers]
        stream, deferred = embed_tokens(token_ids, rows, sampled_token_ids, self._model.embedding, norm_weights[0])
        parts = zip(layers, layer_caches, [*norm_weights[1:], None], strict=True)
        residual = stream
        for index, (layer, layer_cache, next_norm_weight) in enumerate(parts, start=1):
            group = metadata.of_group(layer_cache.group)
            output = stream if taps is None else taps.place(index, stream)
            places = _Stream(residual, stream, output)
            deferred = self._layer(layer, plan, places, deferred, next_norm_weight, layer_cache, group, attention)
            residual = output
        return residual

    @torch.inference_mode()
    def run_layer(
        self,
        layer: DecoderLayer,
        hidden: Tensor,
        layer_cache: LayerCache,
        metadata: AttentionMetadata,
        attention: AttentionBackend,
    ) -> Tensor:
        """A layer more, of the shape of the model's own: float [num_tokens, hidden], which is updated in place."""
        places = _Stream(hidden, hidden, hidden)
        self._layer(layer, self._plan(hidden.shape[0]), places, None, None, layer_cache, metadata, attention)
        return hidden

    def final_hidden(self, hidden: Tensor) -> Tensor:
        """What the output head makes logits of, float [num_rows, hidden], of what `forward` gives."""
        norm = self._model.final_norm
        return rms_norm(hidden, norm.weight, norm.eps)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, *, output: Tensor | None = None) -> Tensor:
        """float [num_rows, hidden] -> float32 [num_rows, vocab_size], in `output` if there is one.

        Pass only the rows that are sampled from.
        """
        plan = self._plan(hidden.shape[0])
        head, hidden = self._model.head, self.final_hidden(hidden)
        if output is None:
            output = torch.empty(hidden.shape[0], head.out_features, dtype=torch.float32, device=hidden.device)
        if isinstance(head, QuantizedLinear):
            if isinstance(head.packed, KernelIntWeight):
                return head.packed.linear(hidden, head.bias, output=output)
            return output.copy_(head(hidden))
        weight = head.weight
        assert weight is not None
        if plan.head:
            return norm_linear(hidden, weight, out_dtype=torch.float32, output=output, tiles=plan.head)[0]
        if hidden.dtype == torch.float32:
            return torch.mm(hidden, weight.t(), out=output)
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=output)

    def _layer(
        self,
        layer: DecoderLayer,
        plan: _Plan,
        places: _Stream,
        deferred: DeferredNorm | None,
        next_norm_weight: Tensor | None,
        layer_cache: LayerCache,
        metadata: AttentionMetadata,
        attention: AttentionBackend,
    ) -> DeferredNorm | None:
        """One layer. Takes the begin of its first norm and gives that of the next."""
        residual = places.residual
        module, norm = layer.attention, layer.attention_norm
        cache = (self._model.cos_sin_cache, layer_cache.key_cache, layer_cache.value_cache, metadata.slot_mapping)
        options = (module.head_counts[0], layer_cache.key_scales, layer_cache.value_scales, *_head_norms(module))
        # A head's norm and a quantized vector's scale take all of a head, which the fused kernels have in several programs.
        is_whole = module.q_norm is not None or layer_cache.key_scales is not None
        fused = _fused(module.qkv, plan.qkv, len(residual))
        if fused is None or (fused.code_grid is not None and is_whole):
            angles = (metadata.positions, self._model.cos_sin_cache)
            query = None
            if not is_whole:
                query = queries(residual, norm, module.qkv, *angles, layer_cache, metadata.slot_mapping)
            if query is None:
                qkv = normed_product(residual, norm, module.qkv)
                query = rotary_and_store(qkv, metadata.positions, *cache, *options)
        else:
            hidden, square_sums = deferred or (rms_norm(residual, norm.weight, norm.eps), None)
            weight, bias, code_grid, tiles = fused
            if not is_whole:
                query = norm_qkv_rotary_store(
                    hidden, weight, metadata.positions, *cache, square_sums, norm.eps, bias, code_grid, tiles=tiles
                )
            else:
                qkv = norm_linear(hidden, weight, square_sums, norm.eps, bias, tiles=tiles)[0]
                query = rotary_and_store(qkv, metadata.positions, *cache, *options)
        attended = attention.forward(query, layer_cache, metadata, module.scale).flatten(1)
        norm = layer.mlp_norm
        deferred = _add_product(
            residual, attended, module.output, plan.output, norm.weight if plan.defers_norm else None, places.middle
        )

        residual = places.middle
        fused = _fused(layer.mlp.gate_up, plan.gate_up, len(residual))
        if fused is None:
            gated = gated_product(residual, norm, layer.mlp.gate_up)
            if gated is None:
                gate_up = normed_product(residual, norm, layer.mlp.gate_up)
                if add_gated_codes(residual, gate_up, layer.mlp.down):
                    if places.output is not residual:
                        places.output.copy_(residual)
                    return None
                gated = silu_and_mul(gate_up)
        else:
            hidden, square_sums = deferred or (rms_norm(residual, norm.weight, norm.eps), None)
            weight, bias, code_grid, tiles = fused
            gated = norm_gated_linear(hidden, weight, square_sums, norm.eps, bias, code_grid, tiles=tiles)
        return _add_product(residual, gated, layer.mlp.down, plan.down, next_norm_weight, places.output)

    def _plan(self, num_tokens: int) -> _Plan:
        plan = self._plans.get(num_tokens)
        if plan is None:
            plan = self._plans[num_tokens] = self._make_plan(num_tokens)
        return plan

    def _make_plan(self, num_tokens: int) -> _Plan:
        if self._batch_invariant:
            return _Plan(*[INVARIANT_TILES] * 5, defers_norm=False)

        def tiles(op: LinearOp, linear: Linear | QuantizedLinear) -> Tiles | None:
            return self._table.choose(Shape(op, linear.out_features, linear.in_features), num_tokens)

        qkv, output, gate_up, down = self._linears()
        plan = (
            tiles("norm_qkv_rotary_store", qkv),
            tiles("norm_linear", output),
            tiles("norm_gated_linear", gate_up),
            tiles("norm_linear", down),
        )
        # It saves launches, which is what small layers wait for; large ones wait for memory, of which it costs some.
        # Only matrices take what is begun of a norm.
        defers_norm = None not in plan and self.launch_bound and not self._has_codes
        return _Plan(*plan, tiles("norm_linear", self._model.head), defers_norm)


def _parameters(linear: Linear) -> tuple[Tensor, Tensor | None]:
    assert linear.weight is not None  # laid out as loaded on CUDA
    return linear.weight, linear.bias


def _head_norms(module: Attention) -> tuple[Tensor | None, Tensor | None, float]:
    """Weights of queries' and of keys', and what is added to a mean square, as `rotary_and_store` takes them."""
    if module.q_norm is None or module.k_norm is None:
        return None, None, 0.0
    return module.q_norm.weight, module.k_norm.weight, module.q_norm.eps


def _fused(linear: Linear | QuantizedLinear, tiles: Tiles | None, num_tokens: int) -> _Fused | None:
    """None where the layer's own product is to be taken, and the ops around it.

    Args:
        tiles: for a matrix; None: the library's product.
    """
    if isinstance(linear, QuantizedLinear):
        packed = linear.packed
        if isinstance(packed, KernelIntWeight) and num_tokens <= MAX_FEW_TOKENS:
            return _Fused(packed.words, linear.bias, packed.code_grid, None)
        return None
    return None if tiles is None else _Fused(*_parameters(linear), None, tiles)


def _add_product(
    residual: Tensor,
    x: Tensor,
    linear: Linear | QuantizedLinear,
    tiles: Tiles | None,
    next_norm_weight: Tensor | None,
    output: Tensor,
) -> DeferredNorm | None:
    """`output = residual + x W^T + b`, and the begin of the norm that follows, if that is wanted."""
    if not isinstance(linear, QuantizedLinear) and tiles is not None:
        weight, bias = _parameters(linear)
        return norm_linear(
            x,
            weight,
            bias=bias,
            residual=residual,
            next_norm_weight=next_norm_weight,
            output=output,
            tiles=tiles,
        )[1]
    if output is not residual:
        output.copy_(residual)
    if isinstance(linear, QuantizedLinear):
        linear.packed.add_to(output, x, linear.bias)
        return None
    weight, bias = _parameters(linear)
    if bias is not None:
        output += bias
    output.addmm_(x, weight.t())
    return None
