"""Triton's interpreter without most of its overhead."""

from __future__ import annotations

from typing import Any


def patch_language_once_a_launch() -> None:
    """Let a launch replace the functions of `triton.language` once, not at each call of a device function again.

    The interpreter goes through the whole module for every `tl.sum` and `tl.zeros`, and finds all of it replaced by the
    launch that they are part of: two thirds of the time of kernels as small as those of tests. Which names it replaces
    depends on the module that a function is from, and what is replaced stays so until the launch has ended.
    """
    from triton.runtime import interpreter

    if interpreter._patch_lang.__module__ == __name__:
        return
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
