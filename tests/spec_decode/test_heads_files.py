"""A head's folder: what is saved is what is loaded, and what does not fit is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.cli import main
from backend.config import EngineConfig
from backend.engine.loading import files_fingerprint, load_engine
from backend.errors import ConfigError, ModelError
from backend.models.sources import resolve_source
from backend.spec_decode.heads import shipped
from backend.spec_decode.heads.head_config import HeadConfig, read_head_config, refuse_head
from backend.spec_decode.heads.head_file import LoadedHead, load_head, save_head
from backend.spec_decode.heads.shipped import shipped_head
from backend.spec_decode.heads.target import DenseTarget, target_fingerprint
from backend.spec_decode.heads.unroll import unroll
from tests.helpers import make_tiny_llama
from tests.spec_decode.tiny_heads import CPU, FEATURE_LAYERS, make_target, random_eagle, random_ids, random_medusa

VOCABULARY = torch.arange(0, 512, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def target(folder: Path) -> DenseTarget:
    return make_target(folder)


@pytest.fixture(scope="module")
def fingerprint(folder: Path, target: DenseTarget) -> str:
    return target_fingerprint(resolve_source(str(folder)))


def config(kind: Any, fingerprint: str, **changes: Any) -> HeadConfig:
    layers = FEATURE_LAYERS if kind == "eagle" else ()
    return replace(HeadConfig(kind, "tiny", fingerprint, 4, layers, len(VOCABULARY), {"seed": 3}), **changes)


def load(path: Path, target: DenseTarget, fingerprint: str) -> LoadedHead:
    return load_head(path, target.config, fingerprint, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_head_named_as_a_draft_model_is_told_where_it_goes(
    tmp_path: Path, folder: Path, target: DenseTarget, fingerprint: str, kind: str
) -> None:
    head = random_eagle(target) if kind == "eagle" else random_medusa(target)
    save_head(tmp_path, head, config(kind, fingerprint), VOCABULARY)
    settings = {"model.name": str(folder), "speculative.method": "draft_model", "speculative.model": str(tmp_path)}
    asked = EngineConfig().with_overrides(settings)
    for read in (files_fingerprint, lambda each: load_engine(each, lambda phase: None)):
        with pytest.raises(
            ConfigError, match=f"holds a head of kind {kind}: it goes with speculative.method = '{kind}', and not with"
        ):
            read(asked)
    refuse_head(str(folder))
    refuse_head("smollm2-135m")


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
@torch.no_grad()
def test_a_head_comes_back_as_it_was(tmp_path: Path, target: DenseTarget, fingerprint: str, kind: str) -> None:
    """It computes what it did with its weights in fp16."""
    head = random_eagle(target) if kind == "eagle" else random_medusa(target)
    size = save_head(tmp_path / "head", head, config(kind, fingerprint), VOCABULARY)
    assert size == (tmp_path / "head" / "model.safetensors").stat().st_size
    loaded = load(tmp_path / "head", target, fingerprint)
    assert loaded.config == config(kind, fingerprint)
    assert loaded.draft_token_ids.tolist() == VOCABULARY.tolist()
    for parameter in head.parameters():
        parameter.data.copy_(parameter.half().float())
    token_ids = random_ids(512, 2, 12)
    states = target.run(token_ids, FEATURE_LAYERS)
    steps = (unroll(each, target, states, token_ids, 3) for each in (head, loaded.head))
    for expected, found in zip(*steps, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_shapes_for_the_default_model_stay_below_12_mb() -> None:
    from backend.models.dummy import DUMMY_SHAPES
    from backend.spec_decode.heads.eagle import EagleHead, default_feature_layers
    from backend.spec_decode.heads.medusa import MedusaHeads

    shape, meta = DUMMY_SHAPES["smollm2-135m"], torch.device("meta")
    eagle = EagleHead(shape, len(default_feature_layers(shape.num_layers)), dtype=torch.float16, device=meta)
    medusa = MedusaHeads(shape.hidden_size, 4, dtype=torch.float16, device=meta)
    vocabulary_bytes = 16384 * 4
    for head in (eagle, medusa):
        assert 2e6 < sum(parameter.nbytes for parameter in head.parameters()) + vocabulary_bytes < 12e6


def test_the_fingerprint_is_of_weights_and_shape(tmp_path: Path, folder: Path, fingerprint: str) -> None:
    same = make_tiny_llama(tmp_path / "same")
    other = make_tiny_llama(tmp_path / "other", seed=1)
    assert target_fingerprint(resolve_source(str(same))) == fingerprint
    assert target_fingerprint(resolve_source(str(other))) != fingerprint
    few = ["--windows", "2", "--window-length", "16"]
    assert main(["quantize", str(folder), "-o", str(tmp_path / "int8"), "--method", "int8", *few]) == 0
    assert target_fingerprint(resolve_source(str(tmp_path / "int8"))) == fingerprint, "its head fits the quantized one"
    with pytest.raises(ConfigError, match="random weights"):
        target_fingerprint(resolve_source("dummy:tiny"))


def test_a_head_of_another_target_is_refused(tmp_path: Path, target: DenseTarget) -> None:
    save_head(tmp_path, random_medusa(target), config("medusa", "f00"), VOCABULARY)
    with pytest.raises(ConfigError, match=r"trained for tiny.*servelab heads train"):
        load(tmp_path, target, "another")


def test_damage_is_named(tmp_path: Path, target: DenseTarget, fingerprint: str) -> None:
    with pytest.raises(ModelError, match="holds no draft head"):
        read_head_config(tmp_path)
    save_head(tmp_path, random_medusa(target), config("medusa", fingerprint), VOCABULARY)
    weights, written = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())

    def refused(match: str, **changes: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps(written | changes))
        with pytest.raises(ModelError, match=match):
            load(tmp_path, target, fingerprint)

    refused("kind 'other' is no draft head's", kind="other")
    refused("outputs has shape", num_speculative_tokens=3)
    refused("not an ascending list of 100 ids", draft_vocab_size=100)
    refused("feature_layers", feature_layers=[1])
    refused("feature_layers", kind="eagle", feature_layers=[2, 1])
    refused("other tensors", kind="eagle", feature_layers=[1, 2])
    refused("feature layer 4 is above", kind="eagle", feature_layers=[1, 4])
    tensors = load_file(weights)
    tensors["outputs"][0, 0, 0] = float("nan")
    save_file(tensors, weights)
    refused("outputs has values that are NaN or infinite")
    tensors["draft_token_ids"][-1] = 512
    save_file(tensors, weights)
    refused("outside the target's vocabulary")
    weights.write_bytes(weights.read_bytes()[:100])
    refused("cannot be read")


def test_a_shipped_head_is_found_by_its_target_s_weights(
    tmp_path: Path, folder: Path, target: DenseTarget, fingerprint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path / "shipped")
    source = resolve_source(str(folder))
    with pytest.raises(ConfigError, match=r"no eagle head comes for .*: servelab heads train --kind eagle"):
        shipped_head("eagle", source)
    for name, kind, of in (("a", "eagle", "f00"), ("b", "medusa", fingerprint), ("c", "eagle", fingerprint)):
        head = random_eagle(target) if kind == "eagle" else random_medusa(target)
        save_head(tmp_path / "shipped" / name, head, config(kind, of), VOCABULARY)
    assert shipped_head("eagle", source).name == "c"
    assert shipped_head("medusa", source).name == "b"
