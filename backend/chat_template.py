"""A model's chat template: Jinja that turns a conversation into the text the model was trained on.

Templates come with the model, so they run in Jinja's sandbox. What they may call is what transformers offers them.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any, Self

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from backend.errors import ModelError, RequestError


class ChatTemplate:
    """A compiled template with the special tokens it may name."""

    def __init__(self, text: str, special_tokens: dict[str, str]) -> None:
        """Compile. Raises `jinja2.TemplateSyntaxError`."""
        self._template = _environment().from_string(text)
        self._special_tokens = special_tokens

    @classmethod
    def load(cls, folder: Path, tokenizer_config: dict[str, Any]) -> Self | None:
        """The template of a model folder: chat_template.jinja if there, else the one in tokenizer_config.json.

        Raises:
            ModelError: it is not valid Jinja.
        """
        path = folder / "chat_template.jinja"
        text = tokenizer_config.get("chat_template")
        try:
            if path.is_file():
                text = path.read_text(encoding="utf-8")
            elif isinstance(text, list):  # several by name
                text = next((entry["template"] for entry in text if entry["name"] == "default"), None)
            if text is None:
                return None
            return cls(text, _special_tokens(tokenizer_config))
        except (OSError, ValueError, KeyError, TypeError, jinja2.TemplateError) as error:
            raise ModelError(f"{folder} has a chat template that cannot be used: {error}") from None

    def render(self, messages: list[dict[str, str]]) -> str:
        """The conversation as text, up to where the assistant's answer begins.

        Raises:
            RequestError: there is no message, or the template refuses the conversation.
        """
        if not messages:
            raise RequestError("a chat needs at least one message")
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        # A template may fail in any way that Python can, for instance by adding a string to a missing value.
        except Exception as error:
            raise RequestError(f"the model's chat template refuses this conversation: {error}") from None


def token_text(value: Any) -> str | None:
    """A special token in tokenizer_config.json, where it is written as a string or as an object with its properties."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    named = {key: token_text(value) for key, value in tokenizer_config.items() if key.endswith("_token")}
    return {key: text for key, text in named.items() if text is not None}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment


def _to_json(value: Any, **options: Any) -> str:
    """Jinja's own filter escapes HTML characters, which no model was trained on."""
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _GenerationBlocks(Extension):
    """`{% generation %}` marks the assistant's text for training; the text is rendered as if the mark were not there."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
