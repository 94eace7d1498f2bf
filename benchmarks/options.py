"""Values of options as they are typed, for `argparse`."""

from __future__ import annotations


def numbers(text: str) -> list[int]:
    """Of `1,8,32`."""
    return [int(number) for number in text.split(",")]


def sizes(text: str) -> list[list[int]]:
    """Of `1x2048,16x1024`: requests and tokens of each."""
    return [[int(number) for number in size.split("x")] for size in text.split(",")]
