"""Speculation in a real engine: the tokens are those of plain decoding, whatever is drafted and wherever a draft ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backend.engine.engine_host import EngineHost
from backend.engine.llm_engine import LLMEngine
from backend.engine.speculative_output import SpeculativeOutputProcessor
from backend.errors import ConfigError
from backend.metrics.kv_sums import KVSums
from backend.metrics.kv_use import KVPool, kv_use
from backend.metrics.ledger_reader import LedgerReader
from backend.metrics.pool_history import PoolHistory
from backend.metrics.speculation_ledger import read_rounds
from tests.engine.driving import Answer, answers, check_idle, config_of, held, submit, tokens
from tests.engine.scripted import expected_end, ids_of, make_scripted
from tests.engine.speculating import ScriptedProposer, at_random, in_turn, scripted, whole
from tests.engine.test_engine_host import StepSink
from tests.engine.test_equivalence import prompts_of
from tests.engine.test_samples import samples
from tests.helpers import dense_greedy, load_oracle, make_tiny_llama, make_tiny_model

PROMPTS = prompts_of([1, 2, 15, 16, 17, 40, 100])
GREEDY: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
RIGHT = in_turn((5, 5))  # all that is drafted


@pytest.fixture(autouse=True)
def check_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVELAB_DEBUG", "1")


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> dict[str, list[int]]:
    oracle = load_oracle(tiny_llama)
    return {key: dense_greedy(oracle, prompt, 24) for key, prompt in PROMPTS.items()}


def check_accepted(collected: dict[str, Answer], proposer: ScriptedProposer) -> None:
    """Right drafts were accepted, wrong ones were not, and all are counted."""
    for key, answer in collected.items():
        counts = answer.last.speculation
        assert counts is not None
        drafts = [(drafted, right) for name, drafted, right in proposer.drafted if name == key and drafted]
        assert counts == (len(drafts), *(sum(column) for column in zip(*drafts, strict=True))) if drafts else (0, 0, 0)


MATRIX: dict[str, dict[str, Any]] = {
    "blocks of one": {"cache__block_size": 1},
    "blocks of sixteen": {},
    "chunks": {"scheduler__max_num_batched_tokens": 16, "cache__block_size": 4},
    "a budget of three": {"scheduler__max_num_batched_tokens": 3},
    "two at a time": {"scheduler__max_num_seqs": 2},
    "preempted": {"cache__num_blocks": 10, "scheduler__preemption": "recompute"},
    "swapped": {"cache__num_blocks": 10, "scheduler__preemption": "swap"},
    "contiguous": {"cache__layout": "contiguous"},
    "static": {"scheduler__batching": "static", "scheduler__max_num_seqs": 3},
    "prefill first": {"scheduler__policy": "prefill_first"},
    "without prefix cache": {"cache__enable_prefix_caching": False},
    "three drafts": {"speculative__num_speculative_tokens": 3},
    "batch invariant": {"kernels__batch_invariant": True},
    "early": {"scheduler__async_scheduling": True},
    "early, preempted": {"scheduler__async_scheduling": True, "cache__num_blocks": 10},
    "early, swapped": {
        "scheduler__async_scheduling": True,
        "cache__num_blocks": 10,
        "scheduler__preemption": "swap",
        "scheduler__max_num_batched_tokens": 16,
    },
}


@pytest.mark.parametrize("name", MATRIX)
def test_speculative_equals_plain(
    host: EngineHost, tiny_llama: Path, expected: dict[str, list[int]], name: str
) -> None:
    with scripted(host, tiny_llama, whole(PROMPTS, expected), at_random(3), **MATRIX[name]) as proposer:
        collected = answers(host, PROMPTS, **GREEDY)
        assert {key: answer.token_ids for key, answer in collected.items()} == expected
        check_accepted(collected, proposer)
        assert sum(right for _, _, right in proposer.drafted) > 0
        if "cache__num_blocks" in MATRIX[name]:
            assert sum(answer.last.num_preemptions or 0 for answer in collected.values()) > 0
        again = answers(host, PROMPTS, **GREEDY)  # with a prefix cache: much of each is found
        assert {key: answer.token_ids for key, answer in again.items()} == expected


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8", "int4"])
def test_speculative_equals_plain_over_a_quantized_cache(host: EngineHost, tiny_llama: Path, dtype: str) -> None:
    host.load(config_of(tiny_llama, cache__dtype=dtype))
    plain = tokens(host, PROMPTS, **GREEDY)
    with scripted(host, tiny_llama, whole(PROMPTS, plain), at_random(5), cache__dtype=dtype) as proposer:
        collected = answers(host, PROMPTS, **GREEDY)
        assert {key: answer.token_ids for key, answer in collected.items()} == plain
        check_accepted(collected, proposer)


@pytest.mark.parametrize("method", ["int8", "int4"])  # llm_int8 depends on the batch with and without speculation
def test_speculative_equals_plain_with_a_quantized_target(host: EngineHost, tiny_llama: Path, method: str) -> None:
    host.load(config_of(tiny_llama, quantization__method=method))
    plain = tokens(host, PROMPTS, **GREEDY)
    with scripted(host, tiny_llama, whole(PROMPTS, plain), at_random(7), quantization__method=method) as proposer:
        collected = answers(host, PROMPTS, **GREEDY)
        assert {key: answer.token_ids for key, answer in collected.items()} == plain
        check_accepted(collected, proposer)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Mistral", {"sliding_window": 8}),
        ("Qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
    ],
)
def test_speculative_equals_plain_with_windows(
    host: EngineHost, tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    """All layers, and those behind the first one: two KV groups."""
    model = make_tiny_model(tmp_path / "model", architecture, **changes)
    oracle = load_oracle(model)
    expected = {key: dense_greedy(oracle, prompt, 24) for key, prompt in PROMPTS.items()}
    options = {"cache__block_size": 4, "scheduler__max_num_batched_tokens": 12}
    with scripted(host, model, whole(PROMPTS, expected), at_random(9), **options) as proposer:
        for _ in range(2):
            assert tokens(host, PROMPTS, **GREEDY) == expected
        assert sum(right for _, _, right in proposer.drafted) > 0


def test_speculative_equals_plain_for_the_samples_of_a_prompt(host: EngineHost, tiny_llama: Path) -> None:
    """They share blocks, the last of which each copies before it writes a draft into it. Greedy, so all are alike."""
    prompts = prompts_of([17, 33])
    host.load(config_of(tiny_llama))
    plain = tokens(host, prompts, **GREEDY)
    with scripted(host, tiny_llama, whole(prompts, plain), at_random(2)):
        for key, answer in samples(host, prompts, n=3, **GREEDY).items():
            assert answer.token_ids == plain[key.split("/")[0]]


def test_text_that_repeats_itself_is_drafted_from_what_came_before(host: EngineHost, tmp_path: Path) -> None:
    """The real proposer, on a model that goes round in circles of six: each round drafts right once a circle is closed."""
    circle = [10, 11, 12, 13, 14, 15]
    model = make_scripted(tmp_path / "model", [[*circle, circle[0]]])
    host.load(config_of(model, speculative__method="ngram"))
    answer = answers(host, {"a": [10]}, max_tokens=48, ignore_eos=True)["a"]
    assert answer.token_ids == [circle[index % 6] for index in range(1, 49)]
    # Six tokens one by one; of the 42 left, seven rounds of six.
    assert answer.last.speculation == (7, 35, 35)
    assert [len(event.token_ids) for event in answer.events] == [1] * 6 + [6] * 7
    assert [event.origins for event in answer.events] == [["plain"]] * 6 + [["accepted"] * 5 + ["bonus"]] * 7


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> tuple[Path, list[int], int]:
    """A model, 40 tokens that it gives to `PROMPT`, and the place of the first that is its EOS id, from 7 on."""
    output = dense_greedy(tiny_llama, PROMPT, 40)
    at = next(position for position in range(7, 20) if output[position] not in output[:position])
    folder = tmp_path_factory.mktemp("ending") / "model"
    return make_tiny_llama(folder, eos_token_id=output[at]), output, at


PROMPT = [10, 20, 30]


@pytest.mark.parametrize("how", ["eos", "stop id", "ignored eos"])
def test_sd_1_an_end_anywhere_in_an_accepted_block(
    host: EngineHost, ending: tuple[Path, list[int], int], tiny_llama: Path, how: str
) -> None:
    """At each offset of the round that holds it: six requests, whose rounds begin one token later each."""
    model, output, at = ending
    sampling: dict[str, Any] = {"max_tokens": 40, "ignore_eos": how != "eos"}
    if how == "stop id":
        model, sampling = tiny_llama, sampling | {"stop_token_ids": (output[at],)}

    def plan(request_id: str, number: int, most: int) -> tuple[int, int]:
        # One plain token, then steps of one until the round begins that holds the end at the offset.
        return (1, 0) if number < at - int(request_id) - 1 else (min(most, 5), 5)

    with scripted(host, model, [[*PROMPT, *output]], plan):
        collected = answers(host, {str(offset): PROMPT for offset in range(6)}, **sampling)
        expected = output if how == "ignored eos" else output[:at]
        for offset, answer in collected.items():
            assert answer.token_ids == expected
            assert answer.text == host.tokenizer.decode(expected)
            assert answer.finish_reason == ("length" if how == "ignored eos" else "stop")
            if how != "ignored eos":
                assert answer.events[-1].origins == ["accepted"] * int(offset)


LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A model that recites the alphabet, and the ids of its letters."""
    folder = tmp_path_factory.mktemp("letters") / "model"
    make_tiny_llama(folder)  # for its tokenizer
    ids = ids_of(folder, LETTERS)
    return make_scripted(folder, [[400, *ids]]), ids


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sd_1_a_stop_string_anywhere_in_an_accepted_block(
    host: EngineHost, letters: tuple[Path, list[int]], asynchronous: bool
) -> None:
    """What stands behind it in the block is neither delivered nor counted, and no text of it ever streamed."""
    model, ids = letters
    ends: list[tuple[tuple[str, ...], int, int]] = [  # stop strings, min_tokens, max_tokens
        (("h",), 0, 24),
        (("hij",), 0, 24),
        (("fgh", "gh"), 0, 24),
        (("h", "p"), 12, 24),
        (("z",), 0, 9),
        (("i",), 0, 9),
    ]
    options = {"scheduler__async_scheduling": asynchronous}
    with scripted(host, model, [[400, *ids]], lambda key, number, most: (min(most, 5), int(key)), **options):
        for stop, min_tokens, max_tokens in ends:
            sampling = {"stop": stop, "min_tokens": min_tokens, "max_tokens": max_tokens}
            pieces = [letter.encode() for letter in LETTERS]
            text, count, reason = expected_end(pieces, stop, min_tokens, max_tokens)
            for answer in answers(host, {str(num_right): [400] for num_right in range(6)}, **sampling).values():
                assert (answer.text, answer.token_ids, answer.finish_reason) == (text, ids[:count], reason)
                assert "".join(event.text for event in answer.events) == text
                origins = [origin for event in answer.events for origin in event.origins or ()]
                assert len(origins) == count
                counts = answer.last.speculation
                assert counts is not None
                assert counts.num_accepted_tokens == origins.count("accepted")


def test_an_end_is_not_chosen_before_min_tokens_anywhere_in_a_block(host: EngineHost, tiny_llama: Path) -> None:
    """Each position of a round bans the ids for itself."""
    free = dense_greedy(tiny_llama, PROMPT, 12)
    stop_id = free[3]
    host.load(config_of(tiny_llama))
    sampling = {"max_tokens": 12, "stop_token_ids": (stop_id,), "ignore_eos": True}
    limits = (0, 1, 6, 7, 8, 11, 12)
    plain = {limit: answers(host, {"a": PROMPT}, min_tokens=limit, **sampling)["a"] for limit in limits}
    for limit, answer in plain.items():
        # Until the two part, drafts hold the banned id where the target would like it best.
        scripts = [[*PROMPT, *free], [*PROMPT, *answer.token_ids, *[stop_id] * 12]]
        with scripted(host, tiny_llama, scripts, RIGHT):
            drafted = answers(host, {"a": PROMPT}, min_tokens=limit, **sampling)["a"]
        assert (drafted.token_ids, drafted.finish_reason) == (answer.token_ids, answer.finish_reason)


def test_sd_5_the_end_of_the_context(host: EngineHost, tiny_llama: Path) -> None:
    """A prompt near the limit, and more tokens asked for than there is room for: drafts never reach beyond it."""
    prompt = prompts_of([250])
    expected = dense_greedy(tiny_llama, prompt["p250"], 6)
    for num_right in (0, 5):
        plan = in_turn((5, num_right))
        script = [[*prompt["p250"], *expected]]
        with scripted(host, tiny_llama, script, plan, model__max_model_len=256, cache__num_blocks=16) as proposer:
            answer = answers(host, prompt, max_tokens=50, ignore_eos=True)["p250"]
        assert (answer.token_ids, answer.finish_reason) == (expected, "length")
        assert max(drafted for _, drafted, _ in proposer.drafted) == 4, "5 are left, one of which is the target's own"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sd_6_what_is_counted_is_what_was_drafted_and_delivered(
    host: EngineHost, letters: tuple[Path, list[int]], asynchronous: bool
) -> None:
    """Five right, none right, two of a short draft, then a block whose third token is the end. Beside it a request alone."""
    model, ids = letters
    plan, sink = in_turn((5, 5), (5, 0), (2, 2), (5, 5)), StepSink()
    with scripted(host, model, [[400, *ids]], plan, scheduler__async_scheduling=asynchronous):
        host.set_sink(sink)  # type: ignore[arg-type]
        with held(host):
            first = submit(host, "a", [400], max_tokens=40, stop_token_ids=(ids[13],))
            other = submit(host, "b", [401], max_tokens=1)
        assert (first.finish_reason, other.finish_reason) == ("stop", "length")
        host.set_sink(None)
    assert first.token_ids == ids[:13]
    assert [len(event.token_ids) for event in first.events] == [1, 6, 1, 3, 2]
    assert first.last.speculation == (4, 5 + 5 + 2 + 5, 5 + 0 + 2 + 2)
    assert other.last.speculation == (0, 0, 0)
    chunks = [data for kind, data, _, _ in sink.chunks if kind == "speculation"]
    rounds = [it for data in chunks for it in read_rounds(data)]
    assert [(it.request_id, it.position, it.num_emitted) for it in rounds] == [
        ("a", 1, 6),
        ("a", 7, 1),
        ("a", 8, 3),
        ("a", 11, 2),
    ]
    assert [it.num_accepted for it in rounds] == [5, 0, 2, 5]
    assert [it.draft_token_ids[: it.num_accepted] for it in rounds] == [
        tuple(ids[1:6]),
        (),
        tuple(ids[8:10]),
        tuple(ids[11:16]),
    ]
    assert [it.token_id for it in rounds] == [ids[6], ids[7], ids[10], ids[16]]
    assert rounds[1].accept_probs[0] == 0
    assert set(rounds[0].accept_probs) == set(rounds[0].draft_probs) == {1}
    assert sum(step.num_output_tokens for step in sink.steps) == 13 + 1
    # The prompt's two rows, then a row of one and its drafts in each round.
    assert [step.num_decode_tokens for step in sink.steps] == [0, 6, 6, 3, 6]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_ledger_of_a_speculating_run_tells_the_pool_at_every_step(
    host: EngineHost, tiny_llama: Path, expected: dict[str, list[int]], asynchronous: bool
) -> None:
    """Blocks that come for drafts and go back, tokens that are kept: followed step by step as the scheduler has them."""
    options: dict[str, Any] = {"cache__block_size": 4, "cache__num_blocks": 44, "model__max_model_len": 150}
    options["scheduler__async_scheduling"] = asynchronous
    sink = StepSink()
    with scripted(host, tiny_llama, whole(PROMPTS, expected), at_random(4), **options):
        host.set_sink(sink)  # type: ignore[arg-type]
        collected = answers(host, PROMPTS, **GREEDY)
        host.set_sink(None)
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    assert {"give_back", "preempt"} <= follow_pool(sink, 44, 4)


def follow_pool(sink: StepSink, num_blocks: int, block_size: int) -> set[str]:
    """Check what a run's ledger tells of the pool against its steps; the kinds of its events."""
    reader = LedgerReader([(data, first, last) for kind, data, first, last in sink.chunks if kind == "steps"])
    history, pool, sums, kinds = PoolHistory(reader, block_size), KVPool(num_blocks, (None,), 1), None, set()
    for stats in sink.steps:
        moment = history.at(stats.step)
        assert moment is not None
        counts = (stats.num_referenced_blocks, stats.num_evictable_blocks, stats.num_free_blocks)
        assert moment.blocks.counts(num_blocks) == counts
        use = kv_use(moment.blocks, moment.num_tokens, block_size, pool)
        if sums is None:
            sums = KVSums(moment, block_size, pool)
        else:
            sums.follow(moment.step)
        assert (sums.num_unused_slots, sums.num_reserved_slots) == (use.num_unused_slots, use.num_reserved_slots)
        for request_id, groups in moment.blocks.held.items():
            assert moment.num_tokens[request_id] <= block_size * len(groups[0])
        kinds |= {event.kind for event in moment.step.events}
    return kinds


def test_without_a_cache_it_is_refused(host: EngineHost, tiny_llama: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"speculative.method = 'ngram' does not go together with cache.layout = 'none'"
    ):
        host.load(config_of(tiny_llama, speculative__method="ngram", cache__layout="none"))


def test_with_asynchronous_scheduling_a_round_is_under_way_before_the_last_one_is_delivered(
    host: EngineHost, tiny_llama: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    submit_step, process = LLMEngine._submit, SpeculativeOutputProcessor.process_step

    def submitted(engine: LLMEngine) -> Any:
        order.append("submit")
        return submit_step(engine)

    def processed(*arguments: Any) -> Any:
        order.append("deliver")
        return process(*arguments)

    monkeypatch.setattr(LLMEngine, "_submit", submitted)
    monkeypatch.setattr(SpeculativeOutputProcessor, "process_step", processed)
    one = dict([next(iter(PROMPTS.items()))])
    for asynchronous in (False, True):
        order.clear()
        with scripted(host, tiny_llama, whole(PROMPTS, expected), RIGHT, scheduler__async_scheduling=asynchronous):
            answers(host, one, **GREEDY)
        begin = ["submit", "submit", "deliver"] if asynchronous else ["submit", "deliver", "submit"]
        assert order[:3] == begin
        assert order.count("submit") == order.count("deliver")


def test_as_long_as_nobody_drafts_steps_are_submitted_ahead(
    host: EngineHost, tiny_llama: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that are never right are left out before long, but for one step in so many; plain steps then fly in pairs."""
    flying: list[int] = []
    complete = LLMEngine._complete

    def completed(engine: LLMEngine, *arguments: Any) -> Any:
        flying.append(len(engine._in_flight))
        return complete(engine, *arguments)

    monkeypatch.setattr(LLMEngine, "_complete", completed)
    options: dict[str, Any] = {"scheduler__async_scheduling": True, "speculative__adaptive": True}
    longer = {key: [*expected[key], *dense_greedy(tiny_llama, [*PROMPTS[key], *expected[key]], 86)] for key in PROMPTS}
    with scripted(host, tiny_llama, whole(PROMPTS, longer), in_turn((5, 0)), **options) as proposer:
        collected = answers(host, PROMPTS, max_tokens=110, ignore_eos=True)
        assert {key: answer.token_ids for key, answer in collected.items()} == longer
    assert max(flying) == 1, "beside the one that is completed"
    assert flying.count(1) > 40
    assert sum(drafted > 0 for _, drafted, _ in proposer.drafted) > len(PROMPTS), "some steps try all the same"


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_aborts_in_the_middle_of_rounds_leave_the_others_alone(
    host: EngineHost, tiny_llama: Path, expected: dict[str, list[int]], asynchronous: bool, adaptive: bool
) -> None:
    """Some are aborted at once, some after their first event, while the pool is too small for all."""
    options: dict[str, Any] = {"cache__num_blocks": 10, "scheduler__async_scheduling": asynchronous}
    options["speculative__adaptive"] = adaptive
    with scripted(host, tiny_llama, whole(PROMPTS, expected), at_random(8), **options):
        for turn in range(6):
            with held(host):
                going = {key: submit(host, f"{turn}-{key}", prompt, **GREEDY) for key, prompt in PROMPTS.items()}
            aborted = list(PROMPTS)[turn::3]
            for key in aborted:
                host.abort(f"{turn}-{key}")
            for key, answer in going.items():
                whole_answer = answer.finish_reason == "length"
                assert whole_answer or key in aborted
                count = 24 if whole_answer else len(answer.token_ids)
                assert answer.token_ids == expected[key][:count]
            check_idle(host)
