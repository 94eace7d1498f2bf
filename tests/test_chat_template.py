"""Chat templates against transformers, which renders the same templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.errors import ModelError, RequestError
from backend.tokenizer import FolderTokenizer
from tests.helpers import make_tiny_llama
from tests.json_files import change_json


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "llama")


def load(folder: Path) -> FolderTokenizer:
    return FolderTokenizer("tiny-llama", folder)


def compare_chats(folder: Path, messages: list[dict[str, str]]) -> list[int]:
    from transformers import AutoTokenizer

    ids = load(folder).encode_chat(messages)
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, add_generation_prompt=True)
    assert ids == expected["input_ids"]
    return ids


# How older versions of transformers write a special token.
AS_OBJECT = {"__type": "AddedToken", "content": "<|endoftext|>", "lstrip": False, "rstrip": False, "normalized": False}

TEMPLATES = {
    "white space": (
        "{%- for m in messages %}\n  {% if m.role == 'user' %}\n [{{ m.content | trim }}]\n  {% endif %}\n{%- endfor %}"
    ),
    "json": "{{ messages | tojson }} {{ messages | tojson(indent=2) }}",
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "prompt": "{% if add_generation_prompt %}go{% endif %}{% if tools is not none %}tools{% endif %}",
    "undefined": "{{ nothing }}{{ messages[0].missing }}{{ messages[0].content }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_templates_render_as_in_transformers(folder: Path, template: str) -> None:
    change_json(folder / "tokenizer_config.json", chat_template=template, bos_token=AS_OBJECT)
    compare_chats(folder, [{"role": "user", "content": " <a & 'é'> "}, {"role": "assistant", "content": "b"}])


def test_a_template_file_comes_before_the_configuration(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("file: {{ messages[0].content }}")
    assert load(folder).decode(compare_chats(folder, [{"role": "user", "content": "x"}])) == "file: x"


def test_of_several_templates_the_default_is_taken(folder: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    change_json(folder / "tokenizer_config.json", chat_template=templates)
    assert load(folder).decode(compare_chats(folder, [{"role": "user", "content": "x"}])) == "plain"


def test_what_a_template_refuses_is_said(folder: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    change_json(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(RequestError, match="refuses this conversation: roles must alternate"):
        load(folder).encode_chat([{"role": "user", "content": "x"}])
    change_json(folder / "tokenizer_config.json", chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RequestError, match="refuses"):
        load(folder).encode_chat([{"role": "user", "content": "x"}])
    with pytest.raises(RequestError, match="at least one message"):
        load(folder).encode_chat([])


def test_a_template_that_is_not_jinja_is_refused_at_load(folder: Path) -> None:
    change_json(folder / "tokenizer_config.json", chat_template="{% for x in %}")
    with pytest.raises(ModelError, match="chat template that cannot be used"):
        load(folder)
