"""The tables: a run, its requests, steps, telemetry samples and ledger chunks, and the results of the labs.

Times of records are seconds since the run's start (`RunStart.start_time`, before the warm-up); wall time appears only in the
three `*_at` columns of `runs`. Durations are in milliseconds where the name says `_ms`. What does not exist is NULL.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, Integer, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from db.base import Base, FiniteFloat, ForeignText, Json, UtcDateTime
from db.packed_numbers import PackedNumbers

# SQLite gives ids by itself only to a column declared exactly INTEGER.
_ROW_ID = BigInteger().with_variant(Integer, "sqlite")


def _run_key() -> Mapped[int]:
    return mapped_column(ForeignKey("runs.run_id", ondelete="CASCADE"))


class RunRow(Base):
    """One experiment: what was asked, where it ran, how it went."""

    __tablename__ = "runs"
    # AUTOINCREMENT: the id of a deleted run is never given to another one, as links and notes may still name it.
    __table_args__ = (Index(None, "status"), {"sqlite_autoincrement": True})

    run_id: Mapped[int] = mapped_column(Integer, primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), server_default="serve")  # a RunKind
    status: Mapped[str] = mapped_column(String(16))  # a RunStatus
    phase: Mapped[dict[str, Any] | None] = mapped_column(Json)  # the `Phase` of a run that is not over
    label: Mapped[str | None] = mapped_column(ForeignText)
    notes: Mapped[str | None] = mapped_column(ForeignText)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    started_at: Mapped[datetime | None] = mapped_column(UtcDateTime)  # the zero of the records' times
    ended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    model: Mapped[str] = mapped_column(ForeignText)  # empty where none takes part
    config: Mapped[dict[str, Any]] = mapped_column(Json)  # as asked
    resolved_config: Mapped[dict[str, Any] | None] = mapped_column(Json)  # as run
    workload: Mapped[dict[str, Any]] = mapped_column(Json)
    environment: Mapped[dict[str, Any] | None] = mapped_column(Json)
    load: Mapped[dict[str, Any] | None] = mapped_column(Json)
    notices: Mapped[list[str]] = mapped_column(Json)
    cache_state: Mapped[dict[str, Any] | None] = mapped_column(Json)
    summary: Mapped[dict[str, Any] | None] = mapped_column(Json)
    error: Mapped[str | None] = mapped_column(ForeignText)
    num_requests: Mapped[int | None]  # measured ones
    # The process that runs it; see `db.owner.Owner`.
    owner_host: Mapped[str] = mapped_column(ForeignText)
    owner_boot_id: Mapped[str | None] = mapped_column(ForeignText)
    owner_pid_namespace: Mapped[int | None] = mapped_column(BigInteger)
    owner_pid: Mapped[int]
    owner_start_ticks: Mapped[int | None] = mapped_column(BigInteger)
    owner_started: Mapped[float] = mapped_column(FiniteFloat)


class RequestRow(Base):
    """One `RequestStats`, with the latencies derived from it."""

    __tablename__ = "requests"
    __table_args__ = (Index(None, "run_id", "index"),)

    row_id: Mapped[int] = mapped_column(_ROW_ID, primary_key=True)
    run_id: Mapped[int] = _run_key()
    request_id: Mapped[str] = mapped_column(ForeignText)
    index: Mapped[int]  # position in the workload; warm-up requests count on their own
    warmup: Mapped[bool]
    status: Mapped[str] = mapped_column(String(16))
    finish_reason: Mapped[str] = mapped_column(String(16))
    error: Mapped[str | None] = mapped_column(ForeignText)
    arrival_time: Mapped[float | None] = mapped_column(FiniteFloat)
    scheduled_time: Mapped[float | None] = mapped_column(FiniteFloat)
    finish_time: Mapped[float | None] = mapped_column(FiniteFloat)
    queue_ms: Mapped[float | None] = mapped_column(FiniteFloat)
    prefill_ms: Mapped[float | None] = mapped_column(FiniteFloat)
    ttft_ms: Mapped[float | None] = mapped_column(FiniteFloat)
    tpot_ms: Mapped[float | None] = mapped_column(FiniteFloat)
    e2el_ms: Mapped[float | None] = mapped_column(FiniteFloat)
    num_prompt_tokens: Mapped[int | None]
    num_output_tokens: Mapped[int]
    num_cached_tokens: Mapped[int | None]
    num_preemptions: Mapped[int | None]
    emission_times: Mapped[list[float]] = mapped_column(PackedNumbers(floats=True))
    emission_tokens: Mapped[list[int]] = mapped_column(PackedNumbers())
    prompt: Mapped[str | None] = mapped_column(ForeignText)
    text: Mapped[str | None] = mapped_column(ForeignText)
    token_ids: Mapped[list[int] | None] = mapped_column(PackedNumbers())
    parent_id: Mapped[str | None] = mapped_column(ForeignText)  # the prompt whose sample it is
    priority: Mapped[int] = mapped_column(server_default="0")  # lower first, with `scheduler.policy = "priority"`
    num_rounds: Mapped[int | None]  # of speculation; null without it, as the two below
    num_draft_tokens: Mapped[int | None]
    num_accepted_tokens: Mapped[int | None]


class StepRow(Base):
    """One `StepStats`."""

    __tablename__ = "steps"
    __table_args__ = (Index(None, "run_id", "step"),)

    row_id: Mapped[int] = mapped_column(_ROW_ID, primary_key=True)
    run_id: Mapped[int] = _run_key()
    step: Mapped[int]
    end_time: Mapped[float | None] = mapped_column(FiniteFloat)
    duration_ms: Mapped[float | None] = mapped_column(FiniteFloat)
    schedule_ms: Mapped[float | None] = mapped_column(FiniteFloat)
    execute_ms: Mapped[float | None] = mapped_column(FiniteFloat)
    process_ms: Mapped[float | None] = mapped_column(FiniteFloat)
    num_scheduled_requests: Mapped[int]
    num_prefill_tokens: Mapped[int]
    num_decode_tokens: Mapped[int]
    num_output_tokens: Mapped[int]
    num_running: Mapped[int]
    num_waiting: Mapped[int]
    num_preempted: Mapped[int]
    num_referenced_blocks: Mapped[int]
    num_evictable_blocks: Mapped[int]
    num_free_blocks: Mapped[int]
    num_swapped: Mapped[int] = mapped_column(server_default="0")
    num_swapped_out_blocks: Mapped[int] = mapped_column(server_default="0")
    num_swapped_in_blocks: Mapped[int] = mapped_column(server_default="0")
    swapped_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")


class SampleRow(Base):
    """One `TelemetrySample`."""

    __tablename__ = "samples"
    __table_args__ = (Index(None, "run_id", "time"),)

    row_id: Mapped[int] = mapped_column(_ROW_ID, primary_key=True)
    run_id: Mapped[int] = _run_key()
    time: Mapped[float | None] = mapped_column(FiniteFloat)
    host_memory_bytes: Mapped[int] = mapped_column(BigInteger)
    device_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    weights_bytes: Mapped[int | None] = mapped_column(BigInteger)
    kv_cache_bytes: Mapped[int | None] = mapped_column(BigInteger)
    cpu_percent: Mapped[float | None] = mapped_column(FiniteFloat)
    gpu_percent: Mapped[float | None] = mapped_column(FiniteFloat)
    gpu_power_w: Mapped[float | None] = mapped_column(FiniteFloat)


class ChunkRow(Base):
    """A compressed piece of a ledger, for steps `first_step..last_step` inclusive."""

    __tablename__ = "chunks"
    __table_args__ = (Index(None, "run_id", "kind", "first_step"),)

    row_id: Mapped[int] = mapped_column(_ROW_ID, primary_key=True)
    run_id: Mapped[int] = _run_key()
    kind: Mapped[str] = mapped_column(String(32))
    first_step: Mapped[int]
    last_step: Mapped[int]
    data: Mapped[bytes] = mapped_column(LargeBinary)


class KernelResultRow(Base):
    """One result of the kernel lab: a check, a timing, a length of the attention comparison, or why there is none."""

    __tablename__ = "kernel_results"
    __table_args__ = (Index(None, "run_id"),)

    row_id: Mapped[int] = mapped_column(_ROW_ID, primary_key=True)
    run_id: Mapped[int] = _run_key()
    experiment: Mapped[str] = mapped_column(String(16))  # check, bench, attention
    op: Mapped[str] = mapped_column(String(64))
    implementation: Mapped[str] = mapped_column(String(32))  # launch, reference, or a name of the attention comparison
    shape: Mapped[str] = mapped_column(ForeignText)
    dtype: Mapped[str] = mapped_column(String(16))
    device: Mapped[str | None] = mapped_column(ForeignText)
    interpreted: Mapped[bool | None]  # checked through Triton's interpreter
    passed: Mapped[bool | None]  # of a check
    problem: Mapped[str | None] = mapped_column(ForeignText)  # why a check failed, or why there is no figure
    max_abs_error: Mapped[float | None] = mapped_column(FiniteFloat)
    max_rel_error: Mapped[float | None] = mapped_column(FiniteFloat)
    atol: Mapped[float | None] = mapped_column(FiniteFloat)
    rtol: Mapped[float | None] = mapped_column(FiniteFloat)
    num_samples: Mapped[int | None]
    p20_us: Mapped[float | None] = mapped_column(FiniteFloat)
    p50_us: Mapped[float | None] = mapped_column(FiniteFloat)
    p80_us: Mapped[float | None] = mapped_column(FiniteFloat)
    bytes_moved: Mapped[int | None] = mapped_column(BigInteger)
    flops: Mapped[int | None] = mapped_column(BigInteger)
    gb_per_s: Mapped[float | None] = mapped_column(FiniteFloat)
    tflop_per_s: Mapped[float | None] = mapped_column(FiniteFloat)
    read_limit_gb_per_s: Mapped[float | None] = mapped_column(FiniteFloat)
    matmul_limit_tflop_per_s: Mapped[float | None] = mapped_column(FiniteFloat)
    share_of_limit: Mapped[float | None] = mapped_column(FiniteFloat)
    limited_by: Mapped[str | None] = mapped_column(String(16))  # bandwidth, matmul
    length: Mapped[int | None]  # of the attention comparison, in tokens
    peak_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)


class QuantizationResultRow(Base):
    """One variant of a model in the quantization lab, or what one part of it costs alone; or why there is no figure."""

    __tablename__ = "quantization_results"
    __table_args__ = (Index(None, "run_id"),)

    row_id: Mapped[int] = mapped_column(_ROW_ID, primary_key=True)
    run_id: Mapped[int] = _run_key()
    variant: Mapped[str] = mapped_column(ForeignText)  # as the lab's config names it; "reference" is the model itself
    part: Mapped[str | None] = mapped_column(
        ForeignText
    )  # what alone is quantized, or the values whose ranges these are
    settings: Mapped[dict[str, Any] | None] = mapped_column(Json)  # of an engine, defaults filled in
    checkpoint: Mapped[str | None] = mapped_column(ForeignText)  # folder that was made of the model
    problem: Mapped[str | None] = mapped_column(ForeignText)  # why there are no figures
    bits_per_weight: Mapped[float | None] = mapped_column(FiniteFloat)
    weights_bytes: Mapped[int | None] = mapped_column(BigInteger)
    kv_bytes_per_token: Mapped[int | None] = mapped_column(BigInteger)
    peak_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    num_tokens: Mapped[int | None]  # that were scored
    perplexity: Mapped[float | None] = mapped_column(FiniteFloat)
    kl_mean: Mapped[float | None] = mapped_column(FiniteFloat)
    kl_p50: Mapped[float | None] = mapped_column(FiniteFloat)
    kl_p99: Mapped[float | None] = mapped_column(FiniteFloat)
    kl_max: Mapped[float | None] = mapped_column(FiniteFloat)
    top1_agreement: Mapped[float | None] = mapped_column(FiniteFloat)
    delta_p: Mapped[float | None] = mapped_column(FiniteFloat)
    delta_p_standard_error: Mapped[float | None] = mapped_column(FiniteFloat)
    emulated: Mapped[bool | None]  # computed by a reference, whose speed says nothing
    prefill_tok_s: Mapped[float | None] = mapped_column(FiniteFloat)
    decode_1_tok_s: Mapped[float | None] = mapped_column(FiniteFloat)
    decode_32_tok_s: Mapped[float | None] = mapped_column(FiniteFloat)
    prepare_s: Mapped[float | None] = mapped_column(FiniteFloat)
    measure_s: Mapped[float | None] = mapped_column(FiniteFloat)
    num_layers: Mapped[int | None]  # linear layers that are quantized
    layers: Mapped[list[dict[str, Any]] | None] = mapped_column(Json)  # a `LayerError` each, or a `Range`
    layers_problem: Mapped[str | None] = mapped_column(ForeignText)
