"""A head from nothing to its folder: conversations, draft vocabulary, training, held-out acceptance; in slices, if wanted."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from backend.config import EngineConfig
from backend.engine.engine_host import EngineHost
from backend.errors import ConfigError, ModelError
from backend.metrics.environment import environment
from backend.models.model_config import load_decoder_config
from backend.models.sources import ModelSource
from backend.spec_decode.heads.data_folder import DataFolder
from backend.spec_decode.heads.eagle import default_feature_layers
from backend.spec_decode.heads.generation import (
    OPENINGS,
    WRITER_VERSION,
    ConversationWriter,
    plan_conversation,
    read_openings,
)
from backend.spec_decode.heads.head_config import CONFIG_NAME, HeadConfig, HeadKind
from backend.spec_decode.heads.head_file import build_head, save_head
from backend.spec_decode.heads.target import DenseTarget, target_fingerprint
from backend.spec_decode.heads.training import HeadTrainer, Progress, TrainingSettings, new_head
from backend.spec_decode.heads.training_data import (
    Conversation,
    choose_draft_vocabulary,
    count_answer_tokens,
    coverage,
    split_held_out,
)

MAX_LENGTH = 2048  # tokens of a conversation
NUM_STEPS: Mapping[HeadKind, int] = {"eagle": 6, "medusa": 4}  # tokens ahead; for a Medusa, its heads
_CONVERSATIONS_AT_ONCE = {"cuda": 4096, "cpu": 16}  # of a part of the data
_REQUESTS_AT_ONCE = {"cuda": 1024, "cpu": 16}  # of one step of the engine
_NOTE = "state.json"
_SAVE_INTERVAL_S = 180.0  # of training, which is what a kill loses at most


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """What makes a head.

    Attributes:
        num_tokens: of the conversations, at least.
        texts: users' words to answer.
        self_generated: whether the target writes users' words, too.
        command: as it is to stand in the head's config.
    """

    kind: HeadKind
    num_tokens: int
    texts: tuple[str, ...]
    self_generated: bool
    draft_vocab_size: int
    training: TrainingSettings
    command: str


@dataclass(frozen=True, slots=True)
class HeadResult:
    """
    Attributes:
        step: done, of `plan.training.num_steps`; 0 also where the conversations are not all written.
        config: of the head as it is; None before the first step, when there is none.
    """

    step: int
    num_tokens: int
    config: HeadConfig | None
    size_bytes: int | None


class HeadTraining:
    """Work on one folder. What is unfinished lies in its `training` and, unless another one is named, `data`."""

    def __init__(self, source: ModelSource, plan: HeadPlan, output: Path, data: Path | None = None) -> None:
        """Raise `ConfigError` for a dummy, and where the folder has a head that is finished."""
        self._fingerprint = target_fingerprint(source)
        assert source.path is not None
        self._source, self._plan, self._output = source, plan, output
        self._data_path, self._work = data or output / "data", output / "training"
        self._config = load_decoder_config(source.path)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._max_length = min(MAX_LENGTH, self._config.max_position_embeddings)
        if (output / CONFIG_NAME).exists() and not (self._work / _NOTE).exists():
            raise ConfigError(f"{output} has a model or a head that is finished; name another folder")

    def run(
        self,
        on_stage: Callable[[str, float, float], None],
        on_progress: Callable[[Progress], None],
        should_stop: Callable[[], bool] = lambda: False,
        deadline: float = math.inf,
    ) -> HeadResult:
        """Go on to the end, or to where a stop is asked for; a part of the data, or a step, that began is done first.

        Args:
            on_stage: called with what is being done, how many tokens of it are, and of how many.
            deadline: of `time.perf_counter`, when to stop by itself. However early it is, a part or a step is done before: so
                any number of slices comes to an end.
        Raises:
            ConfigError: the folder's work is another's.
            CapacityError, EngineError, ModelError: the model does not fit or fails, or a file cannot be read or written.
        """
        plan = self._plan
        data = DataFolder(self._data_path, self._made_by())
        if not self._write_data(data, on_stage, should_stop, deadline):
            return HeadResult(0, data.num_tokens, None, None)
        conversations = data.read(plan.num_tokens)
        training, held_out = split_held_out(conversations)
        vocab_size = self._config.vocab_size
        vocabulary = choose_draft_vocabulary(
            count_answer_tokens(training, vocab_size), plan.draft_vocab_size, sorted(self._config.eos_token_ids)
        )
        target = DenseTarget.load(self._source, self._device)
        draft_token_ids = torch.from_numpy(vocabulary).to(self._device)
        config = self._head_config(len(vocabulary))
        head = build_head(config, self._config, dtype=torch.float32, device=self._device)
        new_head(head, target, plan.training.seed)
        trainer = HeadTrainer(head, target, config.feature_layers, draft_token_ids, plan.training)
        seconds_before, started = self._restore(trainer), time.perf_counter()

        def save() -> float | None:
            return self._save(trainer, seconds_before, started)

        is_finished = trainer.train(training, on_progress, should_stop, deadline, save, _SAVE_INTERVAL_S)
        if trainer.step == 0:  # what has learnt nothing is not to be taken for a head
            return HeadResult(0, data.num_tokens, None, None)
        training_seconds = save()
        on_stage("measuring acceptance", 0, 0)
        acceptance = trainer.held_out_acceptance(held_out)
        record = {
            "command": plan.command,
            "data": data.made_by | {"num_conversations": len(conversations), "num_tokens": _num_tokens(conversations)},
            **asdict(plan.training),
            "steps_done": trainer.step,
            "training_seconds": training_seconds,
            "device": _device_name(self._device),
            "held_out": {
                "num_conversations": len(held_out),
                "coverage": coverage(count_answer_tokens(held_out, vocab_size), vocabulary),
                "greedy_chain": asdict(acceptance) if acceptance else None,
            },
        }
        config = replace(config, training=record)
        size = save_head(self._output, head, config, draft_token_ids)
        if is_finished:
            shutil.rmtree(self._work, ignore_errors=True)
        return HeadResult(trainer.step, data.num_tokens, config, size)

    def _head_config(self, draft_vocab_size: int) -> HeadConfig:
        is_eagle = self._plan.kind == "eagle"
        return HeadConfig(
            kind=self._plan.kind,
            target=self._source.name,
            target_fingerprint=self._fingerprint,
            num_speculative_tokens=self._plan.training.num_unrolled,
            feature_layers=default_feature_layers(self._config.num_layers) if is_eagle else (),
            draft_vocab_size=draft_vocab_size,
            training={},
        )

    def _made_by(self) -> dict[str, Any]:
        """What decides the conversations. The device's kind does: a part's size is its own, and so are its roundings."""
        texts = blake2b(json.dumps(self._plan.texts).encode(), digest_size=16).hexdigest() if self._plan.texts else None
        return {
            "version": WRITER_VERSION,
            "target_fingerprint": self._fingerprint,
            "self_generated": self._plan.self_generated,
            "openings": blake2b(OPENINGS.read_bytes(), digest_size=16).hexdigest(),
            "texts": texts,
            "seed": self._plan.training.seed,
            "max_length": self._max_length,
            "device": self._device.type,
        }

    def _write_data(
        self,
        data: DataFolder,
        on_stage: Callable[[str, float, float], None],
        should_stop: Callable[[], bool],
        deadline: float,
    ) -> bool:
        """Have conversations written until there are enough; whether there are."""
        plan, kind, first_part = self._plan, self._device.type, data.num_parts
        if data.num_tokens >= plan.num_tokens:
            return True
        config = EngineConfig().with_overrides(
            {
                "model.name": self._source.name,
                "model.max_model_len": self._max_length,
                "scheduler.max_num_seqs": _REQUESTS_AT_ONCE[kind],
            }
        )
        openings = read_openings()
        host = EngineHost()
        try:
            on_stage("loading the engine", 0, 0)
            host.load(config)
            writer = ConversationWriter(host, self._max_length)
            while data.num_tokens < plan.num_tokens:
                if should_stop() or (data.num_parts > first_part and time.perf_counter() >= deadline):
                    return False
                on_stage("writing conversations", data.num_tokens, plan.num_tokens)
                first = data.num_parts * _CONVERSATIONS_AT_ONCE[kind]
                written = writer.write(
                    [
                        plan_conversation(plan.training.seed, index, openings, plan.texts, plan.self_generated)
                        for index in range(first, first + _CONVERSATIONS_AT_ONCE[kind])
                    ]
                )
                if not written:
                    raise ConfigError(f"no conversation has room for an answer in {self._max_length:,} tokens")
                data.append(written)
        finally:
            host.close()
        return True

    def _restore(self, trainer: HeadTrainer) -> float | None:
        """Seconds of training in the slices before this one; None where one of them did not note it."""
        if not (self._work / _NOTE).exists():
            return 0.0
        try:
            values = json.loads((self._work / _NOTE).read_text(encoding="utf-8"))
            if values["plan"] != self._key():
                changed = [name for name, value in self._key().items() if values["plan"].get(name) != value]
                raise ConfigError(
                    f"{self._output} is being trained with another {', '.join(changed)}; name another folder"
                )
            trainer.restore(load_file(self._work / values["state"]), values)
            return None if values.get("seconds") is None else float(values["seconds"])
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise ModelError(f"{self._work} is damaged ({error}); remove it to start afresh") from None

    def _save(self, trainer: HeadTrainer, seconds_before: float | None, started: float) -> float | None:
        """The tensors under a name of their own, then the note that names them: a crash leaves the older pair.

        Returns the seconds of training in all slices, up to now.
        """
        tensors, values = trainer.state()
        name = f"state-{trainer.step}.safetensors"
        try:
            self._work.mkdir(parents=True, exist_ok=True)
            unfinished = self._work / "state.unfinished"
            save_file(tensors, unfinished)  # waits for the device, so that the clock is true
            os.replace(unfinished, self._work / name)
            seconds = None if seconds_before is None else round(seconds_before + time.perf_counter() - started, 3)
            note = values | {"plan": self._key(), "state": name, "seconds": seconds}
            unfinished = self._work / f"{_NOTE}.unfinished"
            unfinished.write_text(json.dumps(note), encoding="utf-8")
            os.replace(unfinished, self._work / _NOTE)
            for path in self._work.glob("state-*.safetensors"):
                if path.name != name:
                    path.unlink()
            return seconds
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self._work} cannot be written: {getattr(error, 'strerror', None) or error}") from None

    def _key(self) -> dict[str, Any]:
        """What must be the same in all slices."""
        plan = self._plan
        return {
            "kind": plan.kind,
            "draft_vocab_size": plan.draft_vocab_size,
            "num_tokens": plan.num_tokens,
            **asdict(plan.training),
            **self._made_by(),
        }


def _device_name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else environment()["cpu"]


def _num_tokens(conversations: list[Conversation]) -> int:
    return sum(len(conversation.token_ids) for conversation in conversations)
