"""Requests of a workload: same seed, same requests; independent streams; every bad line named."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from backend.errors import ConfigError
from backend.workload import datasets
from backend.workload.datasets import (
    WorkloadRequest,
    build_requests,
    build_warmup_requests,
    check_workload,
    count_requests,
    prompts_digest,
)
from backend.workload.draws import Purpose, lengths, request_seed, token_ids, uniforms
from backend.workload.prompts import BUILT_IN_PROMPTS
from backend.workload.spec import NormalLength, UniformLength, Workload


def build(data: dict[str, Any], vocab_size: int | None = 512) -> list[WorkloadRequest]:
    return build_requests(Workload.from_dict(data), vocab_size)


def ids(request: WorkloadRequest) -> tuple[int, ...]:
    assert request.prompt.token_ids is not None
    return request.prompt.token_ids


def jsonl(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines) + b"\n")
    return path


def from_file(path: Path, **source: Any) -> list[WorkloadRequest]:
    return build({"source": {"kind": "prompts", "file": str(path), **source}}, None)


def test_default_is_the_sixteen_built_in_prompts():
    requests = build_requests(Workload(), None)
    assert [request.prompt.text for request in requests] == list(BUILT_IN_PROMPTS)
    assert len(requests) == len(set(BUILT_IN_PROMPTS)) == count_requests(Workload()) == 16
    assert all(request.prompt.chat and request.prompt.token_ids is None for request in requests)
    assert {(r.sampling.max_tokens, r.sampling.temperature, r.arrival_s) for r in requests} == {(64, 0.0, 0.0)}
    assert len({request.sampling.seed for request in requests}) == 16
    assert any(not prompt.isascii() for prompt in BUILT_IN_PROMPTS)
    assert max(map(len, BUILT_IN_PROMPTS)) < 500


def test_same_seed_same_requests_in_another_process():
    data = {
        "source": {"kind": "shared_prefix", "groups": 3, "suffix_len": {"kind": "normal", "mean": 30.0, "std": 9.0}},
        "arrivals": {"kind": "poisson", "rate": 4.0},
        "output_len": {"kind": "uniform", "min": 16, "max": 64},
        "seed": 11,
    }
    code = (
        "import json, sys; from backend.workload.spec import Workload; from backend.workload.datasets import build_requests;"
        "print(repr(build_requests(Workload.from_dict(json.loads(sys.argv[1])), 512)))"
    )
    command = [sys.executable, "-c", code, json.dumps(data)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "3"})
    assert done.stdout.strip() == repr(build(data))
    assert build(data) != build(data | {"seed": 12})


def test_sampling_settings_reach_every_request():
    requests = build({"sampling": {"temperature": 0.7, "top_p": 0.9, "stop": ["END"], "ignore_eos": True}})
    assert {(r.sampling.temperature, r.sampling.top_p, r.sampling.stop, r.sampling.ignore_eos) for r in requests} == {
        (0.7, 0.9, ("END",), True)
    }
    with pytest.raises(ConfigError, match="min_tokens = 20 is above the shortest output_len of this workload, 16"):
        build({"sampling": {"min_tokens": 20}, "output_len": 16})


def test_request_seeds_are_a_documented_hash():
    assert request_seed(0, 0) == 572642647582029405  # SHA-256("request:0:0"), 8 bytes, shifted by one
    seeds = {
        request_seed(seed, index, warmup=warmup)
        for seed in range(20)
        for index in range(50)
        for warmup in (False, True)
    }
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_list_of_prompts_and_limit():
    source = {"kind": "prompts", "prompts": ["one", "two", "three"], "chat": False}
    assert [r.prompt.text for r in build({"source": source})] == ["one", "two", "three"]
    limited = build({"source": {**source, "limit": 2}})
    assert [r.prompt.text for r in limited] == ["one", "two"]
    assert not limited[0].prompt.chat
    assert len(build({"source": {"kind": "prompts", "limit": 5}})) == 5
    with pytest.raises(ConfigError, match=r"source.prompts\[1\]: the prompt is empty"):
        build({"source": {"kind": "prompts", "prompts": ["one", ""]}})


def test_jsonl_strings_and_lists(tmp_path: Path):
    path = jsonl(
        tmp_path, b"\xef\xbb\xbf" + b'{"turns": ["first", "second"]}', "", '{"turns": "na\\u00efve \U0001f600"}'
    )
    requests = from_file(path, field="turns")
    assert [request.prompt.text for request in requests] == ["first", "naïve 😀"]
    assert count_requests(Workload.from_dict({"source": {"kind": "prompts", "file": str(path), "field": "turns"}})) == 2


def test_limit_reads_no_further_than_needed(tmp_path: Path):
    path = jsonl(tmp_path, '{"prompt": "good"}', "not json")
    assert [request.prompt.text for request in from_file(path, limit=1)] == ["good"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"prompts.jsonl:2: not JSON .*expected one JSON object per line"),
        ('"text"', r"prompts.jsonl:2: expected a JSON object with the key 'prompt', not a string"),
        ("[1]", r"prompts.jsonl:2: expected a JSON object with the key 'prompt', not a list"),
        ("null", r"prompts.jsonl:2: expected a JSON object with the key 'prompt', not null"),
        ('{"text": "x", "id": 1}', r"prompts.jsonl:2: no key 'prompt'; keys in this line: 'text', 'id'"),
        ('{"prompt": 3}', r"prompts.jsonl:2: 'prompt' is a number; expected a string or a list beginning with one"),
        ('{"prompt": []}', r"prompts.jsonl:2: 'prompt' is an empty list"),
        ('{"prompt": [{"role": "user"}]}', r"prompts.jsonl:2: 'prompt' is an object"),
        ('{"prompt": ""}', r"prompts.jsonl:2: the prompt is empty"),
        ('{"prompt": "\\ud800"}', r"prompts.jsonl:2: the prompt holds half of a surrogate pair"),
        (b'{"prompt": "\xff"}', r"prompts.jsonl:2: not UTF-8"),
        ("[" * 100_000, r"prompts.jsonl:2: not JSON \(nested too deeply\)"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str | bytes, message: str):
    with pytest.raises(ConfigError, match=message):
        from_file(jsonl(tmp_path, '{"prompt": "good"}', line))


def test_bad_files_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere.jsonl': no such file"):
        from_file(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match="is a directory"):
        from_file(tmp_path)
    with pytest.raises(ConfigError, match="holds no prompts; expected one JSON object per line with the key 'prompt'"):
        from_file(jsonl(tmp_path, "", "  "))


@pytest.mark.parametrize(
    "data",
    [
        {"source": {"kind": "prompts", "prompts": ["a", ""]}},
        {"source": {"kind": "prompts", "file": "/nowhere.jsonl"}},
        {"source": {"kind": "prompts", "file": "~nobody-of-this-name/x"}},
        {"source": {"kind": "prompts", "file": "a\0b"}},
        {"sampling": {"min_tokens": 20}, "output_len": {"kind": "uniform", "min": 16, "max": 32}},
        {"source": {"kind": "synthetic", "prompt_len": 2**24}},
        {"source": {"kind": "shared_prefix", "prefix_len": 2**24}},
    ],
)
def test_the_check_without_a_model_finds_what_building_would(data: dict[str, Any]):
    workload = Workload.from_dict(data)
    with pytest.raises(ConfigError) as built:
        build_requests(workload, 512)
    with pytest.raises(ConfigError) as checked:
        check_workload(workload)
    assert str(checked.value) == str(built.value)


def test_the_check_draws_no_prompt(monkeypatch: pytest.MonkeyPatch):
    def draw(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("a prompt was drawn")

    monkeypatch.setattr(datasets, "token_ids", draw)
    synthetic = {"source": {"kind": "synthetic", "num_requests": 100_000, "prompt_len": 200}}
    check_workload(Workload.from_dict(synthetic))
    check_workload(Workload.from_dict({"source": {"kind": "prompts", "limit": 10**23}, "warmup_requests": 0}))
    with pytest.raises(AssertionError, match="drawn"):
        build(synthetic, 50)


def test_synthetic_lengths_are_exact_and_ids_in_range():
    requests = build({"source": {"kind": "synthetic", "num_requests": 5, "prompt_len": 100}, "output_len": 7}, 50)
    assert [len(ids(request)) for request in requests] == [100] * 5
    assert len({ids(request) for request in requests}) == 5
    assert all(0 <= token_id < 50 for request in requests for token_id in ids(request))
    assert {request.sampling.max_tokens for request in requests} == {7}
    assert all(request.prompt.text is None and not request.prompt.chat for request in requests)
    with pytest.raises(ConfigError, match=r"source.kind = 'synthetic' draws token ids.*allowed here: 'prompts'"):
        build({"source": {"kind": "synthetic"}}, None)


def test_more_requests_begin_with_the_same_ones():
    def requests(count: int, **changes: Any) -> list[WorkloadRequest]:
        spread = {"kind": "uniform", "min": 3, "max": 90}
        source = {"kind": "synthetic", "num_requests": count, "prompt_len": spread}
        return build({"source": source, "output_len": spread, "arrivals": {"kind": "poisson", "rate": 2.0}, **changes})

    assert requests(9) == requests(40)[:9]


def test_prompts_lengths_and_arrivals_are_independent_streams():
    def requests(prompt_len: Any = 20, **changes: Any) -> list[WorkloadRequest]:
        return build({"source": {"kind": "synthetic", "prompt_len": prompt_len}, **changes})

    spread = {"kind": "uniform", "min": 5, "max": 90}
    base = requests(output_len=spread)
    arriving = requests(output_len=spread, arrivals={"kind": "poisson", "rate": 2.0})
    assert [(ids(r), r.sampling) for r in base] == [(ids(r), r.sampling) for r in arriving]
    longer = requests(prompt_len=50, output_len=spread)
    assert [ids(r)[:20] for r in longer] == [ids(r) for r in base]
    assert [r.sampling for r in longer] == [r.sampling for r in base]
    both = requests(prompt_len=spread, output_len=spread)
    assert [len(ids(r)) for r in both] != [r.sampling.max_tokens for r in both]


def test_shared_prefix_groups():
    source = {"kind": "shared_prefix", "groups": 3, "prompts_per_group": 4, "prefix_len": 10, "suffix_len": 5}
    requests = build({"source": source})
    assert count_requests(Workload.from_dict({"source": source})) == len(requests) == 12
    prefixes = [ids(request)[:10] for request in requests]
    assert len(set(prefixes)) == 3
    assert prefixes == prefixes[:3] * 4  # groups take turns
    assert len({ids(request)[10:] for request in requests}) == 12


def test_warmup_requests_are_others_of_the_same_kind():
    workload = Workload.from_dict({"source": {"kind": "synthetic", "num_requests": 3}, "warmup_requests": 2})
    warmup, measured = build_warmup_requests(workload, 512), build_requests(workload, 512)
    assert [len(ids(request)) for request in warmup] == [128, 128]
    assert not {ids(request) for request in warmup} & {ids(request) for request in measured}
    assert not {r.sampling.seed for r in warmup} & {r.sampling.seed for r in measured}
    texts = build_warmup_requests(Workload(warmup_requests=18), None)
    assert [request.prompt.text for request in texts] == [*BUILT_IN_PROMPTS, *BUILT_IN_PROMPTS[:2]]
    assert build_warmup_requests(Workload(warmup_requests=0), None) == []


def test_lengths_have_the_distribution_that_was_asked_for():
    count = 20_000
    uniform = np.array(lengths(UniformLength(min=3, max=12), 0, Purpose.PROMPT_LENGTHS, count))
    assert stats.chisquare(np.bincount(uniform, minlength=13)[3:]).pvalue > 0.01
    assert (uniform.min(), uniform.max()) == (3, 12)
    normal = np.array(lengths(NormalLength(mean=200.0, std=30.0), 0, Purpose.PROMPT_LENGTHS, count))
    assert normal.mean() == pytest.approx(200, abs=1)
    assert normal.std() == pytest.approx(30, abs=1)
    assert stats.kstest(normal + uniforms(5, Purpose.ARRIVALS, count) - 0.5, "norm", args=(200, 30)).pvalue > 0.01
    cut = lengths(NormalLength(mean=10.0, std=30.0, min=5, max=20), 0, Purpose.PROMPT_LENGTHS, 1000)
    assert (min(cut), max(cut)) == (5, 20)
    assert lengths(NormalLength(mean=10.4, std=0.0), 0, Purpose.PROMPT_LENGTHS, 2) == [10, 10]
    assert lengths(UniformLength(min=4, max=4), 0, Purpose.PROMPT_LENGTHS, 2) == [4, 4]


def test_ids_are_uniform():
    drawn = np.array(token_ids(97, 5, Purpose.PROMPT_IDS, 97_000))
    assert stats.chisquare(np.bincount(drawn, minlength=97)).pvalue > 0.01


def test_digest_depends_on_the_prompts_only(tmp_path: Path):
    path = jsonl(tmp_path, *(json.dumps({"prompt": prompt}) for prompt in BUILT_IN_PROMPTS))
    built_in = build_requests(Workload(), None)
    assert prompts_digest(from_file(path)) == prompts_digest(built_in)
    assert prompts_digest(build({"seed": 9, "output_len": 5})) == prompts_digest(built_in)
    assert prompts_digest(built_in[:-1]) != prompts_digest(built_in)
    assert prompts_digest(from_file(path, chat=False)) != prompts_digest(built_in)
    assert prompts_digest(reversed(built_in)) != prompts_digest(built_in)
    fixed = build({"source": {"kind": "prompts", "prompts": ["a", "b"], "chat": False}})
    assert prompts_digest(fixed) == hashlib.sha256(b'["a",null,false]\n["b",null,false]\n').hexdigest()
