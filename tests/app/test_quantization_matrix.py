"""The matrix of variants: what it says of figures that there are not."""

from __future__ import annotations

import re

from app.components.quantization_matrix import matrix_html
from tests.app.quantization_runs import emulated, result


def test_a_variant_without_a_peak_of_memory_has_its_weights_and_the_column_says_why() -> None:
    variants = result("int8", peak_memory_bytes=2**30), emulated("nf4", peak_memory_bytes=None)
    source = matrix_html([row | {"part": None, "problem": None} for row in variants])
    (explained,) = re.findall(r'<th scope="col" title="([^"]*)">Peak memory<', source)
    assert "emulated has none" in explained
    line = source[source.index('data-variant="nf4"') :]
    assert "60.0 MiB" in line
    assert re.search(r'title="[^"]*as its products are emulated"><span>–<', line)
