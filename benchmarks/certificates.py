"""Whether every way of drafting gives what plain decoding gives, on one model: `servelab spec verify` for each, as one result.

    python -m benchmarks.certificates [--model NAME] [--methods ngram,eagle] [--set KEY=VALUE ...] [--samples N] [-o FILE]

A process for each method, which has the device to itself and leaves nothing on it. Of each verdict
(`backend.experiments.certificate`): the result and its reasons; of greedy answers how many tokens there were, how many were
checked, where they came from and which differ and are excused; of sampled ones the χ² test and the total variation. Every
method drafts wherever it can, whether it pays or not. `seconds` are those of the whole process, both engines' loading included.
The file is written anew after each method.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend.config import DEFAULT_MODEL
from backend.experiments.certificate import Verdict
from backend.experiments.certificate_config import DEFAULT_NUM_SAMPLES
from backend.metrics.environment import environment
from benchmarks.certificate_table import text_table
from benchmarks.heading import heading

ROOT = Path(__file__).resolve().parents[1]
METHODS = ("ngram", "draft_model", "eagle", "medusa", "lookahead")
FROM_ROUNDS = ("accepted", "recovered", "bonus")  # origins of tokens


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The result as plain data, once after each method, with those before it."""
    result = heading("certificates", environment()["gpu"], None, options.commit) | {
        "model": options.model,
        "options": {name: getattr(options, name) for name in ("methods", "set", "samples")},
    }
    rows: list[dict[str, Any]] = []
    for method in options.methods:
        row = {"method": method, **certificate(method, options)}
        said = row.get("error") or "; ".join([row["verdict"], *row["reasons"]])
        print(f"{method}: {said}, {row['seconds']:.0f} s", file=sys.stderr, flush=True)
        rows.append(row)
        yield result | {"results": list(rows)}


def certificate(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """A method's row; with an `error` in place of a verdict where there is none."""
    command = [sys.executable, "-m", "app.cli", "spec", "verify", options.model, "--no-store", "--json"]
    command += ["--samples", str(options.samples)]
    for setting in (f"speculative.method={method}", *options.set):
        command += ["--set", setting]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    seconds = {"seconds": time.perf_counter() - started}
    # Code 1 is also that of a verdict which is not "exact"; no document was written where nothing could be asked.
    document = json.loads(done.stdout) if done.stdout else {}
    if document.get("verdict") is None:
        last = done.stderr.strip().splitlines()[-1:]
        problem = (
            document.get("error")
            or "".join(last).removeprefix("error: ")
            or f"the process ended with {done.returncode}"
        )
        return seconds | {"error": problem}
    return seconds | figures(Verdict.from_dict(document["verdict"])) | {"notices": document["notices"]}


def figures(verdict: Verdict) -> dict[str, Any]:
    """What a result keeps of a verdict."""
    # Of samples those origins are counted that are compared, but for the first tokens, which no round gives: the other tokens
    # of rounds are greedy ones.
    of_greedy = Counter(verdict.origins)
    of_greedy.subtract(verdict.sampled_origins)
    greedy = verdict.greedy
    return {
        "verdict": verdict.result,
        "reasons": verdict.reasons,
        "greedy": {
            "num_prompts": len(greedy),
            "num_tokens": sum(each.num_tokens for each in greedy),
            "num_checked": sum(each.num_checked for each in greedy),
            "num_forced": sum(each.num_forced for each in greedy),
            "from_rounds": {origin: of_greedy[origin] for origin in FROM_ROUNDS},
            "excused": [
                {"prompt": each.prompt, **asdict(divergence)}
                for each in greedy
                for divergence in each.divergences
                if divergence.excused
            ],
            "logit_gap_bound": verdict.logit_gap_bound,
        },
        "sampled": {**asdict(verdict.sampled), "origins": verdict.sampled_origins},
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.certificates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the target")
    parser.add_argument("--methods", type=_methods, default=list(METHODS), help=f"of {','.join(METHODS)}; default: all")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an engine setting; repeatable")
    parser.add_argument("--samples", type=int, default=DEFAULT_NUM_SAMPLES, help="sampled answers by each of both")
    parser.add_argument("--commit", help="to state where this is no checkout")
    parser.add_argument("-o", "--output", type=Path)
    return parser.parse_args(arguments)


def _methods(text: str) -> list[str]:
    methods = text.split(",")
    if unknown := set(methods) - set(METHODS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return methods


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    result: Mapping[str, Any] = {}
    for result in run(options):
        if options.output:
            options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(text_table(result))


if __name__ == "__main__":
    main()
