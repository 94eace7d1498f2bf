"""Reads a line of arithmetic as a person would, so that tests hold it to the number it stands beside."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
# Words with a number in them that is no factor, and asides in brackets.
_NO_FACTOR = re.compile(
    r"of window [\d,]+|of [\d,]+ tokens|\([\d.,\-]+ GiB\)|\([\d.]+%[^)]*\)|\([^()\d]*\)|[A-Za-z'][\w']*"
)


def evaluate(line: str) -> list[float]:
    """The value of each side of a line's equation; a bracketed equation within it counts as its own last side."""
    while match := re.search(r"\[([^\[\]]*)\]", line):
        inner = evaluate(match[1])
        assert len(set(inner)) == 1, match[1]
        line = line.replace(match[0], repr(inner[-1]))
    plain = _NO_FACTOR.sub("", line).replace(",", "").replace("×", "*").replace("−", "-").replace("- -", "+ ")
    return [_value(ast.parse(side.strip(), mode="eval").body) for side in plain.split("=")]


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    assert isinstance(node, ast.Constant), ast.dump(node)
    return node.value
