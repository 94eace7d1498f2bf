"""A run of a shared-prefix workload, its prompts those of the workload and its ledger that of a real scheduler."""

from __future__ import annotations

from app.services import Services
from backend.config import EngineConfig
from backend.metrics.ledger import LEDGER_KIND
from backend.metrics.stats import RequestStats, RunEnd, RunStart
from backend.workload.datasets import build_requests, build_warmup_requests, prompts_digest
from backend.workload.spec import Workload
from db.recorder import RunRecorder
from tests.metrics.prefix_traffic import WatchedLab

BLOCK_SIZE, VOCAB, LENGTH = 4, 512, 200

WORKLOAD = Workload.from_dict(
    {
        "source": {
            "kind": "shared_prefix",
            "groups": 4,
            "prompts_per_group": 7,
            "prefix_len": 18,
            "suffix_len": {"kind": "uniform", "min": 2, "max": 14},
        },
        "output_len": {"kind": "uniform", "min": 1, "max": 5},
    }
)


def add_prefix_run(services: Services, *, digest: str | None = None) -> tuple[int, WatchedLab]:
    """A run that is over; what happened in it beside its id."""
    run_id, recorder = start_prefix_run(services, digest=digest)
    lab = serve(run_id)
    store(recorder, lab, list(lab.asked))
    recorder.on_run_end(RunEnd("finished", 100.0, None, None))
    recorder.close()
    return run_id, lab


def start_prefix_run(services: Services, *, digest: str | None = None) -> tuple[int, RunRecorder]:
    """A run under way that has no step yet."""
    settings = {"model.name": "dummy:tiny", "model.device": "cpu", "cache.block_size": BLOCK_SIZE}
    config = EngineConfig().with_overrides(settings)
    run_id = services.repository.create(config.to_dict(), WORKLOAD.to_dict(), None)
    recorder = RunRecorder(services.database, run_id)
    requests = build_requests(WORKLOAD, VOCAB, LENGTH)
    recorder.on_run_start(
        RunStart(
            start_time=0.0,
            resolved_config=config.resolve(device="cpu", max_model_len=LENGTH).to_dict(),
            environment={},
            load={
                "num_blocks": 36,
                "model": {"vocab_size": VOCAB},
                "prompts_sha256": digest or prompts_digest(requests),
            },
            notices=(),
            cache_state={"state": "cold", "num_cached_tokens": 0},
            num_requests=len(requests),
        )
    )
    recorder.flush()
    return run_id, recorder


def serve(run_id: int) -> WatchedLab:
    """The warm-up first, then five requests at a time, with a reset of the cache in the middle."""
    lab = WatchedLab(
        block_size=BLOCK_SIZE, num_blocks=36, max_num_seqs=5, max_num_batched_tokens=160, max_model_len=100
    )
    for request in build_warmup_requests(WORKLOAD, VOCAB, LENGTH):
        lab.add(
            f"run{run_id}-warmup-{request.index}",
            request.prompt.token_ids or (),
            max_tokens=request.sampling.max_tokens,
        )
    lab.run()
    for request in build_requests(WORKLOAD, VOCAB, LENGTH):
        lab.add(f"run{run_id}-{request.index}", request.prompt.token_ids or (), max_tokens=request.sampling.max_tokens)
        if request.index == 15:
            lab.manager.reset_prefix_cache()
        for _ in range(4 if request.index % 5 == 4 else 0):
            lab.step()
    lab.run()
    return lab


def store(recorder: RunRecorder, lab: WatchedLab, request_ids: list[str]) -> None:
    """The whole ledger, and the records of some requests."""
    if chunk := lab.ledger.flush():
        lab.chunks.append(chunk)
    for chunk in lab.chunks:
        recorder.on_chunk(LEDGER_KIND, *chunk)
    store_records(recorder, lab, request_ids)


def store_records(recorder: RunRecorder, lab: WatchedLab, request_ids: list[str]) -> None:
    for request_id in request_ids:
        recorder.on_request_finished(_stats(lab, request_id))
    recorder.flush()


def _stats(lab: WatchedLab, request_id: str) -> RequestStats:
    request = lab.asked[request_id]
    num_tokens = request.num_output_tokens
    return RequestStats(
        request_id=request_id,
        index=int(request_id.rpartition("-")[2]),
        warmup="warmup" in request_id,
        status="finished",
        finish_reason="length",
        error=None,
        arrival_time=0.0,
        scheduled_time=0.0,
        emission_times=tuple(0.1 * place for place in range(num_tokens)),
        emission_tokens=(1,) * num_tokens,
        finish_time=50.0,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=num_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        prompt=None,
        text="",
        token_ids=tuple(request.token_ids[request.num_prompt_tokens :]),
    )
