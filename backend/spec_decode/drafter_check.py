"""Who is to draft, as far as it can be told before a target is fetched or loaded."""

from __future__ import annotations

from typing import cast

from backend.config import EngineConfig
from backend.core.speculation import HEAD_METHODS, check_speculation
from backend.models import store
from backend.models.sources import is_pullable, resolve_source
from backend.spec_decode.heads.head_config import HeadKind, named_head, refuse_head
from backend.spec_decode.heads.shipped import check_comes_by_name, shipped_head


def check_drafter(config: EngineConfig) -> None:
    """Find what keeps a config's proposer from drafting. Imports torch only to tell a target by its weights, for a head.

    Raises:
        ConfigError: settings do not go together, or no head comes for the target, or the one named is of another kind.
        ModelError: the head or the draft model that is named cannot be used, or the target cannot.
    """
    check_speculation(config)
    settings, target = config.speculative, config.model.name
    if settings.method in HEAD_METHODS:
        kind = cast(HeadKind, settings.method)
        if settings.model is not None:
            named_head(kind, settings.model)
        elif is_pullable(target) and not store.is_complete(target):
            check_comes_by_name(kind, target)
        else:
            shipped_head(kind, resolve_source(target))
    elif settings.model is not None and settings.model != target:
        refuse_head(settings.model)
        resolve_source(settings.model)
