"""`KernelOp`: a launcher and its reference, inputs to try them on, and what the op must move and do."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]
Output = Tensor | tuple[Any, ...] | None


def cloned(inputs: Inputs) -> Inputs:
    """The same inputs over memory of their own; a tuple's tensors too."""
    return {name: _cloned(value) for name, value in inputs.items()}


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_cloned, value))
    return value


@dataclass(frozen=True, slots=True)
class Tolerance:
    """`|launch - reference| <= atol + rtol * |reference|`, element by element."""

    atol: float
    rtol: float


@dataclass(frozen=True, slots=True)
class KernelOp:
    """One op: `launch(**inputs)` and `reference(**inputs)` agree within `tolerances[dtype]`."""

    name: str
    reference: Callable[..., Output]
    # (dtype, device, seed=0, **sizes) -> inputs; every size has a small default.
    make_inputs: Callable[..., Inputs]
    tolerances: Mapping[torch.dtype, Tolerance]
    # inputs -> bytes that have to cross the device's memory bus once, whatever the implementation.
    bytes_moved: Callable[[Inputs], int]
    # inputs -> floating-point operations of the formula, a multiply-add being two.
    flops: Callable[[Inputs], int]
    # What to time it on: a name that says the sizes, and the sizes for `make_inputs`.
    shapes: Mapping[str, Mapping[str, Any]]
    # Inputs that a call changes.
    mutates: frozenset[str] = frozenset()
    # Whether the matrix unit multiplies 8-bit floats or integers, which it does faster than the model's dtype.
    has_byte_codes: bool = False
    # Whether a launch by the op's own arguments waits for the device, which a CUDA graph cannot hold.
    waits: bool = False
    # An output as it is compared: where implementations may lay out the same values differently, this makes them equal.
    comparable: Callable[[Any], Any] = lambda output: output

    @property
    def launch(self) -> Callable[..., Output]:
        """The Triton launcher, imported when asked for: a CPU-only machine need not have triton."""
        return getattr(importlib.import_module(f"kernels.ops.{self.name}"), self.name)
