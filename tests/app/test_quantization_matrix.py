"""The matrix of variants: what it says of figures that there are not."""

from __future__ import annotations

import re

from app.components.quantization_matrix import matrix_html
from tests.app.quantization_runs import emulated, reference, result


def test_a_variant_without_a_peak_of_memory_has_its_weights_and_the_column_says_why() -> None:
    variants = result("int8", peak_memory_bytes=2**30), emulated("nf4", peak_memory_bytes=None)
    source = matrix_html([row | {"part": None, "problem": None} for row in variants])
    (explained,) = re.findall(r'<th scope="col" title="([^"]*)">Peak memory<', source)
    assert "emulated has none" in explained
    line = source[source.index('data-variant="nf4"') :]
    assert "60.0 MiB" in line
    assert re.search(r'title="[^"]*as its products are emulated"><span>–<', line)


def test_what_is_worse_than_the_reference_is_no_best() -> None:
    """The best of the variants is marked where it reaches the reference, whichever way is better, or where that has no value."""
    variants = (
        reference(decode_1_tok_s=20.0, decode_32_tok_s=300.0, prefill_tok_s=400.0, perplexity=20.0),
        result("int8", decode_1_tok_s=18.0, decode_32_tok_s=300.0, prefill_tok_s=500.0, perplexity=20.5, kl_mean=0.003),
        result("fp8", decode_1_tok_s=15.0, decode_32_tok_s=290.0, prefill_tok_s=450.0, perplexity=22.0, kl_mean=0.01),
    )
    rows = [row | {"part": None, "problem": None, "peak_memory_bytes": None} for row in variants]
    assert _marked(matrix_html(rows), "int8") == ["0.00300", "300", "500"]
    assert _marked(matrix_html(rows), "fp8") == []
    without_reference = _marked(matrix_html(rows[1:]), "int8")
    assert without_reference == ["20.50", "0.00300", "18.0", "300", "500"]


def _marked(source: str, variant: str) -> list[str]:
    """The figures of a variant that are marked as the best."""
    line = source[source.index(f'data-variant="{variant}"') :].partition("</tr>")[0]
    return re.findall(r'<td class="best"[^>]*>([^<]*)', line)
