"""What weights in fewer bits cost a model in quality: perplexity and divergence on a text, of every method, beside float32.

    python -m benchmarks.quantized_quality --text TEST --calibration VALID [--max-tokens N] [--device cuda] [-o FILE]

Both are UTF-8 texts, for example of WikiText-2: gptq and awq are calibrated on one and all are scored on the other, as
`servelab quality` does, in windows of 1,024 tokens without overlap. Weights are read in float32, and what a method leaves as
it is stays so. int4, gptq and awq choose codes on the same grids with integer zero points, so that they take the same bytes.

At the end stands whether the methods do what they are for: gptq and awq have a lower perplexity than rounding to nearest at
the same size, int8 and fp8 lie within 0.5 % of float32. Exit code 1 where one of these does not hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from backend.compat import configure_cpu_environment
from backend.config import DEFAULT_MODEL, EngineConfig, default_cpu_threads
from backend.experiments.quality import RememberedModel, measure_quality
from backend.experiments.quantization_config import REFERENCE, Variant, parse_variant
from backend.experiments.quantization_figures import figures, storage
from backend.experiments.text_pass import TextModel, load_text_model
from backend.metrics.environment import environment
from backend.models.sources import ModelSource, ensure_model
from backend.quantization.calibration import cut_windows
from backend.quantization.quantize_model import grid_settings, quantize_model
from backend.quantization.work_folder import WorkFolder
from backend.tokenizer import load_tokenizer
from benchmarks.quality_table import text_table

FEW_BITS = ("int8", "w8a8_int8", "llm_int8", "fp8", "nf4")
ON_GRIDS = ("int4", "gptq", "awq")
NEAR = 0.005  # of the reference's perplexity
WINDOW = 1024

Row = dict[str, Any]


def grids(group_size: int) -> tuple[str, ...]:
    """Options of the grids that int4, gptq and awq are compared on."""
    return tuple(
        f"{bits}zero_point=integer"
        for bits in (f"group_size={group_size},", "group_size=-1,", f"bits=3,group_size={group_size},")
    )


def variants(group_size: int) -> list[str]:
    return [*FEW_BITS, *(f"{method}:{grid}" for grid in grids(group_size) for method in ON_GRIDS)]


def requirements(rows: Sequence[Row], group_size: int) -> list[Row]:
    """What has to hold of the results; a variant without a figure holds nothing."""
    by_variant = {row["variant"]: row for row in rows if "perplexity" in row}
    found = []
    for grid in grids(group_size):
        plain = by_variant.get(f"int4:{grid}")
        for method in ON_GRIDS[1:]:
            row = by_variant.get(f"{method}:{grid}")
            holds = (
                row is not None
                and plain is not None
                and row["bits_per_weight"] == plain["bits_per_weight"]
                and row["perplexity"] < plain["perplexity"]
            )
            name = parse_variant(f"{method}:{grid}").name
            found.append({"what": f"{name} below rounding to nearest at the same size", "holds": holds})
    reference = by_variant.get(REFERENCE)
    for method in ("int8", "fp8"):
        row = by_variant.get(method)
        holds = (
            row is not None and reference is not None and abs(row["perplexity"] / reference["perplexity"] - 1) <= NEAR
        )
        found.append({"what": f"{method} within {NEAR:.1%} of float32", "holds": holds})
    return found


class Benchmark:
    """One model, loaded in float32 as the reference, and the texts in its tokens."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        self._options = options
        self._settings = {"model.name": options.model, "model.device": options.device, "model.dtype": "float32"}
        self._source = ensure_model(options.model, lambda *progress: None)
        tokenizer = load_tokenizer(self._source)
        self._token_ids = tokenizer.encode(options.text.read_text(encoding="utf-8"))[: options.max_tokens]
        calibration = tokenizer.encode(options.calibration.read_text(encoding="utf-8"))
        self._windows = cut_windows(calibration, options.windows, options.window_length, 0)
        self._reference = RememberedModel.of(self._load(self._source, {}))
        self._device = torch.device(self._reference.device)

    def run(self, texts: Sequence[str]) -> list[Row]:
        """Of the reference and each variant; one that fails says why."""
        rows = [self._row(REFERENCE, lambda: (self._reference, {}))]
        for text in texts:
            variant = parse_variant(text)
            rows.append(self._row(text, lambda variant=variant: self._quantized(variant)))
            gc.collect()  # a model of thousands of modules is a cycle, and the next one needs the room
        return rows

    def _row(self, text: str, prepare: Any) -> Row:
        started = time.perf_counter()
        row: Row = {"variant": text}
        try:
            model, found = prepare()
            prepared = time.perf_counter()
            reference = None if text == REFERENCE else self._reference
            window = min(WINDOW, model.loaded.config.max_position_embeddings)
            quality = measure_quality(model, self._token_ids, reference=reference, window=window, stride=window)
            row |= found | storage(model) | figures(quality)
            row |= {"prepare_s": prepared - started, "measure_s": time.perf_counter() - prepared}
        except Exception as error:
            traceback.print_exc()
            row["problem"] = f"{type(error).__name__}: {error}"
        what = f"perplexity {row['perplexity']:.4f}" if "perplexity" in row else row["problem"]
        print(f"{text}: {what}, {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
        return row

    def _quantized(self, variant: Variant) -> tuple[TextModel, Row]:
        if not variant.is_calibrated:
            model = self._load(self._source, {"quantization": variant.quantization.to_dict()})
            return model, {"settings": model.loaded.quantization.to_dict()}
        grid = variant.quantization
        assert variant.method in ("gptq", "awq")
        settings = grid_settings(variant.method, bits=grid.bits, group_size=grid.group_size, zero_point=grid.zero_point)
        with tempfile.TemporaryDirectory() as folder:
            work = WorkFolder(Path(folder) / variant.method, force=False)
            result = quantize_model(self._source, variant.method, settings, self._windows, work, device=self._device)
            model = self._load(ModelSource(variant.name, "folder", path=result.output), {})
        return model, {"settings": settings.to_dict() | {"method": variant.method}}

    def _load(self, source: ModelSource, changes: Mapping[str, Any]) -> TextModel:
        return load_text_model(source, EngineConfig().with_overrides({**self._settings, **changes}))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole document."""
    benchmark = Benchmark(options)
    rows = benchmark.run(options.variant or variants(options.group_size))
    machine = environment(options.threads)
    on_cuda = options.device != "cpu" and machine["gpu"] is not None
    return {
        "benchmark": "quantized_quality",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": options.commit or machine["commit"],
        "card": machine["gpu"] if on_cuda else None,
        "model": options.model,
        "text": options.text.name,
        "calibration": options.calibration.name,
        "options": {
            name: getattr(options, name) for name in ("max_tokens", "windows", "window_length", "group_size", "threads")
        },
        "environment": machine,
        "results": rows,
        "requirements": requirements(rows, options.group_size),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantized_quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--text", type=Path, required=True, help="what is scored")
    parser.add_argument("--calibration", type=Path, required=True, help="what gptq and awq are calibrated on")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument(
        "--variant", action="append", metavar="METHOD[:OPTION=VALUE,...]", help="repeatable; default: all"
    )
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, help="of the text; default: all")
    parser.add_argument("--windows", type=int, default=128, help="of the calibration text")
    parser.add_argument("--window-length", type=int, default=512, help="in tokens")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--threads", type=int, default=default_cpu_threads(), help="for CPU math")
    parser.add_argument("--commit", help="to state where this is no checkout")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)

    configure_cpu_environment()
    import torch

    torch.set_num_threads(options.threads)
    result = run(options)
    print(text_table(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if not all(each["holds"] for each in result["requirements"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
