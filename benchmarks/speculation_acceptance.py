"""How much the target accepts on Spec-Bench of what draft heads and n-grams draft: mean acceptance length by category.

    python -m benchmarks.speculation_acceptance --prompts spec_bench.jsonl [--head DIR ...] [--tree] [--proposer ngram] [-o FILE]

The first turn of every question, answered greedily by the product's engine, 128 new tokens at most. No engine speculates here:
rounds are counted by simulation over the target's own greedy answers. Of a head, both models run over the whole answers, and a
chain is accepted as far as it says what the answer says (`backend.spec_decode.heads.acceptance`), a tree along the path that
does. N-grams are looked up in prompt and answer as far as it has come, by the default lengths; where none has occurred before,
the step is a round of one token that drafts nothing. Mean acceptance length is tokens by rounds, the target's own token of each
round included and the prefill's left out; what the end of an answer cuts off counts as not drafted. "no loops": without the
rounds whose first token lies in a repetition loop (`backend.spec_decode.heads.loops`), which a small model's greedy output
often ends in.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from backend.compat import configure_cpu_environment
from backend.config import DEFAULT_MODEL, EngineConfig
from backend.engine.engine_host import EngineHost
from backend.errors import ConfigError, EngineError
from backend.metrics.environment import environment
from backend.sampling_params import SamplingParams
from backend.workload.targets import StreamEvent
from benchmarks.acceptance_table import drafts_of, measured_of

if TYPE_CHECKING:
    from backend.models.sources import ModelSource
    from backend.spec_decode.heads.acceptance import Round
    from backend.spec_decode.heads.target import DenseTarget

# Of MT-bench, which Spec-Bench takes as one task.
CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
ALL = "all"
NGRAM = "ngram"


@dataclass(frozen=True, slots=True)
class Question:
    category: str
    text: str


def read_questions(path: Path, most: int | None) -> list[Question]:
    """Args:
    most: of each category; None: all.
    """
    questions, counts = [], dict[str, int]()
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        category = "chat" if record["category"] in CHAT else record["category"]
        counts[category] = counts.get(category, 0) + 1
        if most is None or counts[category] <= most:
            questions.append(Question(category, record["turns"][0]))
    return questions


def answer(options: argparse.Namespace, questions: Sequence[Question]) -> list[tuple[list[int], int]]:
    """Of each question, prompt and answer as ids, and where the answer begins. Raises `EngineError`."""
    host = EngineHost()
    ended: SimpleQueue[StreamEvent] = SimpleQueue()
    try:
        host.load(EngineConfig().with_overrides({"model.name": options.model}))
        prompts = [host.tokenizer.encode_chat([{"role": "user", "content": each.text}]) for each in questions]
        answers: list[list[int]] = [[] for _ in prompts]

        def on_event(event: StreamEvent) -> None:
            answers[int(event.request_id)].extend(event.token_ids)
            if event.finish_reason is not None:
                ended.put(event)

        for number, prompt in enumerate(prompts):
            host.submit(str(number), prompt, SamplingParams(max_tokens=options.output_len), on_event)
        for _ in prompts:
            event = ended.get()
            if event.finish_reason not in ("stop", "length"):
                raise EngineError(f"question {event.request_id} was not answered: {event.error or event.finish_reason}")
    finally:
        host.close()
    return [(prompt + output, len(prompt)) for prompt, output in zip(prompts, answers, strict=True)]


def measure_head(
    folder: Path,
    source: ModelSource,
    target: DenseTarget,
    questions: Sequence[Question],
    answered: Sequence[tuple[list[int], int]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    from backend.spec_decode.draft_tree import DEFAULT_TREES, DraftTree
    from backend.spec_decode.heads.acceptance import Answered, Drafter, answer_rounds
    from backend.spec_decode.heads.head_file import load_head
    from backend.spec_decode.heads.target import target_fingerprint

    loaded = load_head(folder, target.config, target_fingerprint(source), dtype=target.dtype, device=target.device)
    drafter = Drafter.of(loaded.head, target, loaded.config.feature_layers, loaded.draft_token_ids)
    num_steps = options.num_speculative_tokens
    if loaded.config.kind == "medusa":
        num_steps = min(num_steps, loaded.config.num_speculative_tokens)
    tree = DEFAULT_TREES[loaded.config.kind].cut(num_steps) if options.tree else DraftTree.chain(num_steps)
    num_steps = tree.depth
    sequences = [Answered(ids, [(first, len(ids))]) for ids, first in answered]
    rounds = answer_rounds(drafter, sequences, tree, options.batch_tokens)
    return {
        "kind": loaded.config.kind,
        "num_speculative_tokens": num_steps,
        "num_nodes": tree.num_drafted if options.tree else None,
        "draft_vocab_size": loaded.config.draft_vocab_size,
        "training": dict(loaded.config.training),
        "by_category": _by_category(questions, answered, rounds, num_steps),
    }


def measure_ngram(
    questions: Sequence[Question], answered: Sequence[tuple[list[int], int]], num_steps: int
) -> dict[str, Any]:
    settings = EngineConfig().speculative
    lengths = settings.ngram_min, settings.ngram_max
    rounds = [list(ngram_rounds(ids, first, num_steps, lengths)) for ids, first in answered]
    return {
        "kind": NGRAM,
        "num_speculative_tokens": num_steps,
        "ngram_min": lengths[0],
        "ngram_max": lengths[1],
        "by_category": _by_category(questions, answered, rounds, num_steps),
    }


def ngram_rounds(token_ids: Sequence[int], first: int, num_steps: int, lengths: tuple[int, int]) -> Iterator[Round]:
    """The rounds of an answer, whose first token is the prefill's; those that draft nothing among them.

    Args:
        token_ids: prompt and answer.
        first: position of the answer's first token.
        num_steps: tokens of a draft.
        lengths: of the shortest and the longest n-gram that is looked up.
    """
    from backend.spec_decode.heads.acceptance import Round
    from backend.spec_decode.ngram import NgramText

    position = first + 1
    index = NgramText(token_ids[:position], *lengths)
    while position < len(token_ids):
        left = token_ids[position:]
        draft = index.continuation(num_steps)[: len(left)]
        num_accepted = 0
        while num_accepted < len(draft) and draft[num_accepted] == left[num_accepted]:
            num_accepted += 1
        num_tokens = min(num_accepted + 1, len(left))
        yield Round(position, len(draft), num_accepted, num_tokens)
        index.extend(left[:num_tokens])
        position += num_tokens


def _by_category(
    questions: Sequence[Question],
    answered: Sequence[tuple[list[int], int]],
    rounds: Sequence[Sequence[Round]],
    num_steps: int,
) -> dict[str, dict[str, Any]]:
    """In the order in which categories come, all together last.

    Args:
        rounds: of each question.
    """
    from backend.spec_decode.heads.loops import in_loop

    whole: dict[str, list[Round]] = {}
    no_loops: dict[str, list[Round]] = {}
    for question, (ids, first), of_one in zip(questions, answered, rounds, strict=True):
        looping = in_loop(ids[first:])
        for name in (question.category, ALL):
            whole.setdefault(name, []).extend(of_one)
            no_loops.setdefault(name, []).extend(each for each in of_one if not looping[each.position - first])
    return {
        name: {
            "whole": _summary(whole[name], num_steps),
            "no_loops": _summary(no_loops[name], num_steps),
            "share_drafted": _share_drafted(whole[name]),
        }
        for name in sorted(whole, key=lambda name: name == ALL)
    }


def _share_drafted(rounds: Sequence[Round]) -> float | None:
    return sum(each.num_drafted > 0 for each in rounds) / len(rounds) if rounds else None


def _summary(rounds: Sequence[Round], num_steps: int) -> dict[str, Any] | None:
    from backend.spec_decode.heads.acceptance import summarize

    found = summarize(rounds, num_steps)
    return asdict(found) if found else None


def text_table(measured: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for name, one in measured.items():
        lines.append(f"{name}: {one['kind']}, {drafts_of(one)}")
        lines.append(f"  {'category':<16}{'rounds':>8}{'length':>8}{'no loops':>10}  by position")
        for category, of in one["by_category"].items():
            whole, no_loops = of["whole"], of["no_loops"]
            lines.append(
                f"  {category:<16}{whole['num_rounds'] if whole else 0:>8,}{_number(whole):>8}{_number(no_loops):>10}"
                f"  {_shares(whole['by_position'] if whole else ())}"
            )
    return "\n".join(lines)


def _number(summary: Mapping[str, Any] | None) -> str:
    return "–" if summary is None else f"{summary['mean_length']:.3f}"


def _shares(shares: Iterable[float | None]) -> str:
    return " ".join("–" if share is None else f"{share:.3f}" for share in shares)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speculation_acceptance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--head", type=Path, action="append", default=[], help="a head's folder; repeatable")
    parser.add_argument(
        "--proposer",
        action="append",
        choices=(NGRAM,),
        default=[],
        help="what drafts without a head; chains, repeatable",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the target")
    parser.add_argument(
        "--num-speculative-tokens", type=int, default=5, help="a Medusa drafts one for each head at most"
    )
    parser.add_argument("--tree", action="store_true", help="the default tree of each head in place of a chain")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--limit", type=int, help="questions of each category; by default all")
    parser.add_argument("--batch-tokens", type=int, default=16384, help="of answers that are run side by side")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    if not options.head and not options.proposer:
        parser.error("there is nothing to measure: give a --head or a --proposer")

    configure_cpu_environment()
    import torch

    from backend.models.sources import ensure_model
    from backend.spec_decode.heads.target import DenseTarget

    questions = read_questions(options.prompts, options.limit)
    if not questions:
        raise ConfigError(f"{options.prompts} has no questions")
    source = ensure_model(options.model, lambda *progress: None)
    answered = answer(options, questions)
    print(f"{len(answered)} questions answered", file=sys.stderr, flush=True)
    heads = {}
    if options.head:
        target = DenseTarget.load(source, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        heads = {
            folder.resolve().name: measure_head(folder, source, target, questions, answered, options)
            for folder in options.head
        }
    num_steps = options.num_speculative_tokens
    measured = {
        "heads": heads,
        "proposers": {name: measure_ngram(questions, answered, num_steps) for name in options.proposer},
    }
    print(text_table(measured_of(measured)))
    if options.output:
        result = {
            "benchmark": "speculation_acceptance",
            "date": datetime.now(UTC).date().isoformat(),
            "model": options.model,
            "options": {
                name: getattr(options, name) for name in ("num_speculative_tokens", "tree", "output_len", "limit")
            },
            "num_questions": len(questions),
            "environment": environment(),
            **measured,
        }
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
