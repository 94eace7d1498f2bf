"""LLVM's language from Python: vectors, loops, and functions compiled for the CPU at hand.

Compilers that vectorise loops by themselves miss these kernels for small reasons; here each vector instruction is said.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import binding, ir

from kernels.cpu.row_tiles import TILE

LANES = TILE  # an AVX-512 register of 32-bit numbers, or two of AVX2

FLOAT, HALF = ir.FloatType(), ir.HalfType()
INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
POINTER = ir.PointerType()

Value = Any  # an `ir.Value`: llvmlite says no types, and what is inferred of its methods is wrong


@cache
def has_avx512() -> bool:
    return bool(binding.get_host_cpu_features().get("avx512f", False))


def vector(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, LANES)


def number(value: int) -> ir.Constant:
    """An index."""
    return ir.Constant(INT64, value)


def constant(element: ir.Type, value: float) -> ir.Constant:
    """`value` in every lane."""
    return ir.Constant(vector(element), [ir.Constant(element, value)] * LANES)


class FunctionBuilder(ir.IRBuilder):
    """An `IRBuilder` at the start of a new function that returns nothing; its arguments are in `args`."""

    def __init__(self, module: ir.Module, name: str, argument_types: Sequence[ir.Type]) -> None:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), argument_types), name)
        super().__init__(function.append_basic_block())
        self.args = function.args

    def vector_function(self, name: str, values: Sequence[Value]) -> Value:
        """LLVM's own function of float vectors, such as `fma`."""
        full = f"llvm.{name}.v{LANES}f32"
        known = self.module.globals.get(full)
        lanes = vector(FLOAT)
        return self.call(known or ir.Function(self.module, ir.FunctionType(lanes, [lanes] * len(values)), full), values)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """`a * b + c`, rounded once."""
        return self.vector_function("fma", (a, b, c))

    def at(self, pointer: Value, index: Value, element: ir.Type) -> Value:
        return self.gep(pointer, [index], source_etype=element)

    def load_vector(self, pointer: Value, index: Value, element: ir.Type, size: int) -> Value:
        """LANES elements from `index` on; `size` is an element's bytes, to which alone they are aligned."""
        return self.load(self.at(pointer, index, element), align=size, typ=vector(element))

    def store_vector(self, value: Value, pointer: Value, index: Value, element: ir.Type, size: int) -> None:
        self.store(value, self.at(pointer, index, element), align=size)

    def load_splat(self, pointer: Value, index: Value, element: ir.Type) -> Value:
        """One element in every lane."""
        return self.splat(self.load(self.at(pointer, index, element), typ=element))

    def splat(self, value: Value) -> Value:
        nothing = ir.Constant(vector(value.type), ir.Undefined)
        first = self.insert_element(nothing, value, ir.Constant(INT32, 0))
        return self.shuffle_vector(first, nothing, constant(INT32, 0))

    def reduce(self, combine: Callable[[Value, Value], Value], value: Value) -> Value:
        """One element of all lanes, neighbours first."""
        parts = [self.extract_element(value, ir.Constant(INT32, lane)) for lane in range(LANES)]
        while len(parts) > 1:
            parts = [combine(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def larger(self, a: Value, b: Value) -> Value:
        return self.select(self.fcmp_ordered(">", a, b), a, b)


class CountedLoop:
    """`for index in range(start, stop, step)`, with values that each round makes anew.

    Code up to `close` is the loop's body, which reads the last round's `values`.
    """

    def __init__(
        self, build: FunctionBuilder, start: Value, stop: Value, values: Sequence[Value] = (), step: int = 1
    ) -> None:
        self._build, self._step = build, step
        before, function = build.block, build.function
        self._head, body, self._end = (function.append_basic_block() for _ in range(3))
        build.branch(self._head)
        build.position_at_end(self._head)
        self.index: Value = build.phi(INT64)
        self.values: list[Value] = [build.phi(value.type) for value in values]
        for phi, value in zip((self.index, *self.values), (start, *values), strict=True):
            phi.add_incoming(value, before)
        build.cbranch(build.icmp_signed("<", self.index, stop), body, self._end)
        build.position_at_end(body)

    def close(self, values: Sequence[Value] = ()) -> None:
        """End the body; afterwards `values` are the last ones, and `index` is the first that was not run."""
        build = self._build
        following = build.add(self.index, number(self._step))
        for phi, value in zip((self.index, *self.values), (following, *values), strict=True):
            phi.add_incoming(value, build.block)
        build.branch(self._head)
        build.position_at_end(self._end)


class CompiledModule:
    """Machine code of an `ir.Module`; its functions take pointers and int64s, and run without the interpreter's lock."""

    def __init__(self, module: ir.Module) -> None:
        parsed = binding.parse_assembly(str(module))
        machine = _target_machine()
        passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=2))
        passes.getModulePassManager().run(parsed, passes)
        self._engine = binding.create_mcjit_compiler(parsed, machine)
        self._engine.finalize_object()
        self._functions = {
            function.name: ctypes.CFUNCTYPE(
                None, *(ctypes.c_void_p if argument.type == POINTER else ctypes.c_int64 for argument in function.args)
            )(self._engine.get_function_address(function.name))
            for function in module.functions
            if not function.is_declaration and function.linkage != "internal"
        }

    def __getitem__(self, name: str) -> Callable[..., None]:
        return self._functions[name]


def _target_machine() -> binding.TargetMachine:
    _initialize()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3, jit=True
    )


@cache
def _initialize() -> None:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
