"""`HeadTrainer`: a head's training in steps that can stop and go on, bit for bit as if they had not stopped.

Each step takes a batch of conversations, has the target compute its hidden states anew, unrolls the head over them (EAGLE-3's
"training-time test": from the second step on it reads its own output) and lowers the cross-entropy to the target's distributions,
later steps of the unroll weighing less. AdamW with a warm-up and a cosine to zero.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backend.errors import ModelError
from backend.spec_decode.draft_tree import DraftTree
from backend.spec_decode.heads.acceptance import Acceptance, Answered, Drafter, answer_rounds, summarize
from backend.spec_decode.heads.eagle import EagleHead
from backend.spec_decode.heads.objective import draft_targets, soft_cross_entropy
from backend.spec_decode.heads.target import DenseTarget
from backend.spec_decode.heads.training_data import Batch, Conversation, batches
from backend.spec_decode.heads.unroll import DraftHead, unroll

_WARM_UP = 0.03  # of the steps
_STEP_WEIGHT = 0.8  # of an unroll's step, against the one before
_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.01
_MAX_GRADIENT_NORM = 1.0
_STEPS_BETWEEN_REPORTS = 20
_SHOWN_STEPS = 5  # tokens of the chains that held-out acceptance is told for
_HELD_OUT_AT_MOST = 256  # conversations


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """
    Attributes:
        num_steps: of the optimizer, in all slices together.
        num_unrolled: tokens ahead that are learnt.
        batch_tokens: of a step, padding included.
    """

    num_steps: int
    num_unrolled: int
    batch_tokens: int
    learning_rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class Progress:
    """
    Attributes:
        loss: mean since the last report, over all steps of the unroll, in nats.
        tokens_per_second: padding included.
    """

    step: int
    num_steps: int
    loss: float
    tokens_per_second: float
    seconds_left: float


class HeadTrainer:
    """Trains `head`, whose parameters must be float32, in place."""

    def __init__(
        self,
        head: DraftHead,
        target: DenseTarget,
        feature_layers: Sequence[int],
        draft_token_ids: Tensor,
        settings: TrainingSettings,
    ) -> None:
        """Args:
        draft_token_ids: int64 [draft_vocab], on the target's device.
        """
        self.head, self.target, self.settings = head, target, settings
        self.step = 0
        self._drafter = Drafter.of(head, target, feature_layers, draft_token_ids)
        self._parameters = [parameter.requires_grad_() for parameter in head.parameters()]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=settings.learning_rate,
            betas=_BETAS,
            weight_decay=_WEIGHT_DECAY,
            fused=target.device.type == "cuda",
        )

    def train(
        self,
        conversations: Sequence[Conversation],
        on_progress: Callable[[Progress], None] = lambda progress: None,
        should_stop: Callable[[], bool] = lambda: False,
        deadline: float = math.inf,
        save: Callable[[], object] = lambda: None,
        save_interval_s: float = math.inf,
    ) -> bool:
        """Go on until all steps are done, or none more is to begin. Whether they are done.

        Args:
            deadline: of `time.perf_counter`, behind which no step but the first of this call begins.
            save: called between two steps when `save_interval_s` seconds have gone by since the last time, or since the call:
                `state` is then what all steps so far came to, and their losses were finite.
        Raises:
            ModelError: the loss is no longer finite.
        """
        settings = self.settings
        source = batches(conversations, settings.batch_tokens, settings.num_unrolled, settings.seed, first=self.step)
        losses: list[Tensor] = []
        first_step, num_tokens, started = self.step, 0, time.perf_counter()
        next_save = started + save_interval_s
        while self.step < settings.num_steps:
            if should_stop() or (self.step > first_step and time.perf_counter() >= deadline):
                return False
            batch = next(source)
            losses.append(self._train_step(batch))
            num_tokens += batch.token_ids.size
            self.step += 1
            is_save_due = time.perf_counter() >= next_save
            if is_save_due or len(losses) == _STEPS_BETWEEN_REPORTS or self.step == settings.num_steps:
                loss = float(torch.stack(losses).mean())  # waits for the device, so that the clock is true
                if not math.isfinite(loss):
                    raise ModelError(f"the loss is {loss} at step {self.step:,}; a lower --learning-rate may help")
                losses.clear()
                seconds = time.perf_counter() - started
                left = (settings.num_steps - self.step) * seconds / (self.step - first_step)
                on_progress(Progress(self.step, settings.num_steps, loss, num_tokens / seconds, left))
            if is_save_due:
                save()
                next_save = time.perf_counter() + save_interval_s
        return True

    def _train_step(self, batch: Batch) -> Tensor:
        """The loss, on the device."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * self._schedule()
        with torch.autocast("cuda", torch.bfloat16, enabled=self.target.device.type == "cuda"):
            loss = self._loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, _MAX_GRADIENT_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _loss(self, batch: Batch) -> Tensor:
        token_ids, places = self._to_device(batch.token_ids), self._to_device(batch.places)
        states = self.target.run(token_ids, self._drafter.feature_layers)
        targets = draft_targets(
            self.target, states.last.flatten(0, 1).index_select(0, places), self._drafter.draft_rows
        )
        loss, weights = torch.zeros((), device=self.target.device), 0.0
        steps = unroll(self.head, self.target, states, token_ids, self.settings.num_unrolled)
        for step, hidden in enumerate(steps):
            # The chain that reaches a place in this step began so many tokens before it.
            reached = hidden.flatten(0, 1).index_select(0, places - (step + 1))
            weight = _STEP_WEIGHT**step
            loss = loss + weight * soft_cross_entropy(reached, self._drafter.draft_rows, targets)
            weights += weight
        return loss / weights

    def _schedule(self) -> float:
        """The share of the learning rate that the next step has."""
        warm_up = max(1, round(_WARM_UP * self.settings.num_steps))
        if self.step < warm_up:
            return (self.step + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * (self.step - warm_up) / max(1, self.settings.num_steps - warm_up)))

    def _to_device(self, values: Any) -> Tensor:
        tensor = torch.from_numpy(values)
        if self.target.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.target.device, non_blocking=True)

    def held_out_acceptance(self, conversations: Sequence[Conversation]) -> Acceptance | None:
        """Of chains over the greedy answers among some conversations; None where there are none."""
        greedy = [
            Answered(conversation.token_ids.tolist(), conversation.answers())
            for conversation in conversations
            if conversation.is_greedy
        ][:_HELD_OUT_AT_MOST]
        num_steps = min(_SHOWN_STEPS, self.settings.num_unrolled)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.target.device.type == "cuda"):
            rounds = answer_rounds(self._drafter, greedy, DraftTree.chain(num_steps), self.settings.batch_tokens)
        return summarize([each for of_one in rounds for each in of_one], num_steps)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON-safe values from which `restore` goes on."""
        tensors = {}
        for name, parameter in self.head.named_parameters():
            tensors[f"head.{name}"] = parameter.detach()
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{kind}.{name}"] = value
        return tensors, {"step": self.step}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Go on from a `state`. Raises `KeyError` or `RuntimeError` where it is not this trainer's."""
        self.step = int(values["step"])
        for name, parameter in self.head.named_parameters():
            parameter.data.copy_(tensors[f"head.{name}"])
            if self.step:
                moments = {kind: tensors[f"{kind}.{name}"] for kind in ("step", "exp_avg", "exp_avg_sq")}
                self._optimizer.state[parameter] = {
                    kind: value.to(self.target.device, copy=True) for kind, value in moments.items()
                }


def new_head(head: DraftHead, target: DenseTarget, seed: int) -> DraftHead:
    """`head` with the weights that training begins with."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(head, EagleHead):
        head.initialize(target.model.final_norm.weight, generator)
    else:
        head.initialize(generator)
    return head
