"""How fast an engine runs a model: prompts by themselves, and decoding by one request and by many. No torch at module level."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from backend.config import EngineConfig
from backend.experiments.resident_peak import ResidentPeak

if TYPE_CHECKING:
    from backend.engine.llm_engine import LLMEngine

MANY = 32  # requests
DECODE_PROMPT = 16  # tokens
_REPEATS = 3  # of prompts; decoding repeats itself
# On a CPU a token of the default model takes 50 ms.
_NUM_DECODED = {"cpu": {1: 24, MANY: 12}, "cuda": {1: 128, MANY: 128}}
_PREFILL = {"cpu": (1, 512), "cuda": (16, 512)}  # requests, tokens of each


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second, from medians: what else a machine does now and then moves them little.

    Attributes:
        prefill_tok_s: prompt tokens from their arrival to the first token of the last prompt.
        decode_1_tok_s, decode_32_tok_s: output tokens of a step over the time between two.
        peak_memory_bytes: that this process held meanwhile: allocated on the GPU, or resident on a CPU, None where the
            system does not tell.
    """

    prefill_tok_s: float
    decode_1_tok_s: float
    decode_32_tok_s: float
    peak_memory_bytes: int | None


def measure_speed(config: EngineConfig, token_ids: Sequence[int], on_phase: Callable[[str], None]) -> Speed:
    """Load an engine with room for just this, and let it go again. Short prompts: attention has little to read.

    Args:
        token_ids: of which prompts are cut; one token at least.
        on_phase: called with what is done next.
    Raises:
        ConfigError, ModelError, CapacityError: as `load_engine`.
    """
    from backend.engine.loading import load_engine
    from backend.worker.device import choose_device

    device = choose_device(config)
    num_prompts, length = _PREFILL[device]
    decoded = _NUM_DECODED[device]
    block_size = config.cache.block_size
    longest = DECODE_PROMPT + decoded[MANY] + 1
    num_blocks = max(MANY * -(-longest // block_size), num_prompts * -(-(length + 1) // block_size))
    config = config.with_overrides(
        {
            "cache.num_blocks": num_blocks + 1,
            "cache.enable_prefix_caching": False,
            "scheduler.max_num_seqs": MANY,
        }
    )
    on_phase("loading an engine")
    engine = load_engine(config, lambda phase: None).engine
    try:
        limit = engine.scheduler.max_model_len
        length = min(length, limit - 1)
        decoded = {count: min(number, limit - DECODE_PROMPT - 1) for count, number in decoded.items()}
        with ResidentPeak() as resident:
            _serve(engine, token_ids, 1, DECODE_PROMPT, 4)  # warm-up
            engine.executor.reset_peak()
            on_phase("timing prompts")
            waits = []
            for _ in range(_REPEATS):
                started = time.perf_counter()
                waits.append(_serve(engine, token_ids, num_prompts, length, 1)[-1] - started)
            rates = {}
            for count, number in decoded.items():
                on_phase(f"timing {count} request{'s' if count > 1 else ''}")
                times = _serve(engine, token_ids, count, DECODE_PROMPT, number + 1)
                rates[count] = count / median(end - start for start, end in pairwise(times[-number - 1 :]))
        allocated = engine.executor.memory().peak_memory_bytes
        peak = resident.num_bytes if device == "cpu" else allocated
        return Speed(num_prompts * length / median(waits), rates[1], rates[MANY], peak)
    finally:
        engine.executor.shutdown()


def _serve(
    engine: LLMEngine, token_ids: Sequence[int], num_requests: int, num_prompt_tokens: int, num_output_tokens: int
) -> list[float]:
    """Requests that arrive together: when each step delivered, of steps that did. All are in the last of them."""
    from backend.sampling_params import SamplingParams

    sampling = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)
    for index in range(num_requests):
        prompt = [token_ids[(index + place) % len(token_ids)] for place in range(num_prompt_tokens)]
        engine.add_request(str(index), prompt, sampling, time.perf_counter())
    times: list[float] = []
    while engine.has_unfinished_requests():
        if any(event.token_ids for event in engine.step()):
            times.append(time.perf_counter())
    return times
