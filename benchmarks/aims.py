"""What the engine aims at by the protocols of the benchmarks of a card, and which figures of a result fall short of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backend.experiments.quantization_config import variant_name

LARGE, SMALL = "dummy:llama-3.1-8b", "dummy:smollm2-135m"
ATTENTION = "attention 32/8 x 128"  # in place of a model, where heads of that shape alone are timed
SCATTERED, IN_ORDER = "scattered", "in order"  # the blocks that these read

# At least so many times the peer.
MIN_RATIOS: Mapping[tuple[str, str], float] = {
    (LARGE, "decode 1"): 1.12,
    (LARGE, "decode 8"): 1.10,
    (LARGE, "decode 32"): 1.05,
    (LARGE, "decode 128"): 1.0,
    (LARGE, "prefill 1x2048"): 1.0,
    (LARGE, "prefill 16x1024"): 1.0,
    (LARGE, "mix 256"): 1.05,
    (SMALL, "decode 128"): 2.0,
    (SMALL, "mix 256"): 2.0,
    **{(ATTENTION, f"prefill {n}, {order}"): 0.9 for n in (2048, 8192, 32768) for order in (SCATTERED, IN_ORDER)},
}
# Of its limit at least such a share.
MIN_SHARES: Mapping[tuple[str, str], float] = {
    (ATTENTION, f"decode 1x{length}, {order}"): 0.80 for length in (32768, 131072) for order in (SCATTERED, IN_ORDER)
}
MIN_OF_IN_ORDER = 0.97  # of the speed over blocks in order, over scattered ones
# At most so many seconds.
MAX_SECONDS: Mapping[tuple[str, str], float] = {(LARGE, "start, cold"): 60.0, (LARGE, "start, warm"): 20.0}
# With pages open at least such a share of the speed without.
MIN_OF_HEADLESS: Mapping[tuple[str, str], float] = {
    (model, f"dashboard {requests}"): 0.97 for model in (LARGE, SMALL) for requests in (1, 32, 128)
}
# At most so many microseconds a step.
MAX_STEP_US: Mapping[tuple[str, str], float] = {(SMALL, "decode 1"): 600.0, (SMALL, "decode 32"): 900.0}
# The device idles for at most such a share of steady decoding.
MAX_IDLE: Mapping[tuple[str, str], float] = {
    **{(LARGE, f"idle {requests}"): 0.03 for requests in (1, 8, 32, 128, 256)},
    **{(SMALL, f"idle {requests}"): 0.10 for requests in (1, 8, 32)},
}

# Weights in fewer bits, by method: at least so many times the model as it is, and of their own limit in decode 1 such a share.
QUANTIZED_MIN_RATIOS: Mapping[tuple[str, str], float] = {
    ("int4", "decode 1"): 2.4,
    ("nf4", "decode 1"): 2.0,
    ("int8", "decode 1"): 1.5,
    ("fp8", "decode 1"): 1.5,
    ("int4", "decode 64"): 1.2,
    ("fp8", "decode 64"): 1.3,
    ("fp8", "prefill 8x1024"): 1.4,
}
QUANTIZED_MIN_SHARES: Mapping[str, float] = {"int4": 0.68, "nf4": 0.60, "int8": 0.78, "fp8": 0.78}
MAX_BYTES_APART = 0.02  # what the card holds, from what is reported
# Tokens of a round, at least, by what drafts and category: of chains, and of trees.
MIN_LENGTHS: Mapping[tuple[str, str], float] = {
    ("eagle", "all"): 2.2,
    ("ngram", "summarization"): 1.4,
    ("ngram", "rag"): 1.4,
}
MIN_TREE_LENGTHS: Mapping[tuple[str, str], float] = {("eagle", "all"): 2.5, ("medusa", "all"): 1.8}
# Speculation, by proposer and requests: at least so many times plain decoding.
MIN_SPEEDUPS: Mapping[tuple[str, int], float] = {("eagle", 1): 1.5, ("eagle", 16): 1.2}
MIN_OF_PREDICTED = 0.9  # of what acceptance and costs of the same run predict, for eagle at 1 request
MIN_COPYING = 2.0  # ngram at 1 request, of texts to copy
MIN_COPYING_CPU = 1.2  # the same without a card
MAX_VERIFY_COST = 1.15  # plain steps, for the 6 tokens of a chain, of 1 request
MAX_SPECULATION_LEDGER = 0.02  # of a run's time, for recording its rounds


def missed(figures: Sequence[Mapping[str, Any]]) -> list[str]:
    """The figures that fall short, each with its aim."""
    short = []
    for figure in figures:
        key, median = (figure["model"], figure["name"]), figure["median"]
        ratio, share, step_us = figure["ratio"], figure["share"], figure["details"].get("step_us")
        if key in MIN_RATIOS and ratio is not None and ratio < MIN_RATIOS[key]:
            short.append(f"{_name(key)}, {ratio:.3f} × instead of {MIN_RATIOS[key]:.2f} ×")
        if key in MIN_SHARES and share is not None and share < MIN_SHARES[key]:
            short.append(f"{_name(key)}, {share:.1%} of its limit instead of {MIN_SHARES[key]:.0%}")
        if key in MAX_STEP_US and step_us is not None and step_us > MAX_STEP_US[key]:
            short.append(f"{_name(key)}, {step_us:,.0f} us a step instead of {MAX_STEP_US[key]:,.0f}")
        if key in MAX_SECONDS and median is not None and median > MAX_SECONDS[key]:
            short.append(f"{_name(key)}, {median:.1f} s instead of {MAX_SECONDS[key]:.0f} s")
        if key in MAX_IDLE and median is not None and median > MAX_IDLE[key]:
            short.append(f"{_name(key)}, {median:.1%} instead of {MAX_IDLE[key]:.0%}")
        if key in MIN_OF_HEADLESS and median is not None and median < MIN_OF_HEADLESS[key]:
            short.append(f"{_name(key)}, {median:.1%} of the speed without instead of {MIN_OF_HEADLESS[key]:.0%}")
    return short + _missed_scattered(figures)


def _missed_scattered(figures: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of attention over scattered blocks, what is too slow beside the same over blocks in order."""
    times = {figure["name"]: figure["median"] for figure in figures if figure["model"] == ATTENTION}
    short = []
    for name, scattered in times.items():
        shape, _, order = name.partition(", ")
        in_order = times.get(f"{shape}, {IN_ORDER}")
        if order == SCATTERED and scattered and in_order and (speed := in_order / scattered) < MIN_OF_IN_ORDER:
            short.append(
                f"{_name((ATTENTION, name))}, {speed:.1%} of the speed in order instead of {MIN_OF_IN_ORDER:.0%}"
            )
    return short


def _name(key: tuple[str, str]) -> str:
    return f"{key[1]} of {key[0]}"


def missed_quantized(result: Mapping[str, Any]) -> list[str]:
    """Of a result of `benchmarks/quantized_gpu.py`, what falls short, each with its aim."""
    short = []
    for row in result["results"] if result["model"] == LARGE else ():
        name, method = variant_name(row["variant"]), row["variant"].partition(":")[0]
        figures = {figure["name"]: figure for figure in row.get("figures", ())}
        for (of, figure_name), least in QUANTIZED_MIN_RATIOS.items():
            ratio = figures.get(figure_name, {}).get("ratio")
            if of == method and ratio is not None and ratio < least:
                short.append(f"{figure_name} of {name}, {ratio:.3f} × instead of {least:.2f} ×")
        share = figures.get("decode 1", {}).get("share")
        if share is not None and share < (least := QUANTIZED_MIN_SHARES.get(method, 0.0)):
            short.append(f"decode 1 of {name}, {share:.1%} of its limit instead of {least:.0%}")
        for figure in row.get("over_peer", ()):
            if figure["ratio"] < 1:
                short.append(
                    f"{figure['name']} of {name}, {figure['ratio']:.3f} × {figure['peer_name']} instead of 1.00 ×"
                )
        held, reported = row.get("device_weights_bytes"), row.get("weights_bytes")
        if held is not None and abs(held / reported - 1) > MAX_BYTES_APART:
            short.append(f"weights of {name}, {held:,} bytes on the card where {reported:,} are reported")
    return short


def missed_acceptance(one: Mapping[str, Any]) -> list[str]:
    """Of a head or proposer of a result of `benchmarks/speculation_acceptance.py`, what falls short, each with its aim."""
    min_lengths = MIN_TREE_LENGTHS if one.get("num_nodes") else MIN_LENGTHS
    short = []
    for (kind, category), least in min_lengths.items():
        found = one["by_category"].get(category, {}).get("whole") if kind == one["kind"] else None
        if found is not None and found["mean_length"] < least:
            of = "" if category == "all" else f"{category}, "
            short.append(f"{of}{found['mean_length']:.2f} tokens of a round instead of {least:.2f}")
    return short


def missed_recording(result: Mapping[str, Any]) -> list[str]:
    """Of a result of `benchmarks/recording.py`, what falls short, each with its aim."""
    overhead = result["ledger_overhead"]
    if not result["speculation"] or overhead <= MAX_SPECULATION_LEDGER:
        return []
    return [
        f"the ledger of {result['speculation']}, {overhead:.1%} of the time instead of {MAX_SPECULATION_LEDGER:.0%}"
    ]


def missed_speculation(result: Mapping[str, Any]) -> list[str]:
    """Of a result of `benchmarks/speculation_speed.py`, what falls short, each with its aim."""
    short = []
    for row in result["results"]:
        name = f"{row['method']} at {row['requests']} requests"
        speedup, least = row.get("speedup"), _min_speedup(result, row["method"], row["requests"])
        if least is not None and speedup is not None and speedup < least:
            short.append(f"{name}, {speedup:.2f} × plain decoding instead of {least:.1f} ×")
        if result["card"]:
            short += _missed_costs(row, name)
    return short


def _min_speedup(result: Mapping[str, Any], method: str, requests: int) -> float | None:
    if result["options"]["copying"]:
        return (MIN_COPYING if result["card"] else MIN_COPYING_CPU) if (method, requests) == ("ngram", 1) else None
    # They are of greedy answers; older results say nothing of a temperature.
    is_greedy = not result["options"].get("temperature")
    return MIN_SPEEDUPS.get((method, requests)) if result["card"] and is_greedy else None


def _missed_costs(row: Mapping[str, Any], name: str) -> list[str]:
    """Of a row of a card's result, what is out of proportion to plain steps."""
    short = []
    of_predicted, whole = row.get("of_predicted"), row.get("whole_drafts")
    if (
        (row["method"], row["requests"]) == ("eagle", 1)
        and of_predicted is not None
        and of_predicted < MIN_OF_PREDICTED
    ):
        short.append(f"{name}, {of_predicted:.1%} of what is predicted instead of {MIN_OF_PREDICTED:.0%}")
    # Older results do not say `is_tree`, and theirs of 6 tokens are chains. Lookahead's window runs beside what it verifies, and
    # synthetic drafts are those of a large model's shape, for which nothing is asked.
    if not whole or whole.get("is_tree") or row["method"] in ("lookahead", "synthetic"):
        return short
    if row["requests"] == 1 and whole["num_tokens"] == 6 and whole["verify_cost"] > MAX_VERIFY_COST:
        short.append(
            f"verifying 6 tokens ({name}), {whole['verify_cost']:.2f} plain steps instead of {MAX_VERIFY_COST}"
        )
    return short
