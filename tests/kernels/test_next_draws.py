from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from backend.sample.random import Purpose, uniform
from kernels.registry import REGISTRY
from tests.kernels.oracle import GuardBands

OP = REGISTRY["next_draws"]
IMPLEMENTATIONS = ["reference", "launch"]


def call(which: str, inputs: dict[str, Any]) -> Tensor:
    return getattr(OP, which)(**inputs)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_each_row_draws_as_the_host_does_and_moves_on(which: str, device: torch.device) -> None:
    """Seeds of up to 64 bits and positions of more than 32, to the bit; the second draw is that of the next position."""
    seeds = [0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1] + [7 * 10**17 + 10**9 * row for row in range(150)]
    positions = [0, 2**32 - 1, 2**33 + 5, 1, 4095, 3] + [row % 40 for row in range(150)]
    inputs = {
        "seeds": torch.from_numpy(np.array(seeds, dtype=np.uint64).view(np.int64)).to(device),
        "positions": torch.tensor(positions, device=device),
    }
    before = inputs["seeds"].clone()
    bands = GuardBands(value=77)
    inputs["positions"] = bands.wrap(inputs["positions"])
    for further in range(2):
        draws = call(which, inputs)
        assert draws.dtype == torch.float64
        wanted = uniform(seeds, [position + further for position in positions], Purpose.TOKEN)
        assert draws.tolist() == wanted.tolist()
    assert inputs["positions"].tolist() == [position + 2 for position in positions]
    assert torch.equal(inputs["seeds"], before)
    bands.assert_untouched()


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_of_no_rows(which: str, device: torch.device) -> None:
    draws = call(which, OP.make_inputs(torch.float32, device, num_rows=0))
    assert (draws.shape, draws.dtype) == ((0,), torch.float64)


def test_kernel_writes_nothing_but_its_output(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = OP.make_inputs(torch.float32, device, num_rows=130)
    expected = OP.reference(**{name: value.clone() for name, value in inputs.items()})
    bands = GuardBands(value=77)
    monkeypatch.setattr(torch, "empty", bands.empty)
    draws = call("launch", inputs)
    monkeypatch.undo()
    bands.assert_untouched()
    assert isinstance(expected, Tensor)
    assert torch.equal(draws, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": torch.zeros(2).int()}, "seeds is int32; expected int64"),
        ({"positions": torch.zeros(3).long()}, r"positions has shape \[3\]; expected \[2\]"),
        ({"positions": torch.zeros(4).long()[::2]}, "positions has stride 2"),
        ({"positions": torch.zeros(2, device="meta").long()}, "positions is on meta; expected cpu"),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    inputs = {"seeds": torch.zeros(2).long(), "positions": torch.zeros(2).long()}
    with pytest.raises(ValueError, match=message):
        OP.launch(**(inputs | change))
