"""The requests of a workload: its prompts, lengths, seeds and arrivals, all fixed by the workload and its seed."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from backend.errors import ConfigError
from backend.sampling_params import SamplingParams
from backend.workload.arrivals import arrival_times
from backend.workload.draws import Purpose, lengths, request_seed, token_ids
from backend.workload.prompts import BUILT_IN_PROMPTS
from backend.workload.spec import PromptsSource, SharedPrefixSource, SyntheticSource, Workload
from backend.workload.targets import Prompt

MAX_PROMPT_TOKENS = 20_000_000  # random ids are drawn before the run, and all kept


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    index: int  # measured and warm-up requests count from 0 each
    prompt: Prompt
    sampling: SamplingParams
    arrival_s: float | None  # after the measured part's start; None where earlier ends decide, and for warm-up


def count_requests(workload: Workload) -> int:
    """How many requests are measured. Reads a prompts file. Raises `ConfigError` when it cannot be used."""
    source = workload.source
    if isinstance(source, SyntheticSource):
        return source.num_requests
    if isinstance(source, SharedPrefixSource):
        return source.groups * source.prompts_per_group
    return len(_texts(source))


def check_workload(workload: Workload) -> None:
    """Find what no model could make possible, without drawing a prompt. Raises `ConfigError`."""
    count = count_requests(workload)
    for number, warmup in ((count, False), (workload.warmup_requests, True)):
        _max_tokens(workload, number, warmup=warmup)
        if not isinstance(workload.source, PromptsSource):
            _prompt_lengths(workload, number, warmup=warmup)


def build_requests(workload: Workload, vocab_size: int | None) -> list[WorkloadRequest]:
    """The measured requests, in order of arrival.

    Args:
        workload: what to build.
        vocab_size: ids of the model, needed where prompts are random ids; None when the target cannot tell.

    Raises `ConfigError` for a prompts file or list that cannot be used, or a vocabulary that is needed and not known.
    """
    prompts = _prompts(workload, vocab_size)
    times = arrival_times(workload.arrivals, len(prompts), workload.seed)
    return _with_sampling(workload, prompts, times, warmup=False)


def build_warmup_requests(workload: Workload, vocab_size: int | None) -> list[WorkloadRequest]:
    """`workload.warmup_requests` requests like the measured ones: texts from the first on, random ids of their own."""
    count = workload.warmup_requests
    if isinstance(workload.source, PromptsSource):
        texts = _texts(workload.source)
        prompts = [Prompt(text=texts[i % len(texts)], chat=workload.source.chat) for i in range(count)]
    else:
        prompts = _random_prompts(workload, vocab_size, count, warmup=True)
    return _with_sampling(workload, prompts, None, warmup=True)


def prompts_digest(requests: Iterable[WorkloadRequest]) -> str:
    """SHA-256 over all prompts in order: equal digests, equal prompts, wherever they were read from."""
    digest = hashlib.sha256()
    for request in requests:
        prompt = request.prompt
        line = json.dumps([prompt.text, prompt.token_ids, prompt.chat], separators=(",", ":"))
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def _with_sampling(
    workload: Workload, prompts: list[Prompt], times: list[float] | None, *, warmup: bool
) -> list[WorkloadRequest]:
    max_tokens = _max_tokens(workload, len(prompts), warmup=warmup)
    settings = {name: getattr(workload.sampling, name) for name in type(workload.sampling).model_fields}
    return [
        WorkloadRequest(
            index=index,
            prompt=prompt,
            sampling=SamplingParams(
                **settings,
                seed=request_seed(workload.seed, index, warmup=warmup),
                max_tokens=max_tokens[index],
            ),
            arrival_s=None if times is None else times[index],
        )
        for index, prompt in enumerate(prompts)
    ]


def _max_tokens(workload: Workload, count: int, *, warmup: bool) -> list[int]:
    max_tokens = lengths(workload.output_len, workload.seed, Purpose.OUTPUT_LENGTHS, count, warmup=warmup)
    if max_tokens and workload.sampling.min_tokens > min(max_tokens):
        raise ConfigError(
            f"sampling.min_tokens = {workload.sampling.min_tokens} is above the shortest output_len of this workload, "
            f"{min(max_tokens)}"
        )
    return max_tokens


def _prompts(workload: Workload, vocab_size: int | None) -> list[Prompt]:
    source = workload.source
    if isinstance(source, PromptsSource):
        return [Prompt(text=text, chat=source.chat) for text in _texts(source)]
    return _random_prompts(workload, vocab_size, count_requests(workload), warmup=False)


def _random_prompts(workload: Workload, vocab_size: int | None, count: int, *, warmup: bool) -> list[Prompt]:
    """Each prompt has a stream of its own, so its first ids do not change with its length or its neighbours'."""
    source, seed = workload.source, workload.seed
    if vocab_size is None:
        raise ConfigError(
            f"source.kind = {source.kind!r} draws token ids, but the target does not tell the size of its vocabulary; "
            "allowed here: 'prompts'"
        )
    sizes = _prompt_lengths(workload, count, warmup=warmup)
    prefixes: list[tuple[int, ...]] = [()]
    if isinstance(source, SharedPrefixSource):
        prefixes = [
            token_ids(vocab_size, seed, Purpose.PREFIX_IDS, source.prefix_len, index=group, warmup=warmup)
            for group in range(min(source.groups, count))
        ]
    # Groups take turns, so that a group's prompts arrive apart, as those of different users would.
    return [
        Prompt(
            token_ids=prefixes[index % len(prefixes)]
            + token_ids(vocab_size, seed, Purpose.PROMPT_IDS, size, index=index, warmup=warmup)
        )
        for index, size in enumerate(sizes)
    ]


def _prompt_lengths(workload: Workload, count: int, *, warmup: bool) -> list[int]:
    """Lengths of random prompts, without the prefix that groups share. Raises `ConfigError` if they are too much in all."""
    source = workload.source
    if isinstance(source, SyntheticSource):
        length, prefix_len = source.prompt_len, 0
    elif isinstance(source, SharedPrefixSource):
        length, prefix_len = source.suffix_len, source.prefix_len
    else:
        raise AssertionError(source.kind)
    sizes = lengths(length, workload.seed, Purpose.PROMPT_LENGTHS, count, warmup=warmup)
    num_tokens = sum(sizes) + count * prefix_len
    if num_tokens > MAX_PROMPT_TOKENS:
        raise ConfigError(
            f"the workload's prompts have {num_tokens:,} tokens in all; at most {MAX_PROMPT_TOKENS:,} are allowed"
        )
    return sizes


def _texts(source: PromptsSource) -> list[str]:
    limit = None if source.limit is None else min(source.limit, sys.maxsize)  # more is no number of items to Python
    if source.file is not None:
        return _read_jsonl(Path(source.file), source.field, limit)
    prompts = list(islice(BUILT_IN_PROMPTS if source.prompts is None else source.prompts, limit))
    for index, text in enumerate(prompts):
        _check_text(text, f"source.prompts[{index}]")
    return prompts


def _read_jsonl(path: Path, field: str, limit: int | None) -> list[str]:
    try:
        with path.expanduser().open("rb") as lines:
            texts = list(islice(_read_lines(path, lines, field), limit))
    except OSError as error:
        raise ConfigError(f"source.file = {str(path)!r}: {(error.strerror or str(error)).lower()}") from None
    except (RuntimeError, ValueError):  # an unknown user's ~, a null character
        raise ConfigError(f"source.file = {str(path)!r}: no such file or directory") from None
    if not texts:
        raise ConfigError(f"{path} holds no prompts; expected one JSON object per line with the key {field!r}")
    return texts


def _read_lines(path: Path, lines: Iterable[bytes], field: str) -> Iterator[str]:
    """The prompt in each line; blank lines are passed over."""
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            record: Any = json.loads(text) if text.strip() else None
        except UnicodeDecodeError:
            raise ConfigError(f"{where}: not UTF-8 text") from None
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
            if type(error) is ValueError:
                reason = "a number has thousands of digits"
            raise ConfigError(f"{where}: not JSON ({reason}); expected one JSON object per line") from None
        if not text.strip():
            continue
        if not isinstance(record, dict):
            raise ConfigError(f"{where}: expected a JSON object with the key {field!r}, not {_kind(record)}")
        if field not in record:
            keys = ", ".join(repr(key) for key in record) or "none"
            raise ConfigError(f"{where}: no key {field!r}; keys in this line: {keys}")
        value = record[field]
        if isinstance(value, list) and value:
            value = value[0]
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {field!r} is {_kind(value)}; expected a string or a list beginning with one")
        _check_text(value, where)
        yield value


def _check_text(text: str, where: str) -> None:
    if not text:
        raise ConfigError(f"{where}: the prompt is empty; a prompt needs at least one character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: the prompt holds half of a surrogate pair, which is no character") from None


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", dict: "an object"}
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    return "null" if value is None else names[type(value)]
