"""`servelab heads`: draft heads for speculative decoding, made by the model that they are for."""

from __future__ import annotations

import math
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from app import formatting, terminal
from app.cli_models import progress
from app.cli_options import JsonOption
from backend.errors import ConfigError

if TYPE_CHECKING:
    from backend.spec_decode.heads.train_head import HeadResult
    from backend.spec_decode.heads.training import Progress

heads = typer.Typer(help="Train draft heads for speculative decoding.", no_args_is_help=True)

_SECONDS_BETWEEN_LINES = 10


@heads.callback()
def _group() -> None:
    """Keeps `train` a command of its own while it is the only one."""


@heads.command()
def train(
    kind: Annotated[
        Literal["eagle", "medusa"],
        typer.Option(
            help="eagle: a decoder layer on the target's hidden states that goes on by itself. medusa: four blocks side by side, "
            "each a token further ahead."
        ),
    ],
    model: Annotated[str, typer.Option(help="The target: a pulled model, or a Hugging Face folder.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The head's folder, new or unfinished.")
    ],
    self_generated: Annotated[
        bool, typer.Option("--self-generated", help="The target writes the users' words as well as its answers.")
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Users' words to answer: a text's paragraphs, or JSON lines with text or prompt."
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of conversations to write. CUDA 8,000,000, CPU 40,000.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of training. CUDA 3,000, CPU 300.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(min=64, help="Tokens of a step. CUDA 32,768, CPU 2,048.")] = None,
    learning_rate: Annotated[float, typer.Option(min=1e-6, max=1.0, help="The highest one.")] = 1e-3,
    draft_vocab: Annotated[
        int, typer.Option(min=2, help="Tokens that the head can draft, the most frequent ones.")
    ] = 16384,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of the conversations and of the training.")] = 0,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.01, help="Stop after so many, but not before something is done, and save; the same command goes on."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where conversations lie, for several heads to share; in the output by default."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a draft head on conversations that its target writes, and tell how much of it the target accepts.

    It is saved every few minutes, and when it is interrupted or stopped; given again, the same command goes on from there.
    """
    started = time.perf_counter()
    if prompts is None and not self_generated:
        raise ConfigError("nothing to train on: name --prompts FILE, or --self-generated, or both")
    with terminal.results() as out:
        from backend.compat import configure_cpu_environment

        configure_cpu_environment()
        import torch

        from backend.models.sources import ensure_model
        from backend.spec_decode.heads.generation import read_prompts
        from backend.spec_decode.heads.train_head import NUM_STEPS, HeadPlan, HeadTraining
        from backend.spec_decode.heads.training import TrainingSettings

        on_cuda = torch.cuda.is_available()
        tokens = tokens or (8_000_000 if on_cuda else 40_000)
        settings = TrainingSettings(
            num_steps=steps or (3_000 if on_cuda else 300),
            num_unrolled=NUM_STEPS[kind],
            batch_tokens=batch_tokens or (32_768 if on_cuda else 2_048),
            learning_rate=learning_rate,
            seed=seed,
        )
        plan = HeadPlan(
            kind=kind,
            num_tokens=tokens,
            texts=tuple(read_prompts(prompts)) if prompts else (),
            self_generated=self_generated,
            draft_vocab_size=draft_vocab,
            training=settings,
            command=_command(
                *("--kind", kind, "--model", model, "-o", output),
                *(["--data", data] if data else []),
                *(["--self-generated"] if self_generated else []),
                *(["--prompts", prompts] if prompts else []),
                *("--tokens", tokens, "--steps", settings.num_steps, "--batch-tokens", settings.batch_tokens),
                *("--learning-rate", learning_rate, "--draft-vocab", draft_vocab, "--seed", seed),
            ),
        )
        with terminal.Status() as status:
            training = HeadTraining(ensure_model(model, progress(status)), plan, output, data)
        lines, deadline = _Lines(), math.inf if minutes is None else started + 60 * minutes
        with terminal.Interruption() as interruption:
            result = training.run(lines.stage, lines.progress, lambda: bool(interruption), deadline)
        if as_json:
            terminal.write_document(out, _document(output, settings.num_steps, result))
        else:
            terminal.print_table(("Property", "Value"), _rows(result), "l", out)
    if result.config is None:
        terminal.note(
            f"stopped with {min(result.num_tokens, tokens):,} of {tokens:,} tokens written and nothing learnt; the same command "
            "goes on"
        )
    elif result.step < settings.num_steps:
        terminal.note(f"stopped at step {result.step:,} of {settings.num_steps:,}; the same command goes on")
    else:
        terminal.note(f"{output} is ready")
    if interruption:
        raise typer.Exit(interruption.exit_code)


def _command(*arguments: object) -> str:
    """What makes the whole head again when it is typed: without `--minutes`, and with what was left to the device named."""
    return shlex.join(["servelab", "heads", "train", *map(str, arguments)])


class _Lines:
    """Progress as lines on stderr, one in ten seconds and one for each new thing that is done."""

    def __init__(self) -> None:
        self._stage, self._last = "", 0.0

    def stage(self, what: str, done: float, total: float) -> None:
        self._say(f"{what}: {done:,.0f} of {total:,.0f} tokens" if total else what, what)

    def progress(self, at: Progress) -> None:
        self._say(
            f"step {at.step:,} of {at.num_steps:,}, loss {at.loss:.3f}, {at.tokens_per_second:,.0f} tok/s, "
            f"{at.seconds_left / 60:.1f} min left",
            "training",
        )

    def _say(self, line: str, stage: str) -> None:
        now = time.perf_counter()
        if stage != self._stage or now - self._last >= _SECONDS_BETWEEN_LINES:
            terminal.note(line)
            self._stage, self._last = stage, now


def _document(output: Path, num_steps: int, result: HeadResult) -> dict[str, Any]:
    config = result.config
    return {
        "output": str(output),
        "finished": result.step == num_steps,
        "steps": result.step,
        "num_tokens": result.num_tokens,
        "size_bytes": result.size_bytes,
        "draft_vocab_size": config.draft_vocab_size if config else None,
        "held_out": config.training["held_out"] if config else None,
    }


def _rows(result: HeadResult) -> list[tuple[str, str]]:
    rows = [("Tokens of conversations", f"{result.num_tokens:,}"), ("Steps", f"{result.step:,}")]
    if result.config is None:
        return rows
    held_out = result.config.training["held_out"]
    rows.append(("Size", formatting.file_size(result.size_bytes)))
    rows.append(("Draft vocabulary", f"{result.config.draft_vocab_size:,} tokens"))
    rows.append(("Its share of held-out answers", f"{held_out['coverage']:.2%}"))
    if chain := held_out["greedy_chain"]:
        shares = ", ".join("–" if share is None else f"{share:.3f}" for share in chain["by_position"])
        rows.append(("Mean acceptance length, greedy, held out", f"{chain['mean_length']:.3f}"))
        rows.append(("Acceptance by position", shares))
    return rows
