"""`servelab kv-quality`: what a model loses with its KV cache in fewer bits, and which heads suffer."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from app import terminal
from app.cli_models import progress
from app.cli_options import JsonOption
from backend.config import DEFAULT_MODEL
from backend.errors import ServeLabError

_BYTES_PER_TOKEN = 16  # few tokens have more; what is beyond that many times the longest length is not encoded


def kv_quality(
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="A text file of some thousand words.")],
    model: Annotated[
        str, typer.Option(help="A pulled model, a Hugging Face folder, or dummy:<shape>.")
    ] = DEFAULT_MODEL,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens of the text to measure at. Repeatable; 512 and 2,048 otherwise.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare next-token distributions over each quantized KV cache with those over the model's own, on a text.

    KL is in nats. A head whose keys cannot be held in so few bits is named.
    """
    with terminal.results() as out:
        from backend.compat import configure_cpu_environment

        configure_cpu_environment()
        import torch

        from backend.experiments.kv_quality import measure_model_kv_quality
        from backend.models.sources import ensure_model
        from backend.tokenizer import load_tokenizer

        lengths = sorted(set(length or (512, 2048)))
        with terminal.Status() as status:
            source = ensure_model(model, progress(status))
            status.show("measuring")
            token_ids = load_tokenizer(source).encode(_read(text, _BYTES_PER_TOKEN * lengths[-1]))
            device = "cuda" if torch.cuda.is_available() else "cpu"
            quality, _ = measure_model_kv_quality(source, token_ids, device=device, lengths=lengths)
        divergences = {name: [asdict(row) for row in rows] for name, rows in quality.divergences.items()}
        if as_json:
            document = {
                "model": model,
                "divergences": divergences,
                "warnings": quality.warnings(),
                "heads": [asdict(head) for head in quality.heads],
            }
            terminal.write_document(out, document)
            return
        rows = [
            (
                name,
                f"{row['num_tokens']:,}",
                f"{row['mean']:.4f}",
                f"{row['last']:.4f}",
                f"{row['largest']:.3f}",
                f"{row['top1_agreement']:.1%}",
            )
            for name, at_lengths in divergences.items()
            for row in at_lengths
        ]
        headers = ("cache.dtype", "Tokens", "KL, mean", "of the last 128", "largest", "Same first choice")
        terminal.print_table(headers, rows, "lr", out)
    for warning in quality.warnings():
        terminal.note(f"warning: {warning}")


def _read(path: Path, num_bytes: int) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(num_bytes)
    except (OSError, UnicodeDecodeError) as error:
        raise ServeLabError(f"{path} cannot be read as UTF-8 text: {error}") from None
