"""Whether two models mean the same tokens by the same ids."""

from __future__ import annotations

import tokenizers

from backend.errors import ConfigError
from backend.models.sources import ModelSource


def check_same_tokens(target: ModelSource, draft: ModelSource) -> None:
    """Raise `ConfigError`, naming the first token that differs, unless a draft's ids are the target's.

    How many rows of padding a model's embedding has behind its last token makes no difference.
    """
    ours, theirs = _tokens(target), _tokens(draft)
    for token_id in sorted(ours.keys() | theirs.keys()):
        if ours.get(token_id) != theirs.get(token_id):
            raise ConfigError(
                f"speculative.model = {draft.name!r} has another vocabulary than {target.name}: token {token_id} is "
                f"{_shown(theirs.get(token_id))} there, and {_shown(ours.get(token_id))} here; a draft model needs the "
                "same tokenizer"
            )


def _tokens(source: ModelSource) -> dict[int, str]:
    """Nothing of a dummy, whose ids mean nothing."""
    if source.path is None:
        return {}
    tokenizer = tokenizers.Tokenizer.from_file(str(source.path / "tokenizer.json"))
    return {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)
