from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from backend.engine.engine_host import EngineHost
from tests.engine.integrity import MadeEngines
from tests.helpers import dense_greedy, load_oracle, make_tiny_llama
from tests.interpreter import interpret_without_cuda

if TYPE_CHECKING:
    from backend.spec_decode.heads.head_config import HeadKind

interpret_without_cuda()  # before any file of this folder imports a kernel


@pytest.fixture(scope="session", autouse=True)
def made_engines() -> Iterator[MadeEngines]:
    """Those made while the tests of this folder run; a test that damages one on purpose adds it to `broken`."""
    made = MadeEngines()
    with made.recording():
        yield made


@pytest.fixture(autouse=True)
def engines_hold_together(made_engines: MadeEngines) -> Iterator[None]:
    """After every test: no block is lost, in two places, or held by other requests than are counted."""
    yield
    made_engines.check()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def replays() -> Iterator[Counter[str]]:
    """What CUDA graphs would replay, on a CPU that records and repeats it: see `tests.worker.recorded_graphs`."""
    from tests.worker.recorded_graphs import recorded_graphs

    with recorded_graphs() as replays:
        yield replays


@pytest.fixture
def graph_host(replays: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineHost]:
    """An engine with such graphs, whose blocks are counted after every step."""
    monkeypatch.setenv("SERVELAB_DEBUG", "1")
    host = EngineHost()
    yield host
    host.close()


@pytest.fixture(scope="module")
def circling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `tests.engine.looking_up.make_circling`."""
    from tests.engine.looking_up import make_circling

    return make_circling(tmp_path_factory.mktemp("circling") / "model")


@pytest.fixture(scope="session")
def few_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of few tokens, and what belongs to it: see `tests.engine.few_tokens`."""
    from tests.engine.few_tokens import VOCAB_SIZE
    from tests.engine.heads import make_few_tokens

    return make_few_tokens(tmp_path_factory.mktemp("models") / "few-tokens", VOCAB_SIZE)


@pytest.fixture(scope="session")
def few_tokens_greedy(few_tokens: Path) -> dict[str, list[int]]:
    """Its answers."""
    from tests.engine.few_tokens import PROMPTS

    oracle = load_oracle(few_tokens)
    return {key: dense_greedy(oracle, prompt, 24) for key, prompt in PROMPTS.items()}


@pytest.fixture(scope="session")
def few_tokens_heads(tmp_path_factory: pytest.TempPathFactory, few_tokens: Path) -> dict[HeadKind, Path]:
    """Heads that have learnt it."""
    from backend.models.sources import resolve_source
    from backend.spec_decode.heads.target import DenseTarget
    from tests.engine.few_tokens import VOCAB_SIZE, VOCABULARY
    from tests.engine.heads import KINDS, trained_head
    from tests.spec_decode.tiny_heads import CPU, greedy_conversations

    folder, target = tmp_path_factory.mktemp("heads"), DenseTarget.load(resolve_source(str(few_tokens)), CPU)
    conversations = greedy_conversations(few_tokens, VOCAB_SIZE, 64)
    return {kind: trained_head(folder / kind, kind, few_tokens, target, conversations, VOCABULARY) for kind in KINDS}


@pytest.fixture(scope="module")
def host() -> Iterator[EngineHost]:
    host = EngineHost()
    yield host
    host.close()
