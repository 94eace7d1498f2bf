"""What heads compute: against transformers' hidden states, and chains recomputed one by one, without and with a KV cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.attention.reference import ReferenceAttention
from backend.quantization.calibration import WindowAttention
from backend.spec_decode.heads.eagle import EagleHead, default_feature_layers
from backend.spec_decode.heads.target import DenseTarget, TargetStates, dense_metadata, output_rows
from backend.spec_decode.heads.unroll import unroll
from tests.helpers import load_oracle
from tests.spec_decode.tiny_heads import CPU, FEATURE_LAYERS, make_target, random_eagle, random_ids, random_medusa

NUM_STEPS, LENGTH = 4, 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def target(folder: Path) -> DenseTarget:
    return make_target(folder)


@pytest.fixture(scope="module")
def token_ids() -> Tensor:
    return random_ids(512, 2, LENGTH)


def test_states_are_those_of_transformers(folder: Path, target: DenseTarget, token_ids: Tensor) -> None:
    oracle = load_oracle(folder)
    with torch.no_grad():
        expected = oracle(token_ids, output_hidden_states=True)
    states = target.run(token_ids, (1, 2))
    for index, layer in enumerate((1, 2)):
        torch.testing.assert_close(states.features[:, :, index], expected.hidden_states[layer], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states.last, expected.hidden_states[-1], atol=1e-4, rtol=1e-4)
    logits = target.model.head(states.last.flatten(0, 1)).view_as(expected.logits)
    torch.testing.assert_close(logits, expected.logits, atol=1e-3, rtol=1e-4)


def test_padding_behind_a_sequence_changes_nothing(target: DenseTarget, token_ids: Tensor) -> None:
    padded = F.pad(token_ids, (0, 5))
    states, alone = target.run(padded, FEATURE_LAYERS), target.run(token_ids, FEATURE_LAYERS)
    torch.testing.assert_close(states.last[:, :LENGTH], alone.last, atol=1e-5, rtol=1e-5)
    head = random_eagle(target)
    steps = zip(
        unroll(head, target, states, padded, NUM_STEPS), unroll(head, target, alone, token_ids, NUM_STEPS), strict=True
    )
    for step, (of_padded, of_alone) in enumerate(steps):
        chains = LENGTH - step - 1  # those whose last token is there
        torch.testing.assert_close(of_padded[:, :chains], of_alone[:, :chains], atol=1e-4, rtol=1e-4)


def test_rows_of_the_output_head_are_the_checkpoint_s(folder: Path, target: DenseTarget) -> None:
    chosen = torch.tensor([3, 77, 511])
    assert target.model.head.weight is None, "this head is laid out for the CPU and shows no rows"
    torch.testing.assert_close(output_rows(target.model, chosen), load_oracle(folder).lm_head.weight[chosen])


def chain_without_cache(
    head: EagleHead, target: DenseTarget, states: TargetStates, token_ids: Tensor, row: int, start: int, num_steps: int
) -> list[Tensor]:
    """Every step recomputes all entries of the chain's sequence with plain causal attention; float [hidden] each."""
    with_known = head.fuse(states.features[row, : start + 1])
    outputs = []
    for step in range(num_steps):
        entries = start + step + 1
        embedded = F.embedding(token_ids[row, 1 : entries + 1], target.embedding)
        positions = torch.arange(entries)
        hidden = head(
            embedded,
            with_known,
            positions,
            target.model.cos_sin_cache,
            target.no_cache,
            dense_metadata(1, positions),
            WindowAttention(entries),
        )
        outputs.append(head.final_norm(hidden[-1:])[0])
        with_known = torch.cat((with_known, hidden[-1:]))
    return outputs


def test_an_unroll_is_every_chain_by_itself(target: DenseTarget, token_ids: Tensor) -> None:
    head, states = random_eagle(target), target.run(token_ids, FEATURE_LAYERS)
    steps = list(unroll(head, target, states, token_ids, NUM_STEPS))
    for row in range(2):
        for start in range(LENGTH - NUM_STEPS):
            chain = chain_without_cache(head, target, states, token_ids, row, start, NUM_STEPS)
            for step, expected in enumerate(chain):
                torch.testing.assert_close(steps[step][row, start], expected, atol=1e-5, rtol=1e-5)


def test_gradients_go_back_through_the_steps(target: DenseTarget, token_ids: Tensor) -> None:
    """Those of a chain's last step, against the chain by itself."""
    head, states = random_eagle(target), target.run(token_ids, FEATURE_LAYERS)
    parameters = [parameter.requires_grad_() for parameter in head.parameters()]
    direction = torch.randn(target.config.hidden_size, generator=torch.Generator().manual_seed(5))
    last = list(unroll(head, target, states, token_ids, 3))[-1]
    gradients = torch.autograd.grad(last[1, 4] @ direction, parameters)
    alone = chain_without_cache(head, target, states, token_ids, 1, 4, 3)[-1]
    for gradient, expected in zip(gradients, torch.autograd.grad(alone @ direction, parameters), strict=True):
        torch.testing.assert_close(gradient, expected, atol=2e-5, rtol=1e-4)


def test_drafting_over_a_paged_cache_is_the_unroll(target: DenseTarget, token_ids: Tensor) -> None:
    """A head's entries of known tokens in one step, and one more for every further token, in blocks that lie in no order."""
    head, config, block_size, start = random_eagle(target), target.config, 4, 4
    states = target.run(token_ids, FEATURE_LAYERS)
    steps = list(unroll(head, target, states, token_ids, NUM_STEPS))
    cache = LayerCache.zeros(3, block_size, config.num_kv_heads, config.head_dim, torch.float32, CPU)
    block_table = torch.tensor([[3, 1, 2]], dtype=torch.int32)
    features, computed = head.fuse(states.features[1, : start + 1]), 0
    for step in range(NUM_STEPS):
        end = computed + len(features)
        positions = torch.arange(computed, end)
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, len(positions)], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_table=block_table,
            slot_mapping=block_table[0, positions // block_size].long() * block_size + positions % block_size,
            positions=positions,
            num_decodes=int(len(positions) == 1),
        )
        embedded = F.embedding(token_ids[1, computed + 1 : end + 1], target.embedding)
        hidden = head(embedded, features, positions, target.model.cos_sin_cache, cache, metadata, ReferenceAttention())
        torch.testing.assert_close(head.final_norm(hidden[-1:])[0], steps[step][1, start], atol=1e-5, rtol=1e-5)
        features, computed = hidden[-1:], end


def test_medusa_s_heads_are_residual_blocks_side_by_side(target: DenseTarget, token_ids: Tensor) -> None:
    """In numpy's float64: over the target's hidden state and the token behind it, and no token after that."""
    head, states = random_medusa(target), target.run(token_ids, ())
    named = {name: parameter.double().numpy() for name, parameter in head.named_parameters()}
    last, embedded = states.last.double().numpy(), target.embedding.double().numpy()[token_ids.numpy()]

    def normed(rows: np.ndarray) -> np.ndarray:
        return rows / np.sqrt((rows**2).mean(-1, keepdims=True))

    def silu(rows: np.ndarray) -> np.ndarray:
        return rows / (1 + np.exp(-rows))

    both = np.concatenate((normed(last[:, :-1]), normed(embedded[:, 1:])), -1)
    units = silu(both @ named["fusion_up.weight"].T + named["fusion_up.bias"])
    fused = last[:, :-1] + units @ named["fusion_down.weight"].T
    for step, hidden in enumerate(unroll(head, target, states, token_ids, 4)):
        rows = slice(step * 72, (step + 1) * 72)
        units = silu(fused @ named["blocks.weight"][rows].T + named["blocks.bias"][rows])
        expected = fused + units @ named["outputs"][step]
        np.testing.assert_allclose(hidden[:, :-1].numpy(), expected, atol=1e-4, rtol=1e-4)
    head.initialize(torch.Generator().manual_seed(0))
    for hidden in unroll(head, target, states, token_ids, 4):
        torch.testing.assert_close(hidden, states.last, atol=0, rtol=0)


@pytest.mark.parametrize(("num_layers", "layers"), [(30, (2, 15, 27)), (3, (1, 2)), (1, (1,)), (32, (2, 16, 29))])
def test_features_come_from_low_middle_and_high_layers(num_layers: int, layers: tuple[int, ...]) -> None:
    assert default_feature_layers(num_layers) == layers
