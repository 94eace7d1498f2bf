"""Checks a kernel against its reference: `python -m kernels.check [OP ...]`, one JSON line per check on stdout.

Every tensor that a launcher allocates without a value is filled with poison first: NaN, then, in a second launch, another
value; integers and booleans get two different values. An element that the kernel does not write keeps its poison, which
agrees with the reference in one of the launches at most. The second launch also finds what a first one leaves behind.
Inputs must come out as the reference leaves them.

Without a CUDA device kernels run through Triton's interpreter: set TRITON_INTERPRET=1 before Python starts.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.kernel_op import KernelOp, Tolerance, cloned
from kernels.limits import dtype_name
from kernels.registry import REGISTRY

DEFAULT_SHAPE = "default"
_POISONS = 2
_UNVALUED = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """How far a kernel is from its reference, over all outputs and changed inputs. What does not exist is None."""

    op: str
    shape: str
    dtype: str
    interpreted: bool  # through Triton's interpreter, on the CPU
    passed: bool
    max_abs_error: float | None
    max_rel_error: float | None  # of the same element set, over the largest magnitude in the reference
    atol: float
    rtol: float
    problem: str | None  # why it did not pass


@dataclass(slots=True)
class _Errors:
    abs: float = 0.0
    rel: float = 0.0
    problem: str | None = None

    def fail(self, problem: str) -> None:
        self.problem = self.problem or problem


class Poisoned(TorchDispatchMode):
    """Within, tensors allocated without a value are filled with poison number `number`, 0 or 1."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in _UNVALUED:
            result.fill_(_poison(result.dtype, self._number))
        return result


def check_op(
    op: KernelOp,
    dtype: torch.dtype,
    device: torch.device,
    shape: str = DEFAULT_SHAPE,
    sizes: Mapping[str, Any] | None = None,
) -> KernelCheck:
    """Launch `op` twice over poisoned memory and compare with its reference. What raises is a check that fails."""
    tolerance, errors = op.tolerances[dtype], _Errors()
    try:
        inputs = op.make_inputs(dtype, device, **(sizes or {}))
        expected = cloned(inputs)
        reference = op.reference(**expected)
        for number in range(_POISONS):
            changed = cloned(inputs)
            with Poisoned(number):
                outputs = op.launch(**changed)
            _compare(errors, "output", op.comparable(outputs), op.comparable(reference), tolerance)
            for name, tensor in changed.items():
                exact = Tolerance(0.0, 0.0) if name not in op.mutates else tolerance
                _compare(errors, name, tensor, expected[name], exact)
    except Exception as error:
        errors.fail(f"{type(error).__name__}: {error}")
        errors.abs = errors.rel = float("nan")
    return KernelCheck(
        op=op.name,
        shape=shape,
        dtype=dtype_name(dtype),
        interpreted=device.type == "cpu",
        passed=errors.problem is None,
        max_abs_error=_finite(errors.abs),
        max_rel_error=_finite(errors.rel),
        atol=tolerance.atol,
        rtol=tolerance.rtol,
        problem=errors.problem,
    )


def check_shapes(op: KernelOp, dtype: torch.dtype, device: torch.device) -> Iterator[KernelCheck]:
    """The small default inputs; on a GPU every shape that is timed as well."""
    yield check_op(op, dtype, device)
    if device.type == "cuda":
        for shape, sizes in op.shapes.items():
            yield check_op(op, dtype, device, shape, sizes)


def _compare(errors: _Errors, name: str, actual: Any, expected: Any, tolerance: Tolerance) -> None:
    """Fold the differences of one output, or of a tuple of them, into `errors`."""
    if isinstance(expected, tuple | list):
        if not isinstance(actual, tuple | list) or len(actual) != len(expected):
            errors.fail(f"{name} is not a tuple of {len(expected)}")
            return
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            _compare(errors, f"{name}[{index}]", *pair, tolerance)
    elif isinstance(expected, Tensor):
        _compare_tensor(errors, name, actual, expected, tolerance)
    elif actual != expected:
        errors.fail(f"{name} is {actual!r} and not {expected!r}")


def _compare_tensor(errors: _Errors, name: str, actual: Any, expected: Tensor, tolerance: Tolerance) -> None:
    if not isinstance(actual, Tensor) or actual.shape != expected.shape or actual.dtype != expected.dtype:
        found = f"{_described(actual)}" if isinstance(actual, Tensor) else type(actual).__name__
        errors.fail(f"{name} is {found} and not {_described(expected)}")
        return
    if expected.numel() == 0:
        return
    wide, wanted = actual.double(), expected.double()
    both = (wide == wanted) | (wide.isnan() & wanted.isnan())
    difference = torch.where(both, 0.0, (wide - wanted).abs())
    unknown = int(difference.isnan().sum())
    if unknown:
        errors.fail(
            f"{unknown:,} of {expected.numel():,} elements of {name} are not written, or NaN for another reason"
        )
        difference = difference.nan_to_num(0.0)
    largest = float(difference.max())
    errors.abs = max(errors.abs, largest)
    scale = float(wanted.abs().nan_to_num(0.0, 0.0, 0.0).max())
    errors.rel = max(errors.rel, largest / scale if scale else (0.0 if largest == 0 else float("inf")))
    outside = int((difference > tolerance.atol + tolerance.rtol * wanted.abs()).sum())
    if outside:
        errors.fail(f"{outside:,} of {expected.numel():,} elements of {name} are outside the tolerance")


def _poison(dtype: torch.dtype, number: int) -> float | int | bool:
    if dtype == torch.bool:
        return number == 0
    if dtype.is_floating_point:
        return float("nan") if number == 0 else 239.0
    return torch.iinfo(dtype).max - 7 * number


def _described(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def _finite(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.check", description="Check kernels against references.")
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"of {', '.join(REGISTRY)}; default: all")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    options = parser.parse_args(arguments)
    if unknown := set(options.ops) - set(REGISTRY):
        parser.error(f"unknown op {', '.join(sorted(unknown))}; known are {', '.join(REGISTRY)}")
    has_cuda = torch.cuda.is_available()
    if not has_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("torch finds no CUDA device; set TRITON_INTERPRET=1 to check through Triton's interpreter")
    dtype = getattr(torch, options.dtype)
    for name in options.ops or REGISTRY:
        if dtype in REGISTRY[name].tolerances:
            for check in check_shapes(REGISTRY[name], dtype, torch.device("cuda" if has_cuda else "cpu")):
                print(json.dumps(asdict(check)), flush=True)


if __name__ == "__main__":
    main()
