"""What the host is told of a round whose drafts the device has looked up by itself."""

from __future__ import annotations

import pytest
import torch

from backend.core.output import ModelRunnerOutput
from backend.worker.round_download import RoundDownload, RoundTimes, num_round_bytes
from backend.worker.stage_clock import StageClock
from backend.worker.step_tensors import HostBuffers
from kernels.reference.verify_chain import verify_chain

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
VOCAB = 10


def result_of(
    drafts: list[list[int]], counts: list[int], best: list[list[int]], device: torch.device
) -> ModelRunnerOutput:
    """Of the first rows of a round; one more is padding.

    Args:
        best: the target's likeliest token of each position; NaN where it is below 0.
    """
    k = len(drafts[0])
    logits = torch.zeros(len(best), k + 1, VOCAB)
    for row, token_ids in enumerate(best):
        for position, token_id in enumerate(token_ids):
            logits[row, position] = torch.nan if token_id < 0 else torch.eye(VOCAB)[token_id]
    draft_token_ids, num_draft_tokens = torch.tensor([*drafts, [-1] * k]), torch.tensor([*counts, 0])
    padded = torch.cat((logits, logits[:1])).view(-1, VOCAB)
    packed, _ = verify_chain(padded.to(device), draft_token_ids.to(device), num_draft_tokens.to(device))
    shape, clock = (len(best) + 1, k), StageClock(device)
    clock.mark()
    buffer = HostBuffers(device).next(num_round_bytes(*shape))
    ids = [chr(ord("a") + row) for row in range(len(best))]
    return RoundDownload(ids, None, packed, shape, buffer, RoundTimes(clock), "no usable logits").result()


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_how_many_tokens_were_drafted_is_what_the_device_says(device: torch.device) -> None:
    """All that may be, fewer, and none."""
    drafts = [[4, 5, 6], [-1, -1, -1], [0, 1, -1], [7, 8, 9]]
    best = [[4, 5, 1, 2], [3, 3, 3, 3], [0, 1, 2, 3], [7, -1, 9, 9]]
    output = result_of(drafts, [3, 0, 2, 3], best, device)
    assert output.sampled_token_ids == {"a": [4, 5, 1], "b": [3], "c": [0, 1, 2]}
    assert output.errors == {"d": "no usable logits"}
    rounds = output.rounds
    assert rounds is not None
    assert rounds.request_ids == ["a", "c", "d"]
    assert rounds.num_draft_tokens == [3, 2, 3]
    assert rounds.num_accepted == [2, 2, 1]
    assert rounds.token_ids[:2] == [1, 2]
    assert rounds.draft_token_ids.tolist() == [drafts[0], drafts[2], drafts[3]]
    assert rounds.probs[2].tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_where_nothing_was_drafted_there_was_no_round(device: torch.device) -> None:
    output = result_of([[-1, -1]] * 2, [0, 0], [[3, 0, 0], [5, 0, 0]], device)
    assert output.sampled_token_ids == {"a": [3], "b": [5]}
    assert output.rounds is None


def test_a_result_outlives_the_buffer_it_came_in() -> None:
    """The next rounds come in the same memory."""
    drafts = torch.tensor([[4, 5], [6, 7]])
    packed, _ = verify_chain(torch.eye(VOCAB)[[4, 5, 1, 6, 2, 3]], drafts, torch.tensor([2, 2]))
    buffer, clock = torch.empty_like(packed), StageClock(packed.device)
    clock.mark()
    download = RoundDownload(["a", "b"], [2, 2], packed, (2, 2), buffer, RoundTimes(clock), "no usable logits")
    output = download.result()
    buffer.fill_(0)
    assert output.sampled_token_ids == {"a": [4, 5, 1], "b": [6, 2]}
    assert output.rounds is not None
    assert output.rounds.draft_token_ids.tolist() == drafts.tolist()
    assert output.rounds.probs[1].tolist() == [[1, 1], [1, 0]]
