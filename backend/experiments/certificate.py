"""The certificate: whether speculation gives what plain decoding gives, on this model, with this proposer and these settings.

Greedy: the same tokens, prompt by prompt. Where reduction orders may depend on the batch, a divergence is excused if the logits
of both tokens lie closer to the best one than a stated bound; it is listed with both tokens and their gap, and the rest of the
answer is held against plain decoding behind the same text (`backend.experiments.certificate_greedy`). Sampled: samples of a few
prompts by both, with seeds of their own, are tested for one joint distribution of three tokens. Those are output positions 1 to
3: the first token comes out of the prompt and is never drafted, the three behind it come from rounds. Half of the answers of the
engine that speculates have room for whole drafts behind them, so that the first three tokens of a draft are accepted or recovered
among them as they are in long answers. The other half end with them: that leaves two tokens to a draft, and to the third place
the bonus token, which drafts of three never give there. Deeper tokens of a draft are compared in greedy answers only.

An engine that speculates on none of those tokens has shown nothing, nor have samples too few to differ: such a certificate is
inconclusive. No torch.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from backend.errors import ConfigError, DatabaseError
from backend.experiments.certificate_config import CertificateConfig
from backend.experiments.certificate_greedy import (
    NO_TOKEN,
    Answer,
    Divergence,
    Greedy,
    Teacher,
    compare_greedy,
    token_name,
)
from backend.experiments.homogeneity import Homogeneity, compare_samples
from backend.sampling_params import MAX_SAMPLES, SamplingParams

CHUNK_KIND = "certificate"  # of the ledger chunk that holds a verdict
NUM_TOKENS = 3
FIRST = 1  # output position of the first of them
_VERSION = 2

Result = Literal["exact", "rejected", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and how to answer it; `sampling.n` answers."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams


# Questions -> an answer for each, or for each sample of each, in their order.
Decoder = Callable[[Sequence[Question]], list[Answer]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Attributes:
    result: "exact": nothing speaks against it. "rejected": `reasons` say what does. "inconclusive": `reasons`
        say what was not tested.
    logit_gap_bound: None: equal tokens were demanded bit for bit.
    origins: of all tokens that speculation gave, in samples up to the last one that was compared, and of those that were
        compared in distribution.
    """

    result: Result
    reasons: list[str]
    greedy: list[Greedy]
    logit_gap_bound: float | None
    sampled: Homogeneity
    origins: dict[str, int]
    sampled_origins: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Nested plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verdict:
        """The inverse of `to_dict`."""
        greedy = [Greedy.from_dict(each) for each in data["greedy"]]
        return cls(**{**data, "greedy": greedy, "sampled": Homogeneity(**data["sampled"])})

    def encode(self) -> bytes:
        """For a ledger chunk."""
        return zlib.compress(json.dumps({"version": _VERSION, "verdict": self.to_dict()}).encode())


def read_verdict(data: bytes) -> Verdict:
    """The inverse of `Verdict.encode`. Raises `DatabaseError` where it is damaged or written by a newer version."""
    try:
        document = json.loads(zlib.decompress(data))
        version = document["version"]
        if version == 1:
            verdict = document["verdict"]
            greedy = [asdict(Greedy.from_version_1(each)) for each in verdict["greedy"]]
            return Verdict.from_dict({**verdict, "greedy": greedy})
        if version == _VERSION:
            return Verdict.from_dict(document["verdict"])
    except (zlib.error, ValueError, TypeError, KeyError) as error:
        raise DatabaseError(f"a certificate is damaged: {error}") from None
    raise DatabaseError(f"a certificate of version {version} is newer than this program, which reads {_VERSION}")


def certify(
    config: CertificateConfig,
    prompts: Sequence[tuple[int, ...]],
    *,
    plain: Decoder,
    speculative: Decoder,
    teacher: Teacher,
    logit_gap_bound: float | None,
) -> Verdict:
    """Ask both decoders and compare: `speculative` once, `plain` once, then `teacher` where greedy answers diverge.

    Args:
        prompts: the first `config.num_sampled_prompts` of them, or as many as there are, are sampled.
        logit_gap_bound: None: no divergence is excused, and gaps are only told.
    Raises:
        ConfigError: there is no prompt, or too few samples for each.
    """
    if not prompts:
        raise ConfigError("there is no prompt to ask")
    sampled = prompts[: config.num_sampled_prompts]
    num_samples = config.num_samples // len(sampled)
    greedy_questions = [
        Question(prompt, SamplingParams(max_tokens=config.max_tokens, seed=config.seed)) for prompt in prompts
    ]
    end = FIRST + NUM_TOKENS
    # What plain decoding gives does not depend on how much room is left behind it.
    lengths = ((end, end + config.longest_draft), (end,))
    other_answers, answers = (
        decoder([*greedy_questions, *_sample_questions(config, sampled, num_samples, half, lengths[half])])
        for half, decoder in enumerate((speculative, plain))
    )
    greedy = [
        compare_greedy(index, prompt, answers[index], other_answers[index], teacher, logit_gap_bound)
        for index, prompt in enumerate(prompts)
    ]
    samples = [[_window(answer.token_ids) for answer in each[len(prompts) :]] for each in (answers, other_answers)]
    strata = [
        (samples[0][start : start + num_samples], samples[1][start : start + num_samples])
        for start in range(0, num_samples * len(sampled), num_samples)
    ]
    homogeneity = compare_samples(strata, config.significance)
    sampled_tokens = [answer.origins[:end] for answer in other_answers[len(prompts) :]]
    origins = Counter(origin for answer in other_answers[: len(prompts)] for origin in answer.origins)
    origins.update(origin for tokens in sampled_tokens for origin in tokens)
    compared = Counter(origin for tokens in sampled_tokens for origin in tokens[FIRST:])
    reasons = [_greedy_reason(each.prompt, each.error) for each in greedy if each.error is not None]
    reasons += [f"sampled tokens: {reason}" for reason in homogeneity.rejections]
    result: Result = "rejected" if reasons else "exact"
    if not reasons and (reasons := _untested(other_answers[: len(prompts)], compared, homogeneity)):
        result = "inconclusive"
    return Verdict(result, reasons, greedy, logit_gap_bound, homogeneity, dict(origins), dict(compared))


def _greedy_reason(prompt: int, error: Divergence) -> str:
    if error.logit_gap is None:
        which = "plain decoding" if error.plain_token_id is None else "speculation"
        return f"prompt {prompt}: the greedy answer of {which} breaks off at output position {error.position}"
    plain, token = (token_name(each) for each in (error.plain_token_id, error.token_id))
    return (
        f"prompt {prompt}: at output position {error.position} the greedy choice is {token}, of plain decoding {plain}; their "
        f"logits lie up to {error.logit_gap:.3g} below the best one"
    )


def _untested(greedy: Sequence[Answer], compared: Mapping[str, int], homogeneity: Homogeneity) -> list[str]:
    """What the comparison says nothing about."""
    reasons = []
    if not _num_drafted(Counter(origin for answer in greedy for origin in answer.origins)):
        reasons.append("none of the greedy tokens had been drafted")
    if not _num_drafted(compared):
        reasons.append("none of the tokens that were compared in distribution had been drafted")
    elif homogeneity.degrees_of_freedom == 0:
        reasons.append(
            f"{homogeneity.num_samples:,} samples are too few for the χ² test: each of their triples is expected so seldom that "
            "all fell into one cell"
        )
    return reasons


def _num_drafted(origins: Mapping[str, int]) -> int:
    return origins.get("accepted", 0) + origins.get("recovered", 0)


def _sample_questions(
    config: CertificateConfig,
    prompts: Sequence[tuple[int, ...]],
    num_samples: int,
    half: int,
    lengths: Sequence[int],
) -> list[Question]:
    """Of one decoder: every answer has a seed that no other answer has, of this decoder or of the other one.

    Args:
        num_samples: of each prompt.
        half: 0 or 1, which decoder it is.
        lengths: most tokens of an answer, each of an equal share of a prompt's samples.
    """
    shares = [num_samples // len(lengths)] * len(lengths)
    shares[-1] += num_samples % len(lengths)
    questions = []
    for prompt in prompts:
        for max_tokens, share in zip(lengths, shares, strict=True):
            for start in range(0, share, MAX_SAMPLES):
                seed = config.seed + 1 + 2 * len(questions) + half
                sampling = config.sampling.model_copy(
                    update={"n": min(MAX_SAMPLES, share - start), "seed": seed, "max_tokens": max_tokens}
                )
                questions.append(Question(prompt, sampling))
    return questions


def _window(token_ids: Sequence[int]) -> tuple[int, ...]:
    window = tuple(token_ids[FIRST : FIRST + NUM_TOKENS])
    return window + (NO_TOKEN,) * (NUM_TOKENS - len(window))
