"""Triton's interpreter without most of its overhead."""

from __future__ import annotations

from typing import Any


def hasten_interpreter() -> None:
    """Leave out of it what changes no result. Done once; to be called again where triton has been imported anew."""
    from triton.language import semantic
    from triton.runtime import interpreter

    if interpreter._patch_lang.__module__ == __name__:
        return
    _patch_language_once_a_launch(interpreter)
    _look_dtypes_up(interpreter)
    _check_overflow_only_for_asserts(semantic.TritonSemantic)


def _patch_language_once_a_launch(interpreter: Any) -> None:
    """Let a launch replace the functions of `triton.language` once, not at each call of a device function again.

    The interpreter goes through the whole module for every `tl.sum` and `tl.zeros`, and finds all of it replaced by the
    launch that they are part of: two thirds of the time of kernels as small as those of tests. Which names it replaces
    depends on the module that a function is from, and what is replaced stays so until the launch has ended.
    """
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched_for: set[str] = set()

    def patch_once(function: Any) -> Any:
        if function.__module__ in patched_for:
            return None  # a device function's call asks for nothing; a launch does, and is the first of its module
        patched_for.add(function.__module__)
        return patch(function)

    def launch_afresh(executor: Any, *arguments: Any, **options: Any) -> None:
        patched_for.clear()
        try:
            launch(executor, *arguments, **options)
        finally:
            patched_for.clear()

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_afresh


def _look_dtypes_up(interpreter: Any) -> None:
    """The interpreter builds a table of all dtypes whenever it asks for the one that numpy has for a type."""
    look_up, known = interpreter._get_np_dtype, dict[str, Any]()

    def look_up_once(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = look_up(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = look_up_once


def _check_overflow_only_for_asserts(semantic: Any) -> None:
    """Sums and products of integers are computed in 64 bits as well, for an assertion that is dropped unless one debugs."""
    check = semantic.binary_op_sanitize_overflow_impl

    def check_where_asserted(self: Any, *arguments: Any) -> None:
        if self.builder.options.debug:
            check(self, *arguments)

    semantic.binary_op_sanitize_overflow_impl = check_where_asserted
