"""`speculative.*`: what goes together with speculation, and what is turned off for it."""

from __future__ import annotations

from backend.config import EngineConfig
from backend.core.draft_length import PROBE_STEPS
from backend.errors import ConfigError

HEAD_METHODS = ("eagle", "medusa")  # of `speculative.method`, those that read the target's hidden states


def check_speculation(config: EngineConfig) -> None:
    """Raise `ConfigError` for settings that speculation does not go together with."""
    method, layout = config.speculative.method, config.cache.layout
    if method != "none" and layout == "none":
        raise ConfigError(
            f"speculative.method = {method!r} does not go together with cache.layout = {layout!r}: without keys and values "
            "of the tokens before them drafts cannot be verified together; allowed are 'paged', 'contiguous'"
        )


def resolve_speculation(
    resolved: EngineConfig, longest_draft: int | None = None
) -> tuple[EngineConfig, tuple[str, ...]]:
    """Turn off what speculation cannot do, and say where it is off itself; a sentence each.

    Args:
        resolved: the config, whose other fields are resolved already.
        longest_draft: tokens that the proposer can draft at most; None: any number.
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
    if settings.method in HEAD_METHODS and not resolved.kernels.enforce_eager:
        resolved = resolved.with_overrides({"kernels.enforce_eager": True})
        notices.append(
            f"kernels.enforce_eager is on: speculative.method = {settings.method!r} reads hidden states, which the CUDA "
            "graphs do not leave."
        )
    if settings.max_batch is not None:
        notices.append(
            f"speculation is off in steps in which more than {settings.max_batch:,} requests decode (speculative.max_batch)."
        )
    if settings.adaptive:
        notices.append(
            "speculation is off for requests whose drafts are accepted so seldom that it would lose; they are tried again "
            f"every {PROBE_STEPS} steps (speculative.adaptive)."
        )
    if resolved.scheduler.async_scheduling:
        resolved = resolved.with_overrides({"scheduler.async_scheduling": False})
        notices.append(
            "scheduler.async_scheduling is off: with speculation a step needs the result of the one before, which tells how "
            "many drafts were accepted."
        )
    return resolved, tuple(notices)
