"""What speculation gains over plain decoding in the same call, beside what its own acceptance and costs predict.

    python -m benchmarks.speculation_speed --prompts spec_bench.jsonl [--model NAME] [--seconds S] [-o FILE]

The first turn of some of Spec-Bench's questions of each category, answered greedily, 128 new tokens at most, one or 16 at a time,
by the default configuration, recorded as in `benchmarks/engine.py`. Of each proposer:

- speed of a request: tokens behind the first ones, by the time from the first token to the last, all requests together;
  `speedup` is that over plain decoding's. `output_tok_s` is of the whole pass, prompts included.
- `predicted`, and draft, verify and plain step, are those of `backend.analysis.measured_speedup`, which the dashboard shows: from
  the acceptance length and the times of the pass with the median speed, and the plain steps of plain decoding's.
- `whole_drafts`: the same cost of verifying, of the steps alone in which every round drafts as many tokens as any; `num_tokens`
  is how many run in such a round: the text's last one and all that was drafted, which of a tree are all of its nodes.
- by category, and of summaries and answers from given texts together, which copy names and phrases of these.

With `--copying` the questions ask for what a summary is to be made of, its first words, to be repeated word for word: an answer
that is copied from end to end, as an edited file's mostly is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from app.settings_input import engine_config
from backend.analysis.draft_rounds import RoundColumns, RoundHistory, acceptance_length, rates_by_position
from backend.analysis.measured_speedup import MeasuredSpeedup, measure_speedup
from backend.compat import configure_cpu_environment
from backend.config import DEFAULT_MODEL, EngineConfig
from backend.errors import ConfigError, EngineError, ServeLabError
from backend.metrics.speculation_ledger import SPECULATION_KIND
from backend.models.sources import ensure_model
from backend.sampling_params import SamplingParams
from backend.tokenizer import load_tokenizer
from backend.workload.datasets import WorkloadRequest
from backend.workload.targets import Prompt
from benchmarks.figures import Spread
from benchmarks.heading import heading
from benchmarks.limits import measure_limits
from benchmarks.options import numbers
from benchmarks.passes import BenchmarkEngine
from benchmarks.speculation_acceptance import Question, read_questions
from benchmarks.speculation_passes import Passes, measure_passes, request_rate
from benchmarks.speculation_table import FROM_TEXTS, text_table
from benchmarks.whole_drafts import WholeDrafts, whole_drafts
from db.repository import RunRepository
from db.session import Database

PLAIN = "plain"
PROPOSERS = ("ngram", "eagle", "medusa", "draft_model")
TEXT_CATEGORIES = ("summarization", "rag")
COPIED_WORDS = 80  # which an answer of 128 tokens has room for


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything asked for, as plain data."""
    started = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    questions = in_turns(read_questions(options.prompts, options.limit))
    if options.copying:
        questions = to_copy(questions)
    if not questions:
        raise ConfigError(f"{options.prompts} has no questions")
    tokenizer = load_tokenizer(ensure_model(options.model, lambda *progress: None))
    prompts = [tokenizer.encode_chat([{"role": "user", "content": each.text}]) for each in questions]
    requests = [
        WorkloadRequest(
            index,
            Prompt(token_ids=tuple(ids)),
            SamplingParams(max_tokens=options.output_len, temperature=options.temperature, seed=index),
            None,
        )
        for index, ids in enumerate(prompts)
    ]
    limits = measure_limits(device)

    def is_late() -> bool:
        return time.perf_counter() - started > options.seconds

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        database = Database.open(f"sqlite:///{folder}/servelab.db")
        benchmark = SpeculationBenchmark(RunRepository(database), questions)
        for method in (PLAIN, *options.proposer):
            engine = BenchmarkEngine(_config(method, options), database)
            try:
                for concurrency in options.requests:
                    row = {"method": method, "requests": concurrency}
                    row |= _attempt(
                        lambda engine=engine, row=row: benchmark.measure(engine, requests, row, options.repeats),
                        f"left out: {options.seconds:g} s were over" if is_late() else None,
                    )
                    rows.append(row)
                    said = row.get("error") or f"{row['request_tok_s']['median']:,.0f} tok/s"
                    print(f"{method}, {concurrency}: {said}", file=sys.stderr, flush=True)
            finally:
                engine.close()
        database.close()
    return heading("speculation_speed", gpu, limits, options.commit) | {
        "model": options.model,
        "questions": "texts to copy" if options.copying else "questions of Spec-Bench",
        "num_questions": len(questions),
        "options": {
            name: getattr(options, name)
            for name in (
                "set",
                "copying",
                "limit",
                "output_len",
                "temperature",
                "num_speculative_tokens",
                "repeats",
                "seconds",
            )
        },
        "results": rows,
    }


class SpeculationBenchmark:
    """Measures proposers, plain decoding first: the others are held against its passes of as many requests."""

    def __init__(self, repository: RunRepository, questions: Sequence[Question]) -> None:
        self._repository = repository
        self._categories = [question.category for question in questions]
        self._plain: dict[int, Passes] = {}  # by requests at a time

    def measure(
        self, engine: BenchmarkEngine, requests: Sequence[WorkloadRequest], row: dict[str, Any], repeats: int
    ) -> dict[str, Any]:
        """Args:
            row: the method, and how many requests are under way at a time.

        Raises `ServeLabError` where the proposer cannot be loaded, a request fails, or plain decoding was not measured.
        """
        concurrency = row["requests"]
        if row["method"] != PLAIN and concurrency not in self._plain:
            raise EngineError("plain decoding was not measured")
        passes = measure_passes(engine, requests, concurrency, repeats)
        found: dict[str, Any] = {
            "request_tok_s": asdict(Spread.of(passes.request_tok_s)),
            "output_tok_s": asdict(Spread.of(passes.output_tok_s)),
        }
        if row["method"] == PLAIN:
            self._plain[concurrency] = passes
            return found
        plain = self._plain[concurrency]
        speedup = Spread.of(passes.request_tok_s).median / Spread.of(plain.request_tok_s).median
        theirs = {request.index: request.token_ids for request in plain.requests}
        same = [request.token_ids == theirs[request.index] for request in passes.requests]
        found |= {
            "speedup": speedup,
            "output_ratio": Spread.of(passes.output_tok_s).median / Spread.of(plain.output_tok_s).median,
            "same_outputs": sum(same) / len(same),
        }
        history, chunks = RoundHistory(), self._repository.chunks(passes.run_id, SPECULATION_KIND)
        history.extend(chunks)
        measured = self._speedup(history.columns, passes, plain, row["method"])
        if measured is not None:
            found |= {
                "mean_acceptance_length": measured.rounds.mean_acceptance_length,
                "share_of_rounds": measured.share,
                **asdict(measured.times),
                "draft_cost": measured.rounds.draft_cost,
                "verify_cost": measured.rounds.verify_cost,
                "predicted": measured.predicted,
                "of_predicted": speedup / measured.predicted,
                "whole_drafts": self._whole(whole_drafts(history.columns, chunks), passes, plain, row["method"]),
            }
        return found | {"by_category": self._by_category(history, passes, plain)}

    def _speedup(self, rounds: RoundColumns, passes: Passes, plain: Passes, method: str) -> MeasuredSpeedup | None:
        return measure_speedup(
            rounds,
            rates_by_position(rounds),
            self._repository.steps(passes.run_id),
            self._repository.steps(plain.run_id),
            num_tokens=sum(max(0, request.num_output_tokens - 1) for request in passes.requests),
            method=method,
        )

    def _whole(self, whole: WholeDrafts, passes: Passes, plain: Passes, method: str) -> dict[str, Any] | None:
        measured = self._speedup(whole.rounds, passes, plain, method)
        if measured is None:
            return None
        return {
            "num_tokens": whole.num_tokens,
            "is_tree": whole.is_tree,
            "num_steps": measured.times.num_steps,
            "verify_cost": measured.times.verify_cost,
        }

    def _by_category(self, history: RoundHistory, passes: Passes, plain: Passes) -> dict[str, dict[str, float | None]]:
        found: dict[str, dict[str, float | None]] = {}
        groups: dict[str, tuple[str, ...]] = {name: (name,) for name in sorted(set(self._categories))}
        if set(TEXT_CATEGORIES) & set(self._categories):
            groups[FROM_TEXTS] = TEXT_CATEGORIES
        for name, members in groups.items():
            ours, theirs = (
                [request for request in each.requests if self._categories[request.index] in members]
                for each in (passes, plain)
            )
            rates = request_rate(ours), request_rate(theirs)
            found[name] = {
                "speedup": rates[0] / rates[1] if rates[0] and rates[1] else None,
                "mean_acceptance_length": acceptance_length(history.of([request.request_id for request in ours])),
            }
        return found


def to_copy(questions: Sequence[Question]) -> list[Question]:
    """In place of each summary: the begin of its text, to be repeated."""
    texts = [each.text.removeprefix("Summarize: ") for each in questions if each.category == "summarization"]
    asked = "Repeat the following text word for word.\n\n"
    return [Question("copying", asked + " ".join(text.split()[:COPIED_WORDS])) for text in texts]


def in_turns(questions: Sequence[Question]) -> list[Question]:
    """The first of each category, then the second of each: such requests are beside each other as strangers' are."""
    counts: dict[str, int] = {}
    places = []
    for question in questions:
        places.append(counts.get(question.category, 0))
        counts[question.category] = places[-1] + 1
    return [question for _, question in sorted(zip(places, questions, strict=True), key=lambda each: each[0])]


def _config(method: str, options: argparse.Namespace) -> EngineConfig:
    # Every pass asks the same prompts again: what one computes must not be there for the next.
    # Plain decoding knows nothing of how the others are to draft.
    settings = [each for each in options.set if method != PLAIN or not each.startswith("speculative.")]
    config = engine_config(None, settings if method == PLAIN else [f"speculative.method={method}", *settings])
    config = config.with_overrides({"model.name": options.model, "cache.enable_prefix_caching": False})
    if method == PLAIN:
        return config
    overrides: dict[str, Any] = {}
    if not config.speculative.tree:  # which says itself how many tokens it drafts
        overrides["speculative.num_speculative_tokens"] = options.num_speculative_tokens
    model = getattr(options, method, None)
    return config.with_overrides(overrides | ({"speculative.model": model} if model else {}))


def _attempt(measure: Callable[[], dict[str, Any]], problem: str | None) -> dict[str, Any]:
    try:
        return {"error": problem} if problem else measure()
    except ServeLabError as error:
        return {"error": str(error)}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speculation_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the target")
    parser.add_argument("--proposer", action="append", help=f"repeatable; default: {' '.join(PROPOSERS)}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an engine setting; repeatable")
    parser.add_argument("--copying", action="store_true", help="of summaries, ask for their texts")
    parser.add_argument("--eagle", metavar="DIR", help="the head; default: the one that comes for the model")
    parser.add_argument("--medusa", metavar="DIR", help="the same")
    parser.add_argument("--draft-model", metavar="NAME", help="default: the target's own first layers")
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--requests", type=numbers, default=[1, 16], help="at a time")
    parser.add_argument("--limit", type=int, default=8, help="questions of each category")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=150.0, help="nothing is begun after so many")
    parser.add_argument("--commit", help="to state where this is no checkout")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.output_len < 2:
        parser.error("--repeats must be 1 or more and --output-len 2 or more")
    options.proposer = options.proposer or list(PROPOSERS)
    try:
        for method in (PLAIN, *options.proposer):
            _config(method, options)
    except ConfigError as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    configure_cpu_environment()
    result = run(options)
    print(text_table(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
