"""A tiny target, random heads for it, and conversations with its own greedy answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from backend.models.sources import resolve_source
from backend.quantization.calibration import WindowAttention
from backend.spec_decode.heads.acceptance import Drafter
from backend.spec_decode.heads.eagle import EagleHead
from backend.spec_decode.heads.medusa import MedusaHeads
from backend.spec_decode.heads.target import DenseTarget, TargetStates, dense_metadata
from backend.spec_decode.heads.training_data import Conversation
from tests.helpers import load_oracle, make_tiny_llama

CPU = torch.device("cpu")
FEATURE_LAYERS = (1, 2, 3)


def make_target(folder: Path, vocab_size: int = 512) -> DenseTarget:
    ids = {} if vocab_size == 512 else {"bos_token_id": 0, "eos_token_id": vocab_size - 1}
    make_tiny_llama(folder, vocab_size=vocab_size, **ids)
    return DenseTarget.load(resolve_source(str(folder)), CPU)


def randomize(head: nn.Module, seed: int = 0) -> None:
    """Every parameter at a scale where a dropped or swapped one moves the output far beyond any tolerance."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = name.endswith("norm.weight")
        parameter.data.copy_(1 + 0.2 * noise if is_norm else noise * parameter.shape[-1] ** -0.5)


def random_eagle(target: DenseTarget, num_features: int = len(FEATURE_LAYERS)) -> EagleHead:
    head = EagleHead(target.config, num_features, dtype=torch.float32, device=CPU)
    randomize(head)
    return head


def random_medusa(target: DenseTarget, num_heads: int = 4) -> MedusaHeads:
    head = MedusaHeads(target.config.hidden_size, num_heads, dtype=torch.float32, device=CPU)
    randomize(head)
    return head


def random_ids(vocab_size: int, *shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def greedy_conversations(
    folder: Path, vocab_size: int, number: int, *, prompt_len: int = 6, answer_len: int = 26, seed: int = 3
) -> list[Conversation]:
    """Random prompts, answered by transformers."""
    model = load_oracle(folder)
    prompts = random_ids(vocab_size, number, prompt_len, seed=seed)
    token_ids = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=answer_len, pad_token_id=0
    )
    is_answer = np.arange(prompt_len + answer_len) >= prompt_len
    return [Conversation(row.numpy().astype(np.int32), is_answer, True) for row in token_ids]


@torch.no_grad()
def dense_states(drafter: Drafter, token_ids: Sequence[int]) -> TargetStates:
    """Of all tokens of a text by one pass: no token's states know of those behind it."""
    return drafter.target.run(torch.tensor([token_ids]), drafter.feature_layers)


@torch.no_grad()
def dense_chain(
    drafter: Drafter,
    states: TargetStates,
    token_ids: Sequence[int],
    num_known: int,
    num_steps: int,
    window: int | None = None,
) -> list[int]:
    """The chain behind the first so many tokens, the last of which the target has not read yet; every step all anew.

    Args:
        states: of `token_ids`.
        window: of the head's attention, in tokens; None: it has none.
    """
    head, target, rows = drafter.head, drafter.target, drafter.draft_rows
    vocabulary, tokens = drafter.draft_token_ids, list(token_ids[:num_known])
    if not isinstance(head, EagleHead):
        following = F.embedding(torch.tensor(tokens[-1:]), target.embedding)
        hidden = head(head.fuse(states.last[0, num_known - 2, None], following))[0, :num_steps]
        return vocabulary[(hidden @ rows.t()).argmax(-1)].tolist()
    features = head.fuse(states.features[0, : num_known - 1])
    for _ in range(num_steps):
        positions = torch.arange(len(features))
        hidden = head(
            F.embedding(torch.tensor(tokens[1:]), target.embedding),
            features,
            positions,
            target.model.cos_sin_cache,
            replace(target.no_cache, window=window),
            dense_metadata(1, positions),
            WindowAttention(len(features)),
        )
        features = torch.cat((features, hidden[-1:]))
        tokens.append(int(vocabulary[(head.final_norm(hidden[-1:]) @ rows.t()).argmax()]))
    return tokens[num_known:]


@torch.no_grad()
def dense_ranking(
    drafter: Drafter, states: TargetStates, token_ids: Sequence[int], num_known: int, drafts: Sequence[int], most: int
) -> list[int]:
    """The likeliest tokens, best first, behind the first so many tokens and a chain of drafts; all anew.

    Args:
        states: of `token_ids`.
    """
    head, target = drafter.head, drafter.target
    tokens = [*token_ids[:num_known], *drafts]
    if not isinstance(head, EagleHead):
        following = F.embedding(torch.tensor(tokens[num_known - 1 : num_known]), target.embedding)
        behind = head(head.fuse(states.last[0, num_known - 2, None], following))[0, len(drafts)]
    else:
        hidden = features = head.fuse(states.features[0, : num_known - 1])
        for num_drafts in range(len(drafts) + 1):
            positions = torch.arange(len(features))
            hidden = head(
                F.embedding(torch.tensor(tokens[1 : num_known + num_drafts]), target.embedding),
                features,
                positions,
                target.model.cos_sin_cache,
                target.no_cache,
                dense_metadata(1, positions),
                WindowAttention(len(features)),
            )
            features = torch.cat((features, hidden[-1:]))
        behind = head.final_norm(hidden[-1])
    return drafter.draft_token_ids[(drafter.draft_rows @ behind).topk(most).indices].tolist()
