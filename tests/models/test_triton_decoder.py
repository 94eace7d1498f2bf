"""The fused executor against the decoder's own modules: the same weights, caches and steps. Also through the interpreter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.attention.backend import AttentionBackend
from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.attention.reference import ReferenceAttention
from backend.core.kv_format import KV_FORMATS, PLAIN, KVFormat
from backend.layers.quantized_linear import QuantizedLinear
from backend.models.decoder import Decoder
from backend.models.dummy import DUMMY_SHAPES
from backend.models.feature_taps import FeatureTaps
from backend.models.model_config import DecoderConfig
from backend.quantization.base import PackedWeight
from backend.quantization.fp8 import FP8, FP8Weight, KernelFP8Weight
from backend.quantization.group_size import CHANNEL
from backend.quantization.int_weight import KernelIntWeight, ZeroPoint, quantize_by_rounding
from backend.quantization.nf4 import NF4, KernelNF4Weight, NF4Weight
from backend.quantization.w8a8_int8 import KernelW8A8Weight, W8A8Int8
from backend.worker.decoders import ReferenceDecoder, StepDecoder
from tests.interpreter import interpret_without_cuda

interpret_without_cuda()

from backend.attention.triton import TritonAttention  # noqa: E402
from backend.models import quantized_products, triton_decoder  # noqa: E402
from backend.models.triton_decoder import TritonDecoder  # noqa: E402
from kernels.ops.projection import Tiles  # noqa: E402
from kernels.tuning import Shape  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_SIZE, NUM_BLOCKS = 4, 60
CONFIG = replace(DUMMY_SHAPES["tiny"], vocab_size=128, num_layers=2, intermediate_size=40, max_position_embeddings=64)
BIASED = replace(CONFIG, attention_bias=True, mlp_bias=True)
NORMED = replace(BIASED, qk_norm=True)
MANY, ONE = Tiles(16, 64, 64, 4, 2), Tiles(1, 64, 64, 4, 2)

Choice = Callable[[Shape, int], Tiles | None]


def by_tiles(shape: Shape, num_tokens: int) -> Tiles:
    return ONE if num_tokens == 1 else MANY


def by_library(shape: Shape, num_tokens: int) -> None:
    return None


def only(*shapes: tuple[str, int]) -> Choice:
    """Tiles for these layers, by op and columns, and the library for the others."""
    return lambda shape, num_tokens: MANY if (shape.op, shape.num_columns) in shapes else None


QKV, OUTPUT = ("norm_qkv_rotary_store", 64), ("norm_linear", 96)
GATE_UP, DOWN, HEAD = ("norm_gated_linear", 64), ("norm_linear", 40), ("norm_linear", 64)
CHOICES: dict[str, Choice] = {
    "tiles": by_tiles,
    "library": by_library,
    "all but qkv": only(OUTPUT, GATE_UP, DOWN, HEAD),
    "all but output": only(QKV, GATE_UP, DOWN, HEAD),
    "all but gate_up": only(QKV, OUTPUT, DOWN, HEAD),
    "all but down": only(QKV, OUTPUT, GATE_UP, HEAD),
    "all but head": only(QKV, OUTPUT, GATE_UP, DOWN),
    "qkv and down": only(QKV, DOWN),
    # As with a table: what is best changes with the number of tokens.
    "few tokens": lambda shape, num_tokens: by_tiles(shape, num_tokens) if num_tokens < 4 else None,
}


def make_model(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    """Every parameter random, at a scale where each layer moves the logits."""
    model = Decoder(config, dtype=dtype, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(3)
    for name, parameter in model.named_parameters():
        parameter.normal_(generator=generator)
        if name.endswith("norm.weight"):
            parameter.mul_(0.2).add_(1)
        elif parameter.dim() == 2:
            parameter.mul_(1.0 if name == "embedding" else parameter.shape[1] ** -0.5)
    return model


def make_triton_decoder(
    model: Decoder, choice: Choice, monkeypatch: pytest.MonkeyPatch, **options: bool
) -> TritonDecoder:
    class Table:
        choose = staticmethod(choice)

    monkeypatch.setattr(triton_decoder, "load_table", lambda device, dtype: Table)
    return TritonDecoder(model, **options)


class Run:
    """A step decoder with its caches, and requests whose blocks lie scattered over them."""

    def __init__(
        self,
        model: Decoder,
        decoder: StepDecoder,
        attention: AttentionBackend,
        num_reqs: int,
        kv_format: KVFormat = PLAIN,
        tapped: tuple[int, ...] = (),
    ) -> None:
        config = model.config
        self.tapped, self.states, self.like = tapped, list[Tensor](), model.embedding
        self.decoder, self.attention = decoder, attention
        self.caches = [
            LayerCache.zeros(
                NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_dim, model.embedding.dtype, DEVICE, kv_format
            )
            for _ in range(config.num_layers)
        ]
        blocks = 1 + torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0))
        self.table = blocks[: NUM_BLOCKS // num_reqs * num_reqs].view(num_reqs, -1).int().to(DEVICE)
        self.rows = torch.arange(num_reqs).flip(0).to(DEVICE)
        self.last_token_ids = torch.full((num_reqs + 1,), 7, dtype=torch.int64, device=DEVICE)
        self.num_computed = [0] * num_reqs

    def step(self, tokens: dict[int, Sequence[int]]) -> Tensor:
        """Run tokens of requests, single ones first, and give the logits of all; -1 is the request's last token."""
        reqs, sizes = list(tokens), [len(ids) for ids in tokens.values()]
        num_decodes = sizes.count(1)
        assert all(size == 1 for size in sizes[:num_decodes])
        starts = [self.num_computed[request] for request in reqs]
        positions = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, sizes, strict=True)]).to(DEVICE)
        owners = torch.tensor(reqs).repeat_interleave(torch.tensor(sizes)).to(DEVICE)
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, *sizes]).cumsum(0).int().to(DEVICE),
            seq_lens=torch.tensor([a + n for a, n in zip(starts, sizes, strict=True)]).int().to(DEVICE),
            block_table=self.table[reqs],
            slot_mapping=self.table[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
            positions=positions,
            num_decodes=num_decodes,
        )
        token_ids = torch.tensor([token_id for ids in tokens.values() for token_id in ids], device=DEVICE)
        taps = FeatureTaps.empty(self.tapped, len(token_ids), self.like) if self.tapped else None
        hidden = self.decoder.forward(
            token_ids, self.rows[owners], self.last_token_ids, self.caches, metadata, self.attention, taps
        )
        self.states += [taps.states] if taps else []
        for request, size in zip(reqs, sizes, strict=True):
            self.num_computed[request] += size
        return self.decoder.compute_logits(hidden)


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(CONFIG.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def play(run: Run) -> list[Tensor]:
    """A prefill of several requests, decode steps, chunks beside decodes; the same tokens whoever runs it."""
    prompt = random_ids(11, seed=9)
    logits = [run.step({2: random_ids(1, seed=2), 0: random_ids(6, seed=0), 1: random_ids(4, seed=1)})]
    for sampled in ([5, 99, 31], [127, 0, 64]):
        run.last_token_ids[run.rows] = torch.tensor([*sampled, 77], device=DEVICE)
        logits.append(run.step({1: [-1], 0: [-1], 2: [-1]}))
    logits.append(run.step({2: [-1], 0: [-1], 3: prompt[:7]}))
    logits.append(run.step({1: [-1], 3: prompt[7:]}))
    logits.append(run.step({3: [-1]}))
    return logits


def play_briefly(run: Run) -> list[Tensor]:
    """Two prompts, then several rows of one token, and one."""
    logits = [run.step({1: random_ids(1, seed=2), 0: random_ids(6, seed=0)})]
    run.last_token_ids[run.rows] = torch.tensor([5, 99], device=DEVICE)
    return [*logits, run.step({1: [-1], 0: [-1]}), run.step({0: [-1]})]


def assert_same_run(
    ours: Run, reference: Run, tolerance: float = 1e-4, play: Callable[[Run], list[Tensor]] = play
) -> None:
    for step, (logits, expected) in enumerate(zip(play(ours), play(reference), strict=True)):
        assert (logits.dtype, logits.shape) == (torch.float32, expected.shape)
        assert expected.std() > 0.5
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=tolerance, msg=lambda m, s=step: f"{s}: {m}")
    for cache, expected in zip(ours.caches, reference.caches, strict=True):
        torch.testing.assert_close(cache.key_cache, expected.key_cache, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(cache.value_cache, expected.value_cache, atol=tolerance, rtol=tolerance)
    assert torch.equal(ours.last_token_ids, reference.last_token_ids)


@pytest.mark.parametrize(
    ("name", "config"),
    [*((name, BIASED) for name in CHOICES), *((name, c) for c in (CONFIG, NORMED) for name in ("tiles", "library"))],
    ids=lambda value: {BIASED: "biased", CONFIG: "plain", NORMED: "normed"}.get(value, value),
)
def test_every_step_equals_the_decoders_own(name: str, config: DecoderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(config)
    decoder = make_triton_decoder(model, CHOICES[name], monkeypatch)
    assert_same_run(
        Run(model, decoder, TritonAttention(), 4), Run(model, ReferenceDecoder(model), ReferenceAttention(), 4)
    )


@pytest.mark.parametrize("config", [replace(BIASED, tie_word_embeddings=True, num_layers=3)], ids=["tied, 3 layers"])
def test_other_shapes_by_the_tiles_that_nobody_measured(config: DecoderConfig) -> None:
    model = make_model(config)
    decoder = TritonDecoder(model)
    assert_same_run(
        Run(model, decoder, TritonAttention(), 4), Run(model, ReferenceDecoder(model), ReferenceAttention(), 4)
    )


@pytest.mark.parametrize("name", ["tiles", "library"])
def test_every_step_under_a_quantized_head(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(replace(CONFIG, tie_word_embeddings=True))
    packed = quantize_by_rounding(model.embedding.data, 8, CHANNEL, "none")
    model.set_submodule("head", QuantizedLinear(packed, None))
    decoder = make_triton_decoder(model, CHOICES[name], monkeypatch)
    assert_same_run(
        Run(model, decoder, TritonAttention(), 4), Run(model, ReferenceDecoder(model), ReferenceAttention(), 4)
    )
    hidden, given = torch.randn(3, CONFIG.hidden_size, device=DEVICE), torch.empty(3, CONFIG.vocab_size, device=DEVICE)
    assert decoder.compute_logits(hidden, output=given).data_ptr() == given.data_ptr()
    assert torch.equal(given, decoder.compute_logits(hidden))


PARTS = ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")


def quantized(
    config: DecoderConfig, bits: int, zero_point: ZeroPoint, layers: Sequence[int]
) -> tuple[Decoder, Decoder]:
    """A model with codes in these layers as the kernels take them, and the same one as the references do."""
    models = make_model(config), make_model(config)
    for model in models:
        for layer in layers:
            for name in PARTS:
                linear = model.get_submodule(f"layers.{layer}.{name}")
                weight: Tensor = linear.weight.data  # pyright: ignore[reportAssignmentType]
                packed = quantize_by_rounding(weight, bits, CHANNEL, zero_point)
                laid_out = KernelIntWeight.of(packed) if model is models[0] else packed
                model.set_submodule(f"layers.{layer}.{name}", QuantizedLinear(laid_out, linear.bias))  # type: ignore[arg-type]
    return models


@pytest.mark.parametrize(
    ("bits", "zero_point", "layers", "qk_norm"),
    [(4, "float", [0, 1], False), (8, "none", [1], False), (4, "integer", [0], False), (4, "float", [1], True)],
    ids=str,
)
def test_every_step_with_layers_of_codes(
    bits: int, zero_point: ZeroPoint, layers: list[int], qk_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only some layers are quantized, the others go their own way."""
    model, reference = quantized(NORMED if qk_norm else BIASED, bits, zero_point, layers)
    decoder = make_triton_decoder(model, by_tiles, monkeypatch)
    assert_same_run(
        Run(model, decoder, TritonAttention(), 2),
        Run(reference, ReferenceDecoder(reference), ReferenceAttention(), 2),
        play=play_briefly,
    )


Method = FP8 | W8A8Int8 | NF4


def for_kernels(packed: PackedWeight) -> PackedWeight:
    """As `prepare` would on a GPU."""
    if isinstance(packed, NF4Weight):
        return KernelNF4Weight.of(packed)
    kernel = KernelFP8Weight if isinstance(packed, FP8Weight) else KernelW8A8Weight
    return kernel(*(getattr(packed, field.name) for field in fields(packed)))  # type: ignore[arg-type]


def stored_by(method: Method, layers: Sequence[int], config: DecoderConfig = BIASED) -> tuple[Decoder, Decoder]:
    """As `quantized`, by a method that has a kernel of its own."""
    models = make_model(config), make_model(config)
    for model in models:
        for name in [f"layers.{layer}.{part}" for layer in layers for part in PARTS]:
            linear = model.get_submodule(name)
            packed = method.quantize(linear.weight.data)  # type: ignore[union-attr, arg-type]
            packed = for_kernels(packed) if model is models[0] else packed
            model.set_submodule(name, QuantizedLinear(packed, linear.bias))  # type: ignore[arg-type]
    return models


@pytest.mark.parametrize("layers", ["tiles", "library", "codes"])
def test_states_behind_layers_are_the_decoders_own(layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers that follow each other, of one behind another, and of the last."""
    config, tapped = replace(BIASED, num_layers=4), (1, 2, 4)
    codes = range(4) if layers == "codes" else ()
    model, own = quantized(config, 4, "float", codes)
    decoder = make_triton_decoder(model, CHOICES["library" if codes else layers], monkeypatch)
    ours = Run(model, decoder, TritonAttention(), 2, tapped=tapped)
    reference = Run(own, ReferenceDecoder(own), ReferenceAttention(), 2, tapped=tapped)
    assert_same_run(ours, reference, play=play_briefly)
    for states, expected in zip(ours.states, reference.states, strict=True):
        assert states.shape[1:] == (len(tapped), config.hidden_size)
        torch.testing.assert_close(states, expected, atol=1e-4, rtol=1e-4)


def test_states_behind_layers_of_8_bits_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last layer leaves is what logits are made of, to the bit."""
    model, _ = stored_by(W8A8Int8(), [0, 1])
    decoder = make_triton_decoder(model, by_library, monkeypatch)
    tapped = Run(model, decoder, TritonAttention(), 2, tapped=(1, 2))
    plain = Run(model, decoder, TritonAttention(), 2)
    logits = play_briefly(tapped)
    assert all(torch.equal(a, b) for a, b in zip(logits, play_briefly(plain), strict=True))
    for states, expected in zip(tapped.states, logits, strict=True):
        assert torch.equal(decoder.compute_logits(states[:, 1].contiguous()), expected)
        assert not torch.equal(states[:, 0], states[:, 1])


@pytest.mark.parametrize("config", [BIASED, NORMED], ids=["biased", "normed"])
def test_every_step_with_a_layer_of_normal_floats(config: DecoderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = stored_by(NF4(CHANNEL), [1], config)
    decoder = make_triton_decoder(model, by_tiles, monkeypatch)
    assert_same_run(
        Run(model, decoder, TritonAttention(), 2),
        Run(reference, ReferenceDecoder(reference), ReferenceAttention(), 2),
        play=play_briefly,
    )


@pytest.mark.parametrize(
    ("method", "layers", "config"),
    [(FP8("channel"), [0, 1], BIASED), (W8A8Int8(), [1], BIASED), (W8A8Int8(), [1], NORMED)],
    ids=["fp8", "int8 in a layer", "int8 in a layer, normed"],
)
def test_every_step_with_tokens_in_8_bits(
    method: FP8 | W8A8Int8, layers: list[int], config: DecoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum in another order may round to the next code, so steps of both are near: nearer than rounding moves either."""
    model, reference = stored_by(method, layers, config)
    decoder, whole = make_triton_decoder(model, by_tiles, monkeypatch), make_model(config)
    ours = play_briefly(Run(model, decoder, TritonAttention(), 2))
    wanted = play_briefly(Run(reference, ReferenceDecoder(reference), ReferenceAttention(), 2))
    plain = play_briefly(Run(whole, ReferenceDecoder(whole), ReferenceAttention(), 2))
    for logits, expected, unquantized in zip(ours, wanted, plain, strict=True):
        assert (logits - expected).abs().mean() < 0.1 * (expected - unquantized).abs().mean()


def test_a_head_of_codes_gives_logits_that_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(CONFIG, torch.float16)
    packed = quantize_by_rounding(model.embedding.data, 4, 32, "float")
    model.set_submodule("head", QuantizedLinear(KernelIntWeight.of(packed), None))
    decoder = make_triton_decoder(model, by_library, monkeypatch)
    hidden = torch.randn(3, CONFIG.hidden_size, device=DEVICE).half()
    logits = decoder.compute_logits(hidden)
    normed = model.final_norm(hidden)
    expected = normed.double() @ packed.dequantize().double().t()
    torch.testing.assert_close(logits.double(), expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-4)
    assert not torch.equal(logits, logits.half().float())
    given = torch.empty_like(logits)
    assert decoder.compute_logits(hidden, output=given).data_ptr() == given.data_ptr()
    assert torch.equal(given, logits)


@pytest.mark.parametrize(
    ("name", "kv_dtype", "config"),
    [
        ("tiles", "fp8_e4m3", BIASED),
        ("tiles", "int8", BIASED),
        ("tiles", "int4", BIASED),
        ("library", "int4", BIASED),
        ("tiles", "int4", NORMED),
    ],
    ids=lambda value: value if isinstance(value, str) else "normed" if value.qk_norm else "biased",
)
def test_every_step_over_a_quantized_cache(
    name: str, kv_dtype: str, config: DecoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum in another order may round to the next code, so steps of both are near, and a few codes are not the same."""
    model = make_model(config)
    decoder, kv_format = make_triton_decoder(model, CHOICES[name], monkeypatch), KV_FORMATS[kv_dtype]
    ours = Run(model, decoder, TritonAttention(), 4, kv_format)
    reference = Run(model, ReferenceDecoder(model), ReferenceAttention(), 4, kv_format)
    plain = Run(model, ReferenceDecoder(model), ReferenceAttention(), 4)
    for logits, expected, unquantized in zip(play(ours), play(reference), play(plain), strict=True):
        # Nearer to each other than quantizing moves either.
        assert (logits - expected).abs().mean() < 0.1 * (expected - unquantized).abs().mean()
    for cache, expected in zip(ours.caches, reference.caches, strict=True):
        for mine, wanted in zip(cache.tensors(), expected.tensors(), strict=True):
            assert (mine != wanted).float().mean() < 0.01


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8", "int4"])
def test_batch_invariant_logits_over_a_quantized_cache_do_not_depend_on_chunks(kv_dtype: str) -> None:
    model, prompt = make_model(BIASED), random_ids(11, seed=4)

    def logits(sizes: list[int]) -> Tensor:
        decoder, attention = TritonDecoder(model, batch_invariant=True), TritonAttention(batch_invariant=True)
        run, start, pieces = Run(model, decoder, attention, 1, KV_FORMATS[kv_dtype]), 0, []
        for size in sizes:
            pieces.append(run.step({0: prompt[start : start + size]}))
            start += size
        return torch.cat(pieces)

    assert torch.equal(logits([1, 4, 1, 5]), logits([11]))


OPS = ("embed_tokens", "norm_qkv_rotary_store", "norm_linear", "norm_gated_linear", "rms_norm")
LIBRARY_OPS = ("rotary_and_store", "silu_and_mul")
NARROW_OPS = ("rms_norm_quantize", "silu_and_mul_quantize")
STORED_OPS = ("byte_qkv_rotary_store", "byte_gated_linear", "nf4_qkv_rotary_store", "nf4_gated_linear")


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of every op that the decoder launches by itself."""
    calls: Counter[str] = Counter()

    def counted(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[op] += 1
            return function(*arguments, **options)

        return call

    for module in (triton_decoder, quantized_products):
        for op in OPS + LIBRARY_OPS + NARROW_OPS + STORED_OPS:
            if hasattr(module, op):
                monkeypatch.setattr(module, op, counted(op, getattr(module, op)))
    return calls


@pytest.mark.parametrize(
    ("num_tokens", "kv_dtype", "layers", "expected"),
    [
        (16, None, [0, 1], (1, 2, 1, 2, 5, 0, 0)),  # the head alone is a product of a matrix
        (17, None, [0, 1], (1, 0, 1, 0, 5, 2, 2)),  # the fused kernels take no more than 16
        (4, "int8", [0, 1], (1, 0, 1, 2, 5, 2, 0)),
        (4, None, [1], (1, 2, 3, 2, 5, 0, 0)),  # no norm is deferred past a layer that is not
    ],
)
def test_layers_of_codes_are_fused_for_few_tokens(
    num_tokens: int, kv_dtype: str | None, layers: list[int], expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = quantized(CONFIG, 4, "float", layers)
    calls = count_calls(monkeypatch)
    decoder = make_triton_decoder(model, by_tiles, monkeypatch)
    kv_format = PLAIN if kv_dtype is None else KV_FORMATS[kv_dtype]
    Run(model, decoder, TritonAttention(), 1, kv_format).step({0: random_ids(num_tokens, seed=1)})
    assert tuple(calls[op] for op in OPS + LIBRARY_OPS) == expected


@pytest.mark.parametrize(
    ("method", "num_tokens", "kv_dtype", "expected"),
    [
        # The final norm and the head are of a matrix.
        (FP8("channel"), 17, None, (1, 0, 1, 0, 1, 2, 0, 4, 2, 0, 0, 0, 0)),
        (FP8("channel"), 16, None, (1, 0, 1, 0, 1, 0, 0, 4, 0, 2, 2, 0, 0)),
        (W8A8Int8(), 17, None, (1, 0, 1, 0, 1, 2, 0, 4, 2, 0, 0, 0, 0)),
        (W8A8Int8(), 1, "int8", (1, 0, 1, 0, 1, 2, 0, 4, 0, 0, 2, 0, 0)),
        (FP8("tensor"), 1, None, (1, 0, 1, 0, 5, 2, 2, 0, 0, 0, 0, 0, 0)),  # no token has a scale of its own
        (NF4(CHANNEL), 17, None, (1, 0, 1, 0, 5, 2, 2, 0, 0, 0, 0, 0, 0)),
        (NF4(CHANNEL), 16, None, (1, 0, 1, 0, 5, 0, 0, 0, 0, 0, 0, 2, 2)),
        (NF4(CHANNEL), 1, "int4", (1, 0, 1, 0, 5, 2, 0, 0, 0, 0, 0, 0, 2)),
    ],
    ids=str,
)
def test_layers_in_8_bits_and_normal_floats_take_few_launches(
    method: Method, num_tokens: int, kv_dtype: str | None, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = stored_by(method, [0, 1])
    calls = count_calls(monkeypatch)
    decoder = make_triton_decoder(model, by_tiles, monkeypatch)
    kv_format = PLAIN if kv_dtype is None else KV_FORMATS[kv_dtype]
    Run(model, decoder, TritonAttention(), 1, kv_format).step({0: random_ids(num_tokens, seed=1)})
    assert tuple(calls[op] for op in OPS + LIBRARY_OPS + NARROW_OPS + STORED_OPS) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiles", (1, 2, 5, 2, 1, 0, 0)),  # the final norm alone is a kernel of its own
        ("library", (1, 0, 0, 0, 5, 2, 2)),
        ("all but head", (1, 2, 4, 2, 1, 0, 0)),
        ("all but down", (1, 2, 3, 2, 5, 0, 0)),
        ("qkv and down", (1, 2, 2, 0, 5, 0, 2)),
    ],
)
def test_the_path_that_was_chosen_is_taken(
    name: str, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(CONFIG)
    calls = count_calls(monkeypatch)
    run = Run(model, make_triton_decoder(model, CHOICES[name], monkeypatch), TritonAttention(), 2)
    run.step({0: [1, 2], 1: [3, 4]})
    assert tuple(calls[op] for op in OPS + LIBRARY_OPS) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("tiles", (1, 0, 7, 2, 1, 2, 0)), ("library", (1, 0, 0, 0, 5, 2, 2)), ("all but qkv", (1, 0, 5, 2, 5, 2, 0))],
)
def test_heads_that_are_normalised_cost_a_launch_more(
    name: str, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(NORMED)
    calls = count_calls(monkeypatch)
    run = Run(model, make_triton_decoder(model, CHOICES[name], monkeypatch), TritonAttention(), 2)
    run.step({0: [1, 2], 1: [3, 4]})
    assert tuple(calls[op] for op in OPS + LIBRARY_OPS) == expected


@pytest.mark.parametrize("method", [FP8("channel"), W8A8Int8(), NF4(CHANNEL)], ids=str)
def test_no_kernel_of_codes_takes_heads_that_are_normalised(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = stored_by(method, [0, 1], NORMED)
    calls = count_calls(monkeypatch)
    Run(model, make_triton_decoder(model, by_tiles, monkeypatch), TritonAttention(), 1).step({0: [1, 2]})
    assert calls["rotary_and_store"] == 2
    assert not calls.keys() & {"norm_qkv_rotary_store", "byte_qkv_rotary_store", "nf4_qkv_rotary_store"}


@pytest.mark.parametrize("name", ["tiles", "library"])
def test_logits_go_where_they_are_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(CONFIG)
    decoder = make_triton_decoder(model, CHOICES[name], monkeypatch)
    hidden = torch.randn(3, CONFIG.hidden_size, device=DEVICE)
    buffer = torch.full((5, CONFIG.vocab_size), 77.0, device=DEVICE)
    logits = decoder.compute_logits(hidden, output=buffer[1:4])
    assert logits.data_ptr() == buffer[1].data_ptr()
    torch.testing.assert_close(logits, decoder.compute_logits(hidden))
    torch.testing.assert_close(logits, model.compute_logits(model.final_norm(hidden)), atol=1e-4, rtol=1e-4)
    assert (buffer[[0, 4]] == 77.0).all()


def batch_invariant(model: Decoder, num_reqs: int) -> Run:
    return Run(model, TritonDecoder(model, batch_invariant=True), TritonAttention(batch_invariant=True), num_reqs)


@pytest.mark.parametrize("config", [BIASED, NORMED], ids=["biased", "normed"])
def test_batch_invariant_logits_are_the_same_bits_however_they_are_batched(config: DecoderConfig) -> None:
    """A prompt and its continuation: alone and at once, in pieces, token by token, and beside others."""
    model = make_model(config)
    prompt, others = random_ids(11, seed=4), random_ids(9, seed=5)
    whole = batch_invariant(model, 1).step({0: prompt})
    reference = Run(model, ReferenceDecoder(model), ReferenceAttention(), 1).step({0: prompt})
    torch.testing.assert_close(whole, reference, atol=1e-4, rtol=1e-4)
    for sizes in ([1, 1, 9], [5, 5, 1]):
        run, start, pieces = batch_invariant(model, 1), 0, []
        for size in sizes:
            pieces.append(run.step({0: prompt[start : start + size]}))
            start += size
        assert torch.equal(torch.cat(pieces), whole), sizes
    # Beside a chunk, then, in another place of the batch, beside single rows and a chunk.
    run = batch_invariant(model, 3)
    beside = [run.step({1: others[:3], 0: prompt[:4]})[3:]]
    beside.append(run.step({0: prompt[4:5], 1: others[3:]})[:1])
    beside.append(run.step({2: others[:1], 0: prompt[5:]})[1:])
    assert torch.equal(torch.cat(beside), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("choice", ["tiles", "library", "few tokens"])
def test_bfloat16_stays_near_the_decoders_own(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to float32 as the decoder's own modules in bfloat16 come; the norms round in other places."""
    model = make_model(BIASED, torch.bfloat16)
    exact = make_model(BIASED)
    exact.load_state_dict(model.state_dict())
    decoder = make_triton_decoder(model, CHOICES[choice], monkeypatch)
    expected = play(Run(exact, ReferenceDecoder(exact), ReferenceAttention(), 4))
    own = play(Run(model, ReferenceDecoder(model), ReferenceAttention(), 4))
    ours = play(Run(model, decoder, TritonAttention(), 4))
    for logits, plain, wanted in zip(ours, own, expected, strict=True):
        assert (logits - wanted).abs().mean() < 1.5 * (plain - wanted).abs().mean()
