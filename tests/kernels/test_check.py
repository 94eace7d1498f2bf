"""The check itself: it must fail what is wrong, whatever way it is wrong. The kernels here are plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import check
from kernels.check import KernelCheck, check_op
from kernels.kernel_op import Tolerance
from kernels.registry import REGISTRY

CPU = torch.device("cpu")


def checked(
    launch: Callable[..., Any],
    reference: Callable[..., Any] = lambda x: x * 2,
    *,
    dtype: torch.dtype = torch.float32,
    tolerance: Tolerance = Tolerance(1e-6, 1e-5),
    mutates: frozenset[str] = frozenset(),
    comparable: Callable[[Any], Any] = lambda output: output,
) -> KernelCheck:
    op: Any = SimpleNamespace(
        name="double",
        launch=launch,
        reference=reference,
        make_inputs=lambda dtype, device, seed=0: {"x": torch.arange(1, 7, device=device).to(dtype)},
        tolerances={dtype: tolerance},
        mutates=mutates,
        comparable=comparable,
    )
    return check_op(op, dtype, CPU)


def written(x: Tensor, value: Tensor, rows: int) -> Tensor:
    """A launcher's way: allocate, then fill what the kernel writes."""
    output = torch.empty_like(x)
    output[:rows] = value[:rows]
    return output


def test_a_right_kernel_passes() -> None:
    result = checked(lambda x: written(x, x * 2, 6))
    assert (result.passed, result.max_abs_error, result.max_rel_error, result.problem) == (True, 0.0, 0.0, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool])
def test_an_element_that_is_not_written_is_found_whatever_its_dtype(dtype: torch.dtype) -> None:
    """Even where the memory happens to hold the right value: it is filled with one that is wrong in one launch at least."""
    result = checked(lambda x: written(x, x.clone(), 5), lambda x: x.clone(), dtype=dtype)
    assert not result.passed
    assert result.problem is not None
    assert result.problem.startswith("1 of 6 elements of output")


@pytest.mark.parametrize(
    "allocate",
    [
        lambda x: torch.empty(6),
        lambda x: torch.empty_like(x),
        lambda x: x.new_empty(6),
        lambda x: torch.empty_strided((6,), (1,)),
        lambda x: x.new_empty_strided((6,), (1,)),
    ],
)
def test_every_way_of_allocating_is_poisoned(allocate: Callable[[Tensor], Tensor]) -> None:
    result = checked(allocate)
    assert result.problem == "6 of 6 elements of output are not written, or NaN for another reason"


def test_zeros_that_a_launcher_asks_for_stay() -> None:
    assert checked(lambda x: torch.zeros_like(x).add_(x, alpha=2)).passed


def test_a_difference_is_held_against_the_tolerance() -> None:
    off = checked(lambda x: x * 2 + torch.tensor([0, 0, 0, 0, 0, 0.12]), tolerance=Tolerance(0.1, 0.0))
    assert (off.passed, off.problem) == (False, "1 of 6 elements of output are outside the tolerance")
    assert off.max_abs_error == pytest.approx(0.12, rel=1e-5)
    assert off.max_rel_error == pytest.approx(0.01, rel=1e-5)
    assert checked(lambda x: x * 2 + 0.12, tolerance=Tolerance(0.1, 0.01)).passed


def test_what_only_a_second_launch_gets_wrong_is_found() -> None:
    calls: list[int] = []

    def launch(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 2 + (len(calls) - 1)

    assert not checked(launch).passed


def test_an_input_that_may_not_change_is_compared() -> None:
    result = checked(lambda x: x.mul_(2))
    assert (result.passed, result.problem) == (False, "6 of 6 elements of x are outside the tolerance")
    assert checked(lambda x: x.mul_(2), lambda x: x.mul_(2), mutates=frozenset({"x"})).passed


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (lambda x: None, "output is NoneType and not float32 [6]"),
        (lambda x: x[:3] * 2, "output is float32 [3] and not float32 [6]"),
        (lambda x: (x * 2).double(), "output is float64 [6] and not float32 [6]"),
    ],
)
def test_an_output_of_another_kind_is_named(output: Callable[[Tensor], Any], problem: str) -> None:
    assert checked(output).problem == problem


def test_tuples_are_compared_item_by_item() -> None:
    result = checked(lambda x: (x, x + 1), lambda x: (x.clone(), x.clone()))
    assert result.problem == "6 of 6 elements of output[1] are outside the tolerance"


def test_outputs_of_another_layout_are_compared_as_the_op_says() -> None:
    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def whole(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 0

    assert not checked(halves, whole).passed
    assert checked(halves, whole, comparable=lambda output: output[0] + output[1]).passed


def test_what_raises_is_a_check_that_fails() -> None:
    def launch(x: Tensor) -> Tensor:
        raise ValueError("x has 1 dimension")

    result = checked(launch)
    assert (result.passed, result.max_abs_error, result.problem) == (False, None, "ValueError: x has 1 dimension")


def test_infinities_that_agree_are_no_difference() -> None:
    assert checked(lambda x: x / 0, lambda x: x / 0).max_abs_error == 0.0


def test_the_module_prints_a_line_for_each_op(capsys: pytest.CaptureFixture[str]) -> None:
    check.main(["rms_norm", "store_kv_cache"])
    first, *rest = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first["passed"]
    assert {row["op"] for row in (first, *rest)} == {"rms_norm", "store_kv_cache"}


@pytest.mark.gpu
@pytest.mark.parametrize("op", REGISTRY.values(), ids=REGISTRY)
def test_every_kernel_passes_on_every_shape(op: Any) -> None:
    for result in check.check_shapes(op, torch.bfloat16, torch.device("cuda")):
        assert result.passed, result
