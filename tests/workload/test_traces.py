"""Traces: every row becomes a request of its lengths at its time, shared blocks are shared ids, bad lines are named."""

from __future__ import annotations

import json
import math
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any

import pytest

from backend.errors import ConfigError
from backend.workload.datasets import (
    WorkloadRequest,
    build_requests,
    build_warmup_requests,
    check_workload,
    count_requests,
    workload_notices,
)
from backend.workload.spec import Workload

HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
ROWS = [
    b"2023-11-16 18:15:46.6805900,374,44\r\n",
    b"2023-11-16 18:15:50.9951690,396,109\r\n",
    b"2023-11-16 18:15:50.9951690,87,5\r\n",
    b"2023-11-16 18:16:00.0000001,2,700\r\n",
]
TIMES = [0.0, 4.3145790, 4.3145790, 13.3194101]  # by hand
LENGTHS = [(374, 44), (396, 109), (87, 5), (2, 700)]


def trace(folder: Path, content: bytes, **source: Any) -> Workload:
    path = folder / "trace.csv"
    path.write_bytes(content)
    return Workload.from_dict({"source": {"kind": "trace", "file": str(path), **source}})


def mooncake(folder: Path, lines: list[Any], **source: Any) -> Workload:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return Workload.from_dict({"source": {"kind": "mooncake", "file": str(path), **source}})


def row(timestamp: Any, input_length: Any, output_length: Any, hash_ids: Any) -> dict[str, Any]:
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": hash_ids,
    }


def ids(request: WorkloadRequest) -> tuple[int, ...]:
    assert request.prompt.token_ids is not None
    return request.prompt.token_ids


def lengths(requests: list[WorkloadRequest]) -> list[tuple[int, int]]:
    return [(len(ids(request)), request.sampling.max_tokens) for request in requests]


def common(first: Any, second: Any) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


def test_a_csv_trace_is_replayed_as_it_was(tmp_path: Path):
    workload = trace(tmp_path, HEADER + b"".join(ROWS))
    requests = build_requests(workload, 1000)
    assert [request.arrival_s for request in requests] == pytest.approx(TIMES, abs=1e-9)
    assert lengths(requests) == LENGTHS
    assert all(request.sampling.ignore_eos for request in requests), "an answer is as long as the trace's"
    assert count_requests(workload) == 4
    assert len({ids(request)[:2] for request in requests}) == 4
    assert all(0 <= token_id < 1000 for request in requests for token_id in ids(request))
    assert build_requests(workload, 1000) == requests
    assert [ids(r) for r in build_requests(workload.with_overrides({"seed": 1}), 1000)] != [ids(r) for r in requests]


def test_a_csv_trace_as_other_programs_write_it(tmp_path: Path):
    """A byte order mark, quotes, blank lines, columns in another order and more of them, other ways to write a time."""
    content = (
        b'\xef\xbb\xbf"GeneratedTokens", ContextTokens ,Model,TIMESTAMP\n\n'
        b'44,374,"a, b",2023-11-16T19:15:46.68059+01:00\n'
        b'"109","396","two\nlines","2023-11-16 18:15:50.995169Z"\n'
        b" , ,,\n   \n"
        b"5,87,,2023-11-16 18:15:50.9951690\n"
        b"700,2,,2023-11-16 18:16:00.0000001"
    )
    requests = build_requests(trace(tmp_path, content), 1000)
    assert [request.arrival_s for request in requests] == pytest.approx(TIMES, abs=1e-9)
    assert lengths(requests) == LENGTHS


def test_only_the_first_rows_are_read(tmp_path: Path):
    workload = trace(tmp_path, HEADER + b"".join(ROWS[:2]) + b"not a row\r\n", limit=2)
    assert lengths(build_requests(workload, 1000)) == LENGTHS[:2]
    with pytest.raises(ConfigError, match=r"trace.csv:4: 1 values; the file has 3 columns"):
        build_requests(workload.with_overrides({"source.limit": 3}), 1000)


def test_times_are_sped_up_or_replaced(tmp_path: Path):
    workload = trace(tmp_path, HEADER + b"".join(ROWS))
    assert workload.arrivals.kind == "trace"

    def times(**arrivals: Any) -> list[float | None]:
        return [r.arrival_s for r in build_requests(workload.with_overrides({"arrivals": arrivals}), 1000)]

    assert times(kind="trace", speedup=4.0) == pytest.approx([time / 4 for time in TIMES], abs=1e-9)
    assert times(kind="constant", rate=2.0) == [0.0, 0.5, 1.0, 1.5]
    assert times(kind="closed_loop") == [None] * 4
    assert times(kind="all_at_once") == [0.0] * 4


def test_lengths_are_cut_where_asked(tmp_path: Path):
    workload = trace(tmp_path, HEADER + b"".join(ROWS), max_prompt_len=100, max_output_len=50)
    requests = build_requests(workload, 1000)
    assert lengths(requests) == [(100, 44), (100, 50), (87, 5), (2, 50)]
    assert workload_notices(workload, 150) == ()
    whole = build_requests(workload.with_overrides({"source.max_prompt_len": None}), 1000)
    assert [ids(r)[:100] for r in whole] == [ids(r) for r in requests]


def test_lengths_are_cut_to_the_context_and_that_is_said(tmp_path: Path):
    workload = trace(tmp_path, HEADER + b"".join(ROWS))
    # 374 + 44 and 2 + 700 do not fit into 400 tokens, 396 + 109 does not by far.
    assert lengths(build_requests(workload, 1000, 400)) == [(356, 44), (291, 109), (87, 5), (2, 398)]
    assert workload_notices(workload, 400) == ("3 of 4 requests of the trace were cut to the context of 400 tokens",)
    assert workload_notices(workload, 702) == ()
    assert workload_notices(workload, None) == ()
    assert lengths(build_requests(workload, 1000, 702)) == LENGTHS


def test_whatever_the_lengths_what_is_cut_fits_and_nothing_else_is_cut(tmp_path: Path):
    sizes = (1, 2, 49, 50, 51, 99, 100, 101, 5000)
    asked = [(prompt, output) for prompt in sizes for output in sizes]
    rows = "".join(f"2023-11-16 18:15:46,{prompt},{output}\r\n" for prompt, output in asked)
    got = lengths(build_requests(trace(tmp_path, HEADER + rows.encode(), limit=1000), 100, 100))
    for (prompt, output), (cut_prompt, cut_output) in zip(asked, got, strict=True):
        if prompt + output <= 100:
            assert (cut_prompt, cut_output) == (prompt, output)
        else:
            assert cut_prompt + cut_output == 100, "no more is cut than must be"
            assert cut_prompt >= min(prompt, 50)
            assert cut_output >= min(output, 50)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"2023-11-16 18:15:46.68059,374", r":3: 2 values; the file has 3 columns"),
        (b"2023-11-16 18:15:46.68059,374,1,200", r":3: 4 values; the file has 3 columns"),
        (b"2023-11-16 18:15:46.68059,,44", r":3: ContextTokens = '': expected a whole number of tokens from 1"),
        (b"2023-11-16 18:15:46.68059,374,-44", r":3: GeneratedTokens = '-44': expected a whole number"),
        (b"2023-11-16 18:15:46.68059,374,0", r":3: GeneratedTokens = '0': expected .* from 1 to 16,777,216"),
        (b"2023-11-16 18:15:46.68059,3_7,44", r":3: ContextTokens = '3_7': expected a whole number"),
        (b"2023-11-16 18:15:46.68059,3.7,44", r":3: ContextTokens = '3.7': expected a whole number"),
        (b"2023-11-16 18:15:46.68059,\xd9\xa3,44", r":3: ContextTokens = '٣': expected a whole number"),
        (b"2023-11-16 18:15:46.68059,99999999,44", r":3: ContextTokens = '99999999': expected a whole number"),
        (b"2023-11-16 18:15:46.68059," + b"9" * 5000 + b",44", r":3: ContextTokens = '999"),
        (b"2023-13-16 18:15:46.68059,374,44", r":3: TIMESTAMP = '2023-13-16 18:15:46.68059': expected a time such as"),
        (b"1700158546.68,374,44", r":3: TIMESTAMP = '1700158546.68': expected a time"),
        (b",374,44", r":3: TIMESTAMP = '': expected a time"),
        (b"2023-11-16 18:15:46.6805899,374,44", r":3: TIMESTAMP = .*899' is before the row above"),
        (b"2023-11-16 19:15:46.68059+01:01,374,44", r":3: TIMESTAMP = .* is before the row above"),
        (b'2023-11-16 18:15:46.68059,374,"44', r":3: not CSV \(unexpected end of data\)"),
        (b"2023-11-16 18:15:46.68059,374,\xff", r":3: not UTF-8 text"),
        (b'"' + b"x" * 200_000 + b'",374,44', r":3: not CSV \(field larger than field limit"),
    ],
    ids=lambda value: str(value[:48]),
)
def test_bad_rows_are_named_with_line_and_column(tmp_path: Path, line: bytes, message: str):
    workload = trace(tmp_path, HEADER + ROWS[0] + line)
    for function in (check_workload, count_requests):
        with pytest.raises(ConfigError, match=message) as caught:
            function(workload)
        assert str(caught.value).startswith(f"{tmp_path}/trace.csv:3: ")
        assert "\n" not in str(caught.value)


def test_a_line_is_counted_as_an_editor_does(tmp_path: Path):
    """Blank lines and a quoted line break before it included."""
    content = HEADER + b"\r\n" + ROWS[0].replace(b"374", b'"374\n"') + b"\r\n2023-11-16 18:15:47,x,4\r\n"
    with pytest.raises(ConfigError, match=r"trace.csv:6: ContextTokens = 'x'"):
        check_workload(trace(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no requests; expected TIMESTAMP, ContextTokens, GeneratedTokens"),
        (HEADER, "holds no requests"),
        (
            b"TIMESTAMP,Context,GeneratedTokens\n",
            r":1: no column 'ContextTokens'; columns in this file: TIMESTAMP, Context",
        ),
        (ROWS[0], r":1: no column 'TIMESTAMP'; columns in this file: 2023"),
        (
            b"TIMESTAMP,ContextTokens,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3,9,4\n",
            r":1: column 'ContextTokens' is there 2 times",
        ),
    ],
)
def test_files_that_are_no_trace(tmp_path: Path, content: bytes, message: str):
    with pytest.raises(ConfigError, match=message):
        check_workload(trace(tmp_path, content))


def test_endless_lines_and_missing_files_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"zero:1: the line is too long"):
        check_workload(Workload.from_dict({"source": {"kind": "trace", "file": "/dev/zero"}}))
    for kind in ("trace", "mooncake"):
        with pytest.raises(ConfigError, match=r"source.file = '/nowhere': no such file"):
            check_workload(Workload.from_dict({"source": {"kind": kind, "file": "/nowhere"}}))


def test_too_many_tokens_are_refused_before_a_model_is_loaded(tmp_path: Path):
    rows = b"2023-11-16 18:15:46,9000000,5\r\n" * 3
    with pytest.raises(ConfigError, match="prompts have 27,000,000 tokens in all; at most 20,000,000 are allowed"):
        check_workload(trace(tmp_path, HEADER + rows))
    check_workload(trace(tmp_path, HEADER + rows, max_prompt_len=1000))


def test_warmup_requests_have_the_first_lengths_and_ids_of_their_own(tmp_path: Path):
    workload = trace(tmp_path, HEADER + b"".join(ROWS)).with_overrides({"warmup_requests": 5})
    warmup = build_warmup_requests(workload, 1000, 400)
    assert lengths(warmup) == [(356, 44), (291, 109), (87, 5), (2, 398), (356, 44)]
    assert not {ids(request) for request in warmup} & {ids(request) for request in build_requests(workload, 1000, 400)}
    assert build_warmup_requests(workload.with_overrides({"warmup_requests": 0}), 1000) == []


# Prompts of which parts are shared

BLOCKS = [
    row(0, 2000, 500, [0, 1, 2, 3]),
    row(0, 1536, 490, [0, 1, 7]),
    row(3052, 2100, 794, [0, 1, 2, 3, 4]),
    row(3052.5, 600, 1, [8, 9]),
    row(9000, 100, 30, [0]),
    row(9001, 1100, 30, [9, 1]),  # the last block, which is not full, has no id of its own
    row(9001, 1300, 30, [9, 1, 2]),
]


@pytest.mark.parametrize("scale", [1, 16, 512])
def test_prompts_share_what_their_hash_ids_share(tmp_path: Path, scale: int):
    workload = mooncake(tmp_path, BLOCKS, scale=scale)
    requests = build_requests(workload, 50_000)
    block = 512 // scale
    assert lengths(requests) == [
        (math.ceil(line["input_length"] / scale), math.ceil(line["output_length"] / scale)) for line in BLOCKS
    ]
    shared = 0
    for (a, first), (b, second) in combinations(enumerate(requests), 2):
        blocks = common(BLOCKS[a]["hash_ids"], BLOCKS[b]["hash_ids"])
        expected = min(blocks * block, len(ids(first)), len(ids(second)))
        assert common(ids(first), ids(second)) == expected
        shared += bool(expected)
    assert shared == 7, "four begin with block 0 and two with block 9"
    assert [request.arrival_s for request in requests] == pytest.approx([0, 0, 3.052, 3.0525, 9, 9.001, 9.001])
    assert all(request.sampling.ignore_eos for request in requests)


def test_an_equal_block_is_equal_wherever_it_stands(tmp_path: Path):
    requests = build_requests(mooncake(tmp_path, BLOCKS), 50_000)
    assert ids(requests[0])[512:1024] == ids(requests[5])[512:1024], "block 1, after 0 and after 9"
    other_seed = build_requests(mooncake(tmp_path, BLOCKS).with_overrides({"seed": 1}), 50_000)
    assert ids(other_seed[0])[:4] != ids(requests[0])[:4]
    warmup = build_warmup_requests(mooncake(tmp_path, BLOCKS), 50_000)
    assert len(ids(warmup[0])) == 2000
    assert common(ids(warmup[0]), ids(requests[0])) == 0, "a warm-up leaves nothing in a cache that helps"


def test_prompts_cut_to_the_context_keep_what_they_share(tmp_path: Path):
    workload = mooncake(tmp_path, BLOCKS)
    requests = build_requests(workload, 50_000, 1200)
    assert all(prompt + output <= 1200 for prompt, output in lengths(requests))
    assert common(ids(requests[0]), ids(requests[1])) == min(len(ids(requests[0])), len(ids(requests[1])), 1024) > 512
    (notice,) = workload_notices(workload, 1200)
    assert notice == (
        "4 of 7 requests of the trace were cut to the context of 1,200 tokens; source.scale keeps their proportions"
    )
    assert workload_notices(workload.with_overrides({"source.scale": 4}), 1200) == ()


def test_blocks_of_another_length(tmp_path: Path):
    lines = [row(0, 40, 1, [5, 6, 7]), row(1, 33, 1, [5, 6, 2**64 - 1])]
    first, second = build_requests(mooncake(tmp_path, lines, block_len=16), 50_000)
    assert (len(ids(first)), len(ids(second)), common(ids(first), ids(second))) == (40, 33, 32)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "[1]",
            r"expected a JSON object with the keys 'timestamp', 'input_length', 'output_length', 'hash_ids', not a",
        ),
        ("{", r"not JSON"),
        (
            {"timestamp": 1, "input_length": 5, "hash_ids": [1]},
            r"no key 'output_length'; keys in this line: 'timestamp', ",
        ),
        (row("1", 5, 1, [1]), r"timestamp is '1'; expected milliseconds from 0 to 9,007,199,254,740,992"),
        (row(True, 5, 1, [1]), r"timestamp is True; expected milliseconds"),
        (row(-1, 5, 1, [1]), r"timestamp is -1; expected milliseconds"),
        (row(float("nan"), 5, 1, [1]), r"timestamp is nan; expected milliseconds"),
        (row(float("inf"), 5, 1, [1]), r"timestamp is inf; expected milliseconds"),
        (row(10**400, 5, 1, [1]), r"timestamp is 1000.*; expected milliseconds"),
        (row(2**53 + 1, 5, 1, [1]), r"timestamp is 9007199254740993; expected milliseconds"),
        (row(1e308, 5, 1, [1]), r"timestamp is 1e\+308; expected milliseconds"),
        (row(9.5, 5, 1, [1]), r"timestamp = 9.5 is before the row above; a trace must be in the order of its times"),
        (row(10, 0, 1, []), r"input_length = 0: expected a whole number of tokens from 1 to 16,777,216"),
        (row(10, 5.0, 1, [1]), r"input_length = 5.0: expected a whole number"),
        (row(10, True, 1, [1]), r"input_length = True: expected a whole number"),
        (row(10, 5, None, [1]), r"output_length = null: expected a whole number"),
        (row(10, 5, 10**400, [1]), r"output_length = 1000.*: expected a whole number"),
        (row(10, 5, 1, "1"), r"hash_ids is a string; expected a list of whole numbers"),
        (row(10, 5, 1, [-1]), r"hash_ids holds -1; expected whole numbers from 0 to 2\*\*64 - 1"),
        (row(10, 5, 1, [[1]]), r"hash_ids holds a list; expected whole numbers"),
        (row(10, 5, 1, [1, 2]), r"hash_ids has 2 ids, but 5 tokens in blocks of source.block_len = 512 take 1"),
        (row(10, 2000, 1, [1, 2]), r"hash_ids has 2 ids, but 2,000 tokens in blocks of source.block_len = 512 take 4"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_lines_are_named(tmp_path: Path, line: Any, message: str):
    with pytest.raises(ConfigError, match=r"trace.jsonl:3: " + message) as caught:
        check_workload(mooncake(tmp_path, [row(10, 5, 1, [1]), "", line]))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_file_without_lines(tmp_path: Path):
    with pytest.raises(
        ConfigError, match="holds no requests; expected timestamp, input_length, output_length, hash_ids"
    ):
        check_workload(mooncake(tmp_path, [""]))
