"""`servelab quantize`: a model's checkpoint in fewer bits, as a folder that is a model like any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from app import terminal
from app.cli_models import progress
from app.cli_options import JsonOption
from backend.errors import ConfigError, ServeLabError

if TYPE_CHECKING:
    from backend.quantization.quantize_model import Quantized

# The library makes places for zero points that are not packed, though it packs them as it saves.
_TRANSFORMERS_NOTE = (
    "transformers (with compressed-tensors 0.20) loads it with quantization_config=CompressedTensorsConfig(dequantize=True), "
    "as it does any such folder with zero points; one of --zero-point none needs no option"
)

_HEAD_NOTE = (
    "transformers (5.24, with compressed-tensors 0.20) does not load it: where there are zero points, it takes one scheme for "
    "all of a model. One of --zero-point none loads, its head too"
)


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A pulled model, or a Hugging Face folder.")],
    method: Annotated[
        Literal["int8", "int4", "gptq", "awq", "w8a8_int8", "fp8"],
        typer.Option(
            help="int8, int4: rounded to nearest. gptq, awq: on the grids of int4, chosen for the calibration text. "
            "w8a8_int8, fp8: activations too, as the model runs. No format holds nf4 and llm_int8: a model gets "
            "them as it is loaded."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="The folder to make. This, or --name.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Of the model to make, which is then known by it, as a pulled one is.")
    ] = None,
    bits: Annotated[int | None, typer.Option(help="Of a weight, 2 to 8; for int4, gptq and awq, 4 by default.")] = None,
    group_size: Annotated[
        int | None,
        typer.Option(help="Inputs that share a scale, or -1 for all; for int4, gptq and awq, 128 or less by default."),
    ] = None,
    zero_point: Annotated[
        Literal["none", "integer", "float"] | None,
        typer.Option(help="For int4, gptq and awq: none or integer, the default. float is not to be saved."),
    ] = None,
    granularity: Annotated[
        Literal["channel", "tensor"] | None,
        typer.Option(help="For fp8: a scale per output channel and per token, the default, or one for all."),
    ] = None,
    head: Annotated[
        Literal["int8"] | None, typer.Option(help="The output head in 8 bits too; it stays as it is by default.")
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Layers to leave as they are, as model.layers.0.* or *.down_proj. Repeatable."
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A text, or JSON lines with text or prompt, to calibrate and to measure errors on. One ships.",
        ),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, max=2**16, help="Pieces of the text to take.")] = 32,
    window_length: Annotated[int, typer.Option(min=1, max=2**20, help="Tokens of each.")] = 512,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of where in the text they lie.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace a model's folder that is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a model with its linear layers in fewer bits, in the compressed-tensors format.

    The embedding stays as it is. An interrupted run goes on where it stopped when it is started again.
    """
    if (output is None) == (name is None):
        raise ConfigError("quantize takes a folder to make, with --output, or a name for the model, with --name")
    if name is not None and force:
        raise ConfigError(
            f"--force goes with --output; a model is removed by its name, with: servelab models remove {name}"
        )
    with terminal.results() as out:
        from backend.compat import configure_cpu_environment

        configure_cpu_environment()
        import torch

        from backend.metrics.stats import Phase
        from backend.models.sources import ensure_model
        from backend.quantization.calibration import DEFAULT_TEXT, cut_windows, read_texts
        from backend.quantization.quantize_model import CALIBRATED, grid_settings, quantize_model
        from backend.quantization.work_folder import WorkFolder, named_work_folder
        from backend.tokenizer import load_tokenizer

        if output is None:
            work = named_work_folder(name or "", model, method)
        else:
            work = WorkFolder(output, force=force)
        settings = grid_settings(
            method,
            bits=bits,
            group_size=group_size,
            zero_point=zero_point,
            granularity=granularity,
            head=head,
            skip=skip or (),
        )
        with terminal.Status() as status:
            source = ensure_model(model, progress(status))
            tokenizer = load_tokenizer(source)
            calibrates = method in CALIBRATED  # others only measure their errors on it
            status.show(
                "reading the calibration text" if calibrates else "reading the text that errors are measured on"
            )
            token_ids = [id for text in read_texts(calibration or DEFAULT_TEXT) for id in tokenizer.encode(text)]
            try:
                result = quantize_model(
                    source,
                    method,
                    settings,
                    cut_windows(token_ids, windows, window_length, seed),
                    work,
                    device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
                    on_progress=lambda done, total: status.show_phase(Phase("quantizing", done, total, "layers")),
                )
            except (KeyboardInterrupt, SystemExit, ServeLabError) as end:  # by SIGINT, by SIGTERM
                interrupted, done = not isinstance(end, ServeLabError), len(work.finished)
                how = "interrupted" if interrupted else "failed"
                if done:
                    terminal.note(f"{how}; {done} layers are in {work.path}, and the same command goes on behind them")
                elif interrupted:
                    terminal.note("interrupted; no layer is finished")
                if isinstance(end, KeyboardInterrupt):
                    raise typer.Exit(130) from None
                raise
        kinds = _by_kind(result.modules)
        if as_json:
            document = {
                "model": model,
                "output": str(result.output),
                "name": name,
                "method": method,
                "scheme": asdict(result.scheme),
                "head": None if result.head is None else asdict(result.head),
                "resumed_layers": result.resumed_layers,
                "skipped": list(result.skipped),
                "modules": [asdict(module) for module in result.modules],
            }
            terminal.write_document(out, document)
        else:
            rows = [
                (
                    name,
                    f"{len(modules)}",
                    f"{fmean(module.bits_per_weight for module in modules):.2f}",
                    f"{fmean(module.relative_error for module in modules):.4f}",
                    f"{max(module.relative_error for module in modules):.4f}",
                )
                for name, modules in kinds.items()
            ]
            headers = ("Linear layer", "Number", "Bits per weight", "Relative output error, mean", "largest")
            terminal.print_table(headers, rows, "lr", out)
    for notice in result.notices:
        terminal.note(f"note: {notice}")
    if result.resumed_layers:
        terminal.note(f"{result.resumed_layers} layers were there from an earlier run")
    head_text = "" if result.head is None else f"; output head {result.head}"
    terminal.note(f"{name or result.output} is ready: {result.scheme}{head_text}")
    if not result.scheme.symmetric:
        terminal.note(_TRANSFORMERS_NOTE if result.head is None else _HEAD_NOTE)


def _by_kind(modules: Sequence[Quantized]) -> dict[str, list[Quantized]]:
    kinds: dict[str, list[Quantized]] = {}
    for module in modules:
        kinds.setdefault(module.module, []).append(module)
    return kinds
