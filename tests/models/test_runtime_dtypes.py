"""What a dtype means once the model runs: which one is taken, what is said of it, and what happens when it overflows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.engine.engine_host import EngineHost
from tests.engine.driving import answers, check_idle, config_of, submit, tokens
from tests.helpers import assert_greedy, dense_greedy, load_oracle, make_tiny_llama

RNG = random.Random(3)
PROMPTS = {f"p{length}": RNG.choices(range(256), k=length) for length in (1, 5, 16, 33, 70)}
BAD = 300  # the token whose activation overflows float16


@pytest.fixture(scope="module")
def host() -> Iterator[EngineHost]:
    host = EngineHost()
    yield host
    host.close()


@pytest.fixture(scope="module")
def bfloat16_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("bfloat16"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def float32_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("float32"))


@pytest.mark.parametrize("asked", ["auto", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_the_dtype_that_runs_is_shown_and_a_risky_one_is_noticed(
    host: EngineHost, bfloat16_model: Path, float32_model: Path, stored: str, asked: str
) -> None:
    """auto is float32 on a CPU, whatever the checkpoint holds, and loses nothing of it."""
    info = host.load(config_of(bfloat16_model if stored == "bfloat16" else float32_model, model__dtype=asked))
    runs = "float32" if asked == "auto" else asked
    itemsize = 4 if runs == "float32" else 2
    assert (info.resolved_config.model.device, info.resolved_config.model.dtype) == ("cpu", runs)
    assert info.model["checkpoint_dtype"] == stored
    assert info.load["weights_bytes"] == itemsize * info.model["num_parameters"]
    assert info.load["kv_bytes_per_token"] == 2 * 3 * 3 * 8 * itemsize
    if (stored, asked) == ("bfloat16", "float16"):
        (notice,) = info.notices
        assert "the checkpoint is bfloat16" in notice
        assert "float16 values above 65,504 overflow" in notice
        assert "\n" not in notice
    else:
        assert info.notices == ()


def test_auto_on_a_bfloat16_checkpoint_gives_the_tokens_of_float32(host: EngineHost, bfloat16_model: Path) -> None:
    host.load(config_of(bfloat16_model))
    oracle = load_oracle(bfloat16_model)
    expected = {key: dense_greedy(oracle, prompt, 16) for key, prompt in PROMPTS.items()}
    assert tokens(host, PROMPTS, max_tokens=16, ignore_eos=True) == expected


# Logits of up to 16 are 2**-4 apart in bfloat16, and both sides have rounded on the way: two such steps.
BFLOAT16_GAP = 0.125


@torch.inference_mode()
def test_bfloat16_on_a_cpu_chooses_what_transformers_does(host: EngineHost, bfloat16_model: Path) -> None:
    """Every id is transformers' choice, in bfloat16 and after the same ids, or within `BFLOAT16_GAP` of it."""
    from transformers import LlamaForCausalLM

    host.load(config_of(bfloat16_model, model__dtype="bfloat16"))
    collected = tokens(host, PROMPTS, max_tokens=32, ignore_eos=True)
    oracle = LlamaForCausalLM.from_pretrained(bfloat16_model, dtype=torch.bfloat16, attn_implementation="eager").eval()
    equal = total = 0
    for key, prompt in PROMPTS.items():
        ids = collected[key]
        assert len(ids) == 32
        logits = oracle(torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        best, chosen = logits.max(-1), logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
        gaps = best.values - chosen
        assert gaps.max() <= BFLOAT16_GAP, f"{key}: id {int(gaps.argmax())}"
        equal, total = equal + int((best.indices == torch.tensor(ids)).sum()), total + len(ids)
    assert equal >= 0.9 * total, "a bound that excuses everything shows nothing"


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that float16 is too small for (QwenLM/Qwen3#761, microsoft/onnxruntime-genai#2444).

    Channel 0 of the first MLP gives 90,000 for token `BAD` and far less for every other token.

    The first layer's attention adds nothing, so that the MLP sees the token alone. Gate and up of the channel point along
    what `BAD` gives there; its way out is so small that float32 is none the worse for it.
    """
    folder = make_tiny_llama(tmp_path_factory.mktemp("overflowing"), seed=1)
    weights = load_file(folder / "model.safetensors")
    layer = "model.layers.0."
    embedding = weights["model.embed_tokens.weight"][BAD]
    seen = embedding * embedding.square().mean().rsqrt() * weights[layer + "post_attention_layernorm.weight"]
    weights[layer + "self_attn.o_proj.weight"].zero_()
    weights[layer + "mlp.gate_proj.weight"][0] = 20 * seen / seen.square().sum()
    weights[layer + "mlp.up_proj.weight"][0] = 4500 * seen / seen.square().sum()
    weights[layer + "mlp.down_proj.weight"][:, 0] *= 1e-4
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_the_checkpoint_overflows_for_one_token_only(overflowing: Path) -> None:
    """By transformers in float32."""
    oracle = load_oracle(overflowing)
    activations: list[torch.Tensor] = []
    down = oracle.get_submodule("model.layers.0.mlp.down_proj")
    down.register_forward_pre_hook(lambda module, inputs: activations.append(inputs[0][0]))
    with torch.inference_mode():
        oracle(torch.arange(512)[None])
    largest = activations[0].abs().amax(-1)
    assert largest[BAD] > 7e4
    assert largest[torch.arange(512) != BAD].max() < 4e4
    assert max(tensor.abs().max() for tensor in load_file(overflowing / "model.safetensors").values()) < 65_504


def complete(host: EngineHost, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Ten ids of each prompt, with other requests under way or not."""
    collected = {key: submit(host, key, prompt, max_tokens=10, ignore_eos=True) for key, prompt in prompts.items()}
    assert {answer.finish_reason for answer in collected.values()} == {"length"}
    return {key: answer.token_ids for key, answer in collected.items()}


@pytest.mark.parametrize("place", [0, 20, 39], ids=["first", "middle", "last"])
def test_an_activation_that_overflows_float16_ends_its_request_and_no_other(
    host: EngineHost, overflowing: Path, place: int
) -> None:
    """The pool is so small that the blocks of the one that failed are used again."""
    host.load(config_of(overflowing, model__dtype="float16", cache__num_blocks=24, cache__block_size=4))
    neighbours = {key: PROMPTS[key] for key in ("p1", "p5", "p16")}
    alone: dict[str, list[int]] = {}
    oracle = load_oracle(overflowing)
    for key, prompt in neighbours.items():
        alone |= complete(host, {key: prompt})
        assert_greedy(oracle, prompt, alone[key], max_gap=0.05)
    prompt = [5] * place + [BAD] + [6] * (39 - place)
    for _ in range(3):
        bad = submit(host, "bad", prompt, max_tokens=10, ignore_eos=True)
        assert complete(host, neighbours) == alone
        assert (bad.finish_reason, bad.token_ids, bad.text) == ("error", [], "")
        assert bad.last.request_id == "bad"
        error = bad.last.error or ""
        assert "logits are not finite for this request" in error
        assert "overflowed in float16" in error
        assert "\n" not in error
    check_idle(host)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_the_same_request_ends_well_where_the_activation_fits(host: EngineHost, overflowing: Path, dtype: str) -> None:
    host.load(config_of(overflowing, model__dtype=dtype))
    prompt = [5] * 20 + [BAD] + [6] * 19
    answer = answers(host, {"a": prompt}, max_tokens=10, ignore_eos=True)["a"]
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 10)
    if dtype == "auto":
        assert answer.token_ids == dense_greedy(overflowing, prompt, 10)
