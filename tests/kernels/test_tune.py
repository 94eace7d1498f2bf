"""What tuning picks, with times made up, and that every call it would time computes the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.tuning import Shape

CPU = torch.device("cpu")
SHAPES = [
    Shape("norm_linear", 96, 64),
    Shape("norm_gated_linear", 96, 64),
    Shape("norm_qkv_rotary_store", 192, 64),
]


def inputs_of(shape: Shape, num_tokens: int) -> dict[str, Any]:
    """In fp32: the interpreter multiplies bfloat16 matrices wrongly."""
    from kernels.tune import _inputs

    inputs = _inputs(shape, num_tokens, CPU)
    return {
        name: value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value
        for name, value in inputs.items()
    }


def first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.op)
def test_what_is_timed_against_each_other_computes_the_same(shape: Shape, num_tokens: int) -> None:
    from kernels.tune import _fused_call, _library_call, candidates

    inputs = inputs_of(shape, num_tokens)
    expected = first(_library_call(shape)(**inputs)).flatten(1)
    tried = candidates(shape, num_tokens)[4::5]
    assert {tiles.block_m for tiles in tried} == ({1, 8, 16} if num_tokens == 1 else {8, 16})
    for tiles in tried:
        output = first(_fused_call(shape, tiles)(**inputs)).flatten(1)
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)


def test_the_fastest_wins_and_what_does_not_run_is_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    from kernels.tune import candidates, choose

    tried: list[int] = []

    def timer(call: Callable[..., Any], inputs: Any) -> float:
        tried.append(len(tried))
        if len(tried) == 3:
            raise RuntimeError("out of resource: shared memory")
        return [5.0, 4.0, 0.0, 2.0, 3.0][len(tried) - 1] if len(tried) <= 5 else 9.0

    choice = choose(SHAPES[0], 8, {}, timer)
    assert len(tried) == 1 + len(candidates(SHAPES[0], 8))
    assert choice.tiles == candidates(SHAPES[0], 8)[2]
    assert (choice.seconds, choice.library_seconds) == (2.0, 5.0)
    assert "does not run: RuntimeError" in capsys.readouterr().err


def test_the_library_stays_where_nothing_is_faster() -> None:
    from kernels.tune import choose

    choice = choose(SHAPES[1], 8, {}, lambda call, inputs: 1.0)
    assert choice.tiles is None
    assert choice.to_json()["tiles"] is None


def test_rows_that_were_not_measured_again_are_kept(tmp_path: Path) -> None:
    from kernels.ops.projection import Tiles
    from kernels.tune import Choice, merge

    path = tmp_path / "card.json"
    old = [Choice(SHAPES[0], 8, None, 1.0, 1.0), Choice(SHAPES[0], 16, None, 1.0, 1.0)]
    rows = merge(path, old)
    assert rows == [choice.to_json() for choice in old]
    path.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    better = Choice(SHAPES[0], 16, Tiles(16, 64, 128, 4, 5), 0.5, 1.0)
    other = Choice(SHAPES[1], 16, None, 1.0, 1.0)
    assert merge(path, [better, other]) == [old[0].to_json(), better.to_json(), other.to_json()]


def test_a_card_is_needed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels import tune

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        tune.main([])
    assert "tiles are measured on the card they are for" in capsys.readouterr().err
