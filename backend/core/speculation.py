"""`speculative.*`: what goes together with speculation, and what is turned off for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend.config import EngineConfig
from backend.core.draft_cost import DraftCost
from backend.core.draft_length import MOST_PROBE_STEPS, PROBE_STEPS, AdaptiveLength
from backend.errors import ConfigError

SYNTHETIC = "synthetic"  # of `speculative.method`
HEAD_METHODS = ("eagle", "medusa")  # of `speculative.method`, those that read the target's hidden states
LOOK_UP_METHODS = ("ngram",)  # those whose drafts lie in the text, where a device can look them up as well


def check_speculation(config: EngineConfig) -> None:
    """Raise `ConfigError` for settings that speculation does not go together with."""
    method, layout = config.speculative.method, config.cache.layout
    if method != "none" and layout == "none":
        raise ConfigError(
            f"speculative.method = {method!r} does not go together with cache.layout = {layout!r}: without keys and values "
            "of the tokens before them drafts cannot be verified together; allowed are 'paged', 'contiguous'"
        )
    if config.speculative.tree and config.kernels.batch_invariant:
        raise ConfigError(
            "speculative.tree = True does not go together with kernels.batch_invariant = True: a tree's branches lie between "
            "the tokens that are accepted, and their sums are taken in another order than plain decoding's"
        )
    if config.speculative.method == SYNTHETIC and not config.model.name.startswith("dummy:"):
        raise ConfigError(
            f"speculative.method = {SYNTHETIC!r} accepts drafts at a set rate and makes the tokens of {config.model.name!r} "
            "meaningless; allowed are models named dummy:<shape>, whose tokens mean nothing"
        )


def is_synthetic(config: Mapping[str, Any]) -> bool:
    """Whether a stored config is one whose drafts are accepted at a set rate: its times are real, and its tokens are not."""
    settings = config.get("speculative")
    return isinstance(settings, Mapping) and settings.get("method") == SYNTHETIC


def refuse_synthetic(config: EngineConfig, what: str) -> None:
    """Raise `ConfigError` for what such a config has none of: "quality", "exactness"."""
    if config.speculative.method == SYNTHETIC:
        raise ConfigError(
            f"speculative.method = {SYNTHETIC!r} has no {what}: its drafts are accepted at a set rate, whatever the model says"
        )


def resolve_speculation(
    resolved: EngineConfig, longest_draft: int | None = None, draft_cost: DraftCost | None = None
) -> tuple[EngineConfig, tuple[str, ...]]:
    """Turn off what speculation cannot do, and say where it is off itself; a sentence each.

    Args:
        resolved: the config, whose other fields are resolved already.
        longest_draft: tokens that the proposer can draft at most; None: any number.
        draft_cost: see `make_scheduler`.
    """
    settings, notices = resolved.speculative, []
    if settings.method == "none":
        return resolved, ()
    if longest_draft is not None and settings.num_speculative_tokens > longest_draft:
        resolved = resolved.with_overrides({"speculative.num_speculative_tokens": longest_draft})
        notices.append(
            f"speculative.num_speculative_tokens is {longest_draft} instead of {settings.num_speculative_tokens}: the head "
            "drafts no more."
        )
    if settings.max_batch is not None:
        notices.append(
            f"speculation is off in steps in which more than {settings.max_batch:,} requests decode (speculative.max_batch)."
        )
    if settings.method == SYNTHETIC:
        resolved = resolved.with_overrides({"speculative.adaptive": False})
        notices.append(
            f"speculation is synthetic: each drafted token is accepted with probability {settings.synthetic_acceptance:g}, "
            "whatever the model says, and always as many are drafted. Times are real; the tokens mean nothing."
        )
    else:
        notices.append(_where_it_loses(resolved, draft_cost or DraftCost()))
    if settings.method == "draft_model" and settings.model is None:
        notices.append(
            "drafts come from the target's first layers, which were not trained to predict tokens by themselves: few may be "
            "accepted (speculative.model names a model that was)."
        )
    if (shared := _taken_from_all_tokens(resolved)) is not None:
        notices.append(
            f"{shared} from all tokens of a step: under speculation, with drafts among them, logits differ a little from plain "
            "decoding's, and greedy tokens may where the two best are close."
        )
    return resolved, tuple(notices)


def _taken_from_all_tokens(resolved: EngineConfig) -> str | None:
    """What makes a token's result depend on the others of its step."""
    quantization = resolved.quantization
    if quantization.method == "llm_int8":
        return "quantization.method = 'llm_int8' takes its outlier columns"
    if quantization.method == "fp8" and quantization.granularity == "tensor":
        return "quantization.granularity = 'tensor' takes the scale of fp8 activations"
    return None


def _where_it_loses(resolved: EngineConfig, cost: DraftCost) -> str:
    if not resolved.speculative.adaptive:
        return "speculation goes on where it loses: speculative.adaptive is off."
    most, tree = resolved.scheduler.max_num_seqs, resolved.speculative.draft_tree
    if tree is not None:
        length = AdaptiveLength(tree.depth, cost, tree.num_drafted_to)
        whole = cost.of_round(1) + cost.draft * tree.depth + cost.verify(1) * tree.num_drafted
        begins = "" if length.pays_at_first() else " It begins switched off."
        return (
            f"speculation is off in steps in which it would lose (speculative.adaptive), and trees are cut to the levels that "
            f"pay: a whole one of {tree.num_drafted} tokens costs about {whole:.2f} plain steps with one request.{begins} "
            f"{_probes(length, 'a level')}"
        )
    alone, k = cost.token(1), resolved.speculative.num_speculative_tokens
    with_all = f", {cost.token(most):.2f} with {most:,}" if most and most > 1 else ""
    length = AdaptiveLength(k, cost)
    begins = "" if length.pays_at_first() else " It begins switched off."
    each = f"a drafted token costs about {alone:.2f} plain steps with one request{with_all}"
    if cost.of_round(1):
        least = cost.of_round(1) if cost.found is None else cost.found
        in_vain = f" ({cost.of_round(1):.2f} where nothing is found)" if least < cost.of_round(1) else ""
        each = f"a round {least:.2f} plain steps more than such a step{in_vain}, and {each}"
    if not length.may_pay(1):
        pays = f"{each}: drafts never pay, not even those that are all accepted."
    elif most and not length.may_pay(most):
        pays = f"{each}, where drafts never pay, not even those that are all accepted."
        if not cost.of_round(1):
            pays += f" With one request those pay that are accepted more often than {alone:.2f}."
    elif cost.of_round(1):
        pays = f"{each}."
    else:
        pays = f"{each}, and drafts pay that are accepted more often than that."
    return (
        f"speculation is off in steps in which it would lose (speculative.adaptive): {pays}{begins} "
        f"{_probes(length, 'a token')}"
    )


def _probes(length: AdaptiveLength, what: str) -> str:
    if not length.may_pay(1):
        return "Nothing is drafted then, unless speculative.adaptive is false."
    return f"One step in {PROBE_STEPS} to {MOST_PROBE_STEPS} drafts {what} all the same, to see."
