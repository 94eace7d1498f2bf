"""The benchmark's arithmetic against closed forms, and one run of it on a tiny model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from backend.models.dummy import DUMMY_SHAPES
from benchmarks.engine import Figure, Timing, figures, linear_parameters, main
from kernels.limits import Limits

LIMITS = Limits("card", "bfloat16", 0, read_bytes_per_s=3e12, matmul_flops_per_s=7e14)
LLAMA = DUMMY_SHAPES["llama-3.1-8b"]


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "smollm2-135m", "tiny"])
def test_linear_weights_are_all_but_the_embedding_and_the_norms(shape: str) -> None:
    config = DUMMY_SHAPES[shape]
    norms = (2 * config.num_layers + 1) * config.hidden_size
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    assert linear_parameters(asdict(config)) == config.count_parameters() - norms - embedding


def test_rates() -> None:
    timing = Timing(sent=10.0, firsts=[10.5, 11.0], lasts=[12.0, 13.0])
    assert Figure("d", [(128, 5), (128, 5)], "decode").rate(timing) == 2 * 4 / 2.0
    assert Figure("p", [(300, 1), (700, 1)], "prefill").rate(timing) == 1000 / 1.0
    assert Figure("m", [(1, 20), (1, 40)], "mix").rate(timing) == 60 / 3.0


def test_what_the_card_could_do() -> None:
    """One request of the 8B: 15.0 GB of weights, and 256 tokens of context at 131,072 bytes."""
    model = asdict(LLAMA)
    step_bytes = 2 * linear_parameters(model) + (128 + 256 / 2) * 131072
    assert linear_parameters(model) * 2 == pytest.approx(15.0e9, rel=0.01)
    decode = Figure("decode 1", [(128, 256)], "decode").possible(model, LIMITS, 2)
    assert decode == pytest.approx(3e12 / step_bytes)
    prefill = Figure("prefill 1x2048", [(2048, 1)], "prefill").possible(model, LIMITS, 2)
    layers = LLAMA.num_layers * (4096 * 128 * (32 + 32 + 16) + 3 * 4096 * 14336)
    causal = 4 * (2048 / 2) * 4096 * 32
    assert prefill == pytest.approx(7e14 / (2 * layers + causal))
    assert Figure("mix", [(1, 2)], "mix").possible(model, LIMITS, 2) is None


def test_the_mix_is_as_large_as_the_peers() -> None:
    (mix,) = figures({"mix"}, (), 1, 256)
    ins, outs = (sum(lengths) for lengths in zip(*mix.lengths, strict=True))
    assert len(mix.lengths) == 256
    assert ins == pytest.approx(140_857, rel=2e-4)
    assert outs == pytest.approx(141_116, rel=2e-4)


def test_a_run_of_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    arguments = "--model dummy:tiny --only decode,mix --decode-batches 1,2 --output-len 6 --mix-requests 2 --repeats 1"
    main([*arguments.split(), "--set", "model.device=cpu", "-o", str(path)])
    result = json.loads(path.read_text())
    rows = result["models"][0]["figures"]
    assert [row["name"] for row in rows] == ["decode 1", "decode 2", "mix 2"]
    for row in rows:
        assert 0 < row["min"] <= row["tok_per_s"] <= row["max"]
        assert row["peer_tok_per_s"] is None, "a peer's figure of another machine"
    assert result["limits"]["read_tb_per_s"] > 0
    assert "decode 2" in capsys.readouterr().out


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "prefil"])
    assert "unknown kind prefil; known are decode, prefill, mix" in capsys.readouterr().err
