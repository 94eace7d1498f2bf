"""What one dashboard shows to the tests of all pages that look at stored runs, which change none of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from app.services import Services
from db.session import Database
from tests.app.engine_runs import run_to_the_end
from tests.app.kernel_runs import add_kernel_run, bench_result, check_result
from tests.app.quantization_runs import add_quantization_run, emulated, failed, reference, result
from tests.browser.large_pool import add_large_run
from tests.helpers import make_tiny_llama

STATIC, CONTINUOUS, TEXTS, LARGE, QUANTIZED, SHARED, KERNELS = range(
    1, 8
)  # the newest is what a page shows without being asked

SLOTS = 6  # of the static and the continuous run, which are of the same requests
_BATCHING = {
    "model.name": "dummy:tiny",
    "model.device": "cpu",
    "cache.num_blocks": 40,
    "scheduler.max_num_seqs": SLOTS,
    "scheduler.max_num_batched_tokens": 64,
    "workload.source.kind": "synthetic",
    "workload.source.num_requests": 24,
    "workload.source.prompt_len": '{kind="uniform",min=8,max=150}',
    "workload.output_len": '{kind="uniform",min=4,max=80}',
    "workload.arrivals.kind": "poisson",
    "workload.arrivals.rate": 60,
}

BLOCK_SIZE = 16
PROMPTS = [
    "The harbour master  writes\ndown every ship.",
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">**&amp;",
]
_TEXTS = {
    "model.device": "cpu",
    "cache.num_blocks": 40,
    "cache.block_size": BLOCK_SIZE,
    "workload.source.kind": "prompts",
    "workload.source.prompts": json.dumps(PROMPTS),
    "workload.source.chat": "false",
    "workload.output_len": 24,
    "workload.sampling.ignore_eos": "true",
}

RESULTS = (reference(), result("int8"), emulated("nf4"), result("awq", layers=None), failed("gptq", "it has no files"))

TIMED = [check_result("rms_norm")] + [
    bench_result(op, shape, implementation=implementation)
    for op, shape in (("rms_norm", "prefill 512 x 576"), ("paged_attention", "prefill 2048 at 2048, 32/8 x 128"))
    for implementation in ("launch", "reference")
]

NUM_BLOCKS = 48  # of the run that shares prefixes: too few for it
_SHARED = {
    "model.name": "dummy:tiny",
    "model.device": "cpu",
    "cache.num_blocks": NUM_BLOCKS,
    "cache.block_size": BLOCK_SIZE,
    "scheduler.max_num_seqs": 8,
    "workload.source.kind": "shared_prefix",
    "workload.source.groups": 3,
    "workload.source.prompts_per_group": 6,
    "workload.source.prefix_len": 48,
    "workload.source.suffix_len": 11,
    "workload.output_len": 60,
}


def store_runs(folder: Path) -> None:
    """Into the database of a dashboard in `folder`, before it starts."""
    with Services(Database.open(f"sqlite:///{folder / 'servelab.db'}")) as services:

        def run(settings: dict[str, Any], label: str | None = None) -> int:
            return run_to_the_end(services, [f"{key}={value}" for key, value in settings.items()], label)

        texts = _TEXTS | {"model.name": make_tiny_llama(folder / "model")}  # a token is a byte
        run_ids = [
            run(_BATCHING | {"scheduler.batching": "static"}, "static"),
            run(_BATCHING | {"scheduler.batching": "continuous"}, "continuous"),
            run(texts),
            add_large_run(services.database),
            add_quantization_run(services, RESULTS, status="failed", error="gptq: it has no files"),
            run(_SHARED),
            add_kernel_run(services, TIMED),
        ]
    assert run_ids == [STATIC, CONTINUOUS, TEXTS, LARGE, QUANTIZED, SHARED, KERNELS]
