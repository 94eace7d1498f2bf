"""`SpeculativeSampling`: how each position of a round is to be sampled, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backend.sample.columns import SamplingColumns
from backend.sample.metadata import SamplingMetadata, copy_to
from backend.sample.random import Purpose, uniform


@dataclass(frozen=True, slots=True)
class SpeculativeSampling:
    """Of a round of `num_rows` requests and up to k drafted tokens each, on the device of the logits.

    Column i of a matrix is for the i-th position of the row's round. The draws of a position are functions of (seed, output
    position, purpose) alone: that of TOKEN is the one plain decoding would take there.

    Attributes:
        banned_token_ids: what a row may not choose before its `min_tokens`, an id repeated to fill the row; None: no row.
        num_banned_positions: first positions of the round at which that holds.
        samples: whether any row is not greedy.
        filters: whether any row has top-k or top-p.
    """

    temperature: Tensor  # float32 [num_rows]
    top_k: Tensor  # int32 [num_rows]
    top_p: Tensor  # float32 [num_rows]
    accept_draws: Tensor  # float64 [num_rows, k]
    recovered_draws: Tensor  # float64 [num_rows, k]
    token_draws: Tensor  # float64 [num_rows, k + 1]
    banned_token_ids: Tensor | None = None  # int64 [num_rows, max_num_banned]
    num_banned_positions: Tensor | None = None  # int64 [num_rows]
    samples: bool = True
    filters: bool = True

    @staticmethod
    def build(
        metadata: SamplingMetadata, num_speculative_tokens: int, device: torch.device
    ) -> SpeculativeSampling | None:
        """Draw on the host and copy everything at once, without waiting for it; None if all are greedy and nothing is banned.

        Args:
            metadata: a row per request; its positions are those of the first drafted token, or of the token to sample where
                nothing is drafted.
            num_speculative_tokens: k, the columns of the draft.
        Raises:
            ValueError: k is below 1.
        """
        params, k = metadata.params, num_speculative_tokens
        if k < 1:
            raise ValueError(f"num_speculative_tokens {k} is below 1")
        columns, num_rows = SamplingColumns.of(params), len(params)
        samples = not columns.is_greedy.all()
        most_banned = max(map(len, metadata.banned_token_ids), default=0)
        if not samples and not most_banned:
            return None
        positions = (np.array(metadata.positions, dtype=np.int64)[:, None] + np.arange(k + 1)).ravel().tolist()
        seeds = np.repeat(columns.seeds, k + 1).tolist()
        draws = [
            uniform(seeds, positions, purpose).reshape(num_rows, k + 1)
            for purpose in (Purpose.ACCEPT, Purpose.RECOVERED, Purpose.TOKEN)
        ]
        banned = np.zeros((num_rows, most_banned + 1), dtype=np.int64)  # ids, then for how many positions
        for row, token_ids in enumerate(metadata.banned_token_ids):
            if token_ids:
                banned[row, :-1] = np.resize(token_ids, most_banned)
                banned[row, -1] = min(params[row].min_tokens - metadata.positions[row], k + 1)
        # One buffer, the widest first: a copy costs the same for one number as for a thousand.
        words = np.concatenate([part.reshape(-1).view(np.int32) for part in (*draws, banned, columns.words())])
        parts = copy_to(words, device).split(
            [*(2 * part.size for part in draws), 2 * banned.size, num_rows, num_rows, num_rows]
        )
        accept, recovered, token = (part.view(torch.float64).view(num_rows, k + 1) for part in parts[:3])
        bans = parts[3].view(torch.int64).view(banned.shape)
        return SpeculativeSampling(
            temperature=parts[4].view(torch.float32),
            top_p=parts[5].view(torch.float32),
            top_k=parts[6],
            accept_draws=accept[:, :k],
            recovered_draws=recovered[:, :k],
            token_draws=token,
            banned_token_ids=bans[:, :-1] if most_banned else None,
            num_banned_positions=bans[:, -1] if most_banned else None,
            samples=samples,
            filters=columns.filters,
        )
