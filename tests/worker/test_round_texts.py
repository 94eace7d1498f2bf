"""Texts on the device: the host sends what it has and the device has not, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from backend.config import EngineConfig
from backend.core.output import FinishedOutput, ModelRunnerOutput
from backend.sampling_params import SamplingParams
from backend.spec_decode.ngram import NgramProposer
from backend.spec_decode.proposer import DraftRequest
from backend.worker.round_tensors import RoundRows, num_round_numbers
from backend.worker.round_texts import RoundTexts, text_bytes
from backend.worker.step_tensors import HostBuffers
from kernels.reference.ngram_drafts import ngram_drafts

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
K, MAX_LEN = 3, 50


class Uploads(HostBuffers):
    """Counts the bytes that are asked for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.num_bytes: list[int] = []

    def next(self, num_bytes: int) -> Tensor:
        self.num_bytes.append(num_bytes)
        return super().next(num_bytes)


class Lab:
    """A proposer, the texts of four rows and of the padding's, and rounds of which the tokens are given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.proposer = NgramProposer(1, 3)
        self.texts = RoundTexts(self.proposer, ngram_drafts, (1, 3), (5, MAX_LEN), device)
        self.uploads = Uploads(device)

    def request(self, request_id: str, row: int, num_granted: int = K) -> DraftRequest:
        return DraftRequest(request_id, num_granted, SamplingParams(), 0, row, 1)

    def round(self, requests: Sequence[DraftRequest], *news: list[int], upload: bool = True) -> list[list[int]]:
        """What is drafted behind these tokens, of which the host is told as well; padding is in the last row."""
        if upload:
            self.texts.upload(requests, self.uploads)
        size = len(requests) + 1
        rows = RoundRows.of(torch.full((num_round_numbers(size, K),), 99, device=self.device), size, K)
        rows.rows.copy_(torch.tensor([*(request.row for request in requests), 4]))
        rows.num_granted.copy_(torch.tensor([*(request.max_tokens for request in requests), 0]))
        ids = [[*new, *[-1] * (K + 1 - len(new)), len(new) - 1, 1, *[0] * K] for new in (*news, [0])]
        self.texts.draft(torch.tensor(ids).to(self.device), rows)
        sampled = {request.request_id: new for request, new in zip(requests, news, strict=True)}
        pending = self.texts.follow(
            FinishedOutput(ModelRunnerOutput(sampled)), {request.request_id: request.row for request in requests}
        )
        assert pending.result().sampled_token_ids == sampled
        for request_id, new in sampled.items():
            self.proposer.extend(request_id, new)
        drafts = [
            draft[:count] for draft, count in zip(rows.drafts.tolist(), rows.counts.tolist(), strict=True) if count
        ]
        expected = self.proposer.propose(requests)
        tokens = zip(expected.token_ids.tolist(), expected.num_tokens, strict=True)
        assert drafts == [draft[:count] for draft, count in tokens if count]
        return drafts


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_the_host_sends_what_the_device_has_not_appended_itself(device: torch.device) -> None:
    """In one copy for all requests: four bytes a token and eight for its place, and sixteen a request."""
    lab = Lab(device)
    lab.proposer.begin("a", [1, 2, 3, 4, 1], 0)
    lab.proposer.begin("b", [7, 8], 0)
    both = [lab.request("b", 3), lab.request("a", 0, 2)]
    assert lab.round(both, [7], [2]) == [[8, 7, 8], [3, 4]]
    assert lab.uploads.num_bytes == [12 * 7 + 16 * 2]
    assert lab.round(both, [8, 7, 8, 9], [3, 4, 1]) == [[2, 3]]
    assert lab.round(both, [7], [2]) == [[8, 9, 7], [3, 4]]
    assert len(lab.uploads.num_bytes) == 1, "nothing is left to send"
    lab.proposer.extend("a", [9, 9])  # plain steps
    assert lab.round(both[1:], [9]) == [[9, 9]]
    assert lab.uploads.num_bytes[1:] == [12 * 2 + 16]
    assert lab.round(both, [7, 8], [1]) == [[9, 7, 7], [2, 9]]
    assert len(lab.uploads.num_bytes) == 2


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_who_comes_anew_begins_anew(device: torch.device) -> None:
    """Into the same row, by the same name, with the same tokens; or back into another row."""
    lab = Lab(device)
    for row in (1, 1, 2):
        lab.proposer.begin("a", [5, 6, 5], 0)
        assert lab.round([lab.request("a", row)], [6]) == [[5, 6, 5]]
        assert lab.round([lab.request("a", row)], [5, 6]) == [[5, 6, 5]]
        lab.proposer.forget("a")
    assert lab.uploads.num_bytes == [12 * 3 + 16] * 3


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_rounds_that_follow_each_other(device: torch.device) -> None:
    """Among plain steps, ends and arrivals, to the end of the longest text."""
    rng, lab = random.Random(1), Lab(device)
    rows: dict[str, int] = {}
    for number in range(60):
        if len(rows) < 4 and rng.random() < 0.5:
            row = rng.choice([row for row in range(4) if row not in rows.values()])
            rows[str(number)] = row
            lab.proposer.begin(str(number), [rng.randrange(3) for _ in range(rng.randint(1, 20))], 0)
        for key in list(rows):
            if len(lab.proposer.text(key)) > MAX_LEN - 2 * (K + 1):
                lab.proposer.forget(key)
                del rows[key]
            elif rng.random() < 0.2:
                lab.proposer.extend(key, [rng.randrange(3)])
        chosen = rng.sample(sorted(rows), rng.randint(0, len(rows)))
        if chosen:
            requests = [lab.request(key, rows[key], rng.randint(1, K)) for key in chosen]
            lab.round(requests, *([rng.randrange(3) for _ in range(rng.randint(1, K + 1))] for _ in chosen))
    assert 10 < len(lab.uploads.num_bytes) < 50


def test_a_request_without_a_token_has_none_appended() -> None:
    lab = Lab(torch.device("cpu"))
    for key, row in (("a", 0), ("b", 1)):
        lab.proposer.begin(key, [1, 2], 0)
        lab.texts.upload([lab.request(key, row)], lab.uploads)
    output = ModelRunnerOutput({"a": [3]}, {"b": "no usable logits"})
    assert lab.texts.follow(FinishedOutput(output), {"a": 0, "b": 1}).result() is output
    lab.proposer.extend("a", [3])
    lab.texts.upload([lab.request("a", 0), lab.request("b", 1)], lab.uploads)
    assert len(lab.uploads.num_bytes) == 2


def test_bytes_are_those_of_the_tensors() -> None:
    texts = Lab(torch.device("cpu")).texts
    tensors = [value for value in vars(texts).values() if isinstance(value, Tensor)]
    assert len(tensors) == 2
    sizes = {"scheduler.max_num_seqs": 4, "model.max_model_len": MAX_LEN, "scheduler.async_scheduling": True}
    config = EngineConfig().with_overrides(sizes | {"speculative.method": "ngram"})
    assert text_bytes(config) == sum(tensor.nbytes for tensor in tensors)
    for other in ({"speculative.method": "eagle"}, {"scheduler.async_scheduling": False}):
        assert text_bytes(config.with_overrides(other)) == 0
