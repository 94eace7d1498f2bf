"""The tokenizer that a GGUF file's metadata describes."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from backend.tokenizer import FolderTokenizer
from tests.models.tiny_gguf import SPECIALS, convert, tiny_gguf


def test_token_kinds(tmp_path: Path) -> None:
    """Control tokens are skipped in text, user-defined ones are text, unused ones do not exist."""
    tiny = tiny_gguf()
    for token, kind in (("[tool]", gguf.TokenType.USER_DEFINED), ("[PAD9]", gguf.TokenType.UNUSED)):
        tiny.tokens.append(token)
        tiny.token_types.append(kind)
    size = tiny.metadata["llama.vocab_size"] = len(tiny.tokens)
    tiny.tensors["token_embd.weight"] = np.zeros((size, 64), np.float32)
    tokenizer = FolderTokenizer("tiny", convert(tiny, tmp_path))
    tool = size - 2
    assert tokenizer.encode("a[tool]b") == [tiny.tokens.index("a"), tool, tiny.tokens.index("b")]
    assert tokenizer.decode([tool, 1, size - 1, tiny.tokens.index("a")]) == "[tool]a"
    assert size - 1 not in tokenizer.encode("[PAD9]")
    assert tokenizer.encode("<|im_end|>") == [2]
    assert [tokenizer.encode(token)[0] for token in SPECIALS] == [0, 1, 2]


def test_smollm_splits_digits_before_anything_merges_across_them(tmp_path: Path) -> None:
    tiny = tiny_gguf()
    tokenizer = FolderTokenizer("tiny", convert(tiny, tmp_path))
    ids = {token: i for i, token in enumerate(tiny.tokens)}
    assert tokenizer.encode("\n\n1.") == [ids["ĊĊ"], ids["1"], ids["."]]
    assert tokenizer.encode("\n123") == [ids["Ċ"], ids["1"], ids["2"], ids["3"]]
    assert tokenizer.encode(" the") == [ids["Ġthe"]]


def test_llama_bpe_groups_up_to_three_digits_and_takes_whole_words_first(tmp_path: Path) -> None:
    tiny = tiny_gguf(pre="llama-bpe")
    tiny.merges.remove("Ġt he")  # " the" stays a token, but no merge leads to it
    tokenizer = FolderTokenizer("tiny", convert(tiny, tmp_path))
    ids = {token: i for i, token in enumerate(tiny.tokens)}
    assert tokenizer.encode("1234") == [ids["123"], ids["4"]]
    assert tokenizer.encode(" the") == [ids["Ġthe"]]
    assert tokenizer.encode("\n\n1.") == [ids["ĊĊ"], ids["1"], ids["."]]
    assert tokenizer.encode("ing\n\n") == [ids["ing"], ids["ĊĊ"]]
    assert tokenizer.decode(tokenizer.encode("I'LL pay 12345 for\t the  x.\r\n")) == "I'LL pay 12345 for\t the  x.\r\n"


def test_transformers_loads_the_same_tokenizer_from_the_folder(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tiny = tiny_gguf()
    folder = convert(tiny, tmp_path)
    oracle = AutoTokenizer.from_pretrained(folder)
    ours = FolderTokenizer("tiny", folder)
    messages = [{"role": "user", "content": "the 123\n\n1 thing<|im_end|>"}]
    assert ours.encode_chat(messages) == oracle.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert (oracle.bos_token_id, oracle.eos_token_id, oracle.pad_token_id, oracle.unk_token_id) == (1, 2, 2, 0)
