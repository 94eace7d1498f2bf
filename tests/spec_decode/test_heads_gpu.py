"""Heads on a CUDA device: the CPU's numbers, CUDA graphs, and training in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from backend.models.loader import load_model
from backend.models.sources import resolve_source
from backend.quantization.calibration import WindowAttention
from backend.spec_decode.heads.medusa import MedusaHeads
from backend.spec_decode.heads.target import DenseTarget, dense_metadata
from backend.spec_decode.heads.training import HeadTrainer, TrainingSettings, new_head
from backend.spec_decode.heads.unroll import DraftHead, unroll
from tests.spec_decode.tiny_heads import (
    FEATURE_LAYERS,
    greedy_conversations,
    make_target,
    random_eagle,
    random_ids,
    random_medusa,
)

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def on_cuda(folder: Path) -> DenseTarget:
    """In float32."""
    return DenseTarget(load_model(resolve_source(str(folder)), device=CUDA, dtype=torch.float32).model)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_an_unroll_gives_the_cpu_s_numbers_and_gradients(tmp_path: Path, kind: str) -> None:
    cpu = make_target(tmp_path)
    cuda = on_cuda(tmp_path)
    token_ids = random_ids(512, 2, 20)

    def results(target: DenseTarget, head: DraftHead) -> list[Tensor]:
        parameters = [parameter.requires_grad_() for parameter in head.parameters()]
        ids = token_ids.to(target.device)
        steps = list(unroll(head, target, target.run(ids, FEATURE_LAYERS), ids, 3))
        known = torch.stack([hidden[:, :16] for hidden in steps])
        return [value.cpu() for value in (known, *torch.autograd.grad(known.sin().mean(), parameters))]

    def head() -> DraftHead:
        return random_eagle(cpu) if kind == "eagle" else random_medusa(cpu)

    for found, expected in zip(results(cuda, head().to(CUDA)), results(cpu, head()), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_heads_run_inside_a_cuda_graph(tmp_path: Path) -> None:
    cpu = make_target(tmp_path)
    target = on_cuda(tmp_path)
    eagle, medusa = random_eagle(cpu).to(CUDA), random_medusa(cpu).to(CUDA)
    positions = torch.arange(8, device=CUDA)
    metadata = dense_metadata(1, positions)
    states = torch.randn(8, len(FEATURE_LAYERS), 72, device=CUDA)
    embedded, hidden = torch.randn(2, 8, 72, device=CUDA)

    @torch.inference_mode()
    def step() -> tuple[Tensor, Tensor]:
        features = eagle.fuse(states)
        for _ in range(2):
            features = eagle(
                embedded,
                features,
                positions,
                target.model.cos_sin_cache,
                target.no_cache,
                metadata,
                WindowAttention(8),
            )
        return eagle.final_norm(features), medusa(hidden)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for tensor in (states, embedded, hidden):
        tensor.normal_()
    graph.replay()
    for found, expected in zip(captured, step(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_training_in_bfloat16_helps(tmp_path: Path, kind: str) -> None:
    vocab_size = 24
    cpu = make_target(tmp_path, vocab_size)
    target = DenseTarget.load(resolve_source(str(tmp_path)), CUDA)
    assert target.dtype == torch.bfloat16
    conversations = greedy_conversations(tmp_path, vocab_size, 96)
    held_out = greedy_conversations(tmp_path, vocab_size, 24, seed=4)
    head: DraftHead = random_eagle(cpu)
    if kind == "medusa":
        head = MedusaHeads(target.config.hidden_size, 3, dtype=torch.float32, device=CUDA)
    settings = TrainingSettings(num_steps=60, num_unrolled=3, batch_tokens=640, learning_rate=3e-3, seed=0)
    head = new_head(head.to(CUDA), target, 0)
    trainer = HeadTrainer(head, target, FEATURE_LAYERS, torch.arange(vocab_size, device=CUDA), settings)
    before = trainer.held_out_acceptance(held_out)
    assert not trainer.train(conversations, should_stop=lambda: trainer.step == 30)
    tensors, values = trainer.state()
    trainer.restore({name: tensor.cpu() for name, tensor in tensors.items()}, values)
    assert trainer.train(conversations)
    trained = trainer.held_out_acceptance(held_out)
    assert before is not None
    assert trained is not None
    assert trained.mean_length > before.mean_length + 0.1
