"""First schema: runs, requests, steps, samples, chunks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("phase", sa.JSON(), nullable=True),
        sa.Column("label", sa.Text(), nullable=True),
        sa.Column("notes", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("started_at", sa.DateTime(), nullable=True),
        sa.Column("ended_at", sa.DateTime(), nullable=True),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("resolved_config", sa.JSON(), nullable=True),
        sa.Column("workload", sa.JSON(), nullable=False),
        sa.Column("environment", sa.JSON(), nullable=True),
        sa.Column("load", sa.JSON(), nullable=True),
        sa.Column("notices", sa.JSON(), nullable=False),
        sa.Column("cache_state", sa.JSON(), nullable=True),
        sa.Column("summary", sa.JSON(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("num_requests", sa.Integer(), nullable=True),
        sa.Column("owner_host", sa.Text(), nullable=False),
        sa.Column("owner_boot_id", sa.Text(), nullable=True),
        sa.Column("owner_pid_namespace", sa.BigInteger(), nullable=True),
        sa.Column("owner_pid", sa.Integer(), nullable=False),
        sa.Column("owner_start_ticks", sa.BigInteger(), nullable=True),
        sa.Column("owner_started", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name="pk_runs"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_runs_status", "runs", ["status"])

    _create_record_table(
        "requests",
        ["index"],
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("warmup", sa.Boolean(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("finish_reason", sa.String(16), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("arrival_time", sa.Float(), nullable=True),
        sa.Column("scheduled_time", sa.Float(), nullable=True),
        sa.Column("finish_time", sa.Float(), nullable=True),
        sa.Column("queue_ms", sa.Float(), nullable=True),
        sa.Column("prefill_ms", sa.Float(), nullable=True),
        sa.Column("ttft_ms", sa.Float(), nullable=True),
        sa.Column("tpot_ms", sa.Float(), nullable=True),
        sa.Column("e2el_ms", sa.Float(), nullable=True),
        sa.Column("num_prompt_tokens", sa.Integer(), nullable=True),
        sa.Column("num_output_tokens", sa.Integer(), nullable=False),
        sa.Column("num_cached_tokens", sa.Integer(), nullable=True),
        sa.Column("num_preemptions", sa.Integer(), nullable=True),
        sa.Column("emission_times", sa.JSON(), nullable=False),
        sa.Column("emission_tokens", sa.JSON(), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=True),
        sa.Column("text", sa.Text(), nullable=True),
        sa.Column("token_ids", sa.JSON(), nullable=True),
    )
    _create_record_table(
        "steps",
        ["step"],
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("end_time", sa.Float(), nullable=True),
        sa.Column("duration_ms", sa.Float(), nullable=True),
        sa.Column("schedule_ms", sa.Float(), nullable=True),
        sa.Column("execute_ms", sa.Float(), nullable=True),
        sa.Column("process_ms", sa.Float(), nullable=True),
        sa.Column("num_scheduled_requests", sa.Integer(), nullable=False),
        sa.Column("num_prefill_tokens", sa.Integer(), nullable=False),
        sa.Column("num_decode_tokens", sa.Integer(), nullable=False),
        sa.Column("num_output_tokens", sa.Integer(), nullable=False),
        sa.Column("num_running", sa.Integer(), nullable=False),
        sa.Column("num_waiting", sa.Integer(), nullable=False),
        sa.Column("num_preempted", sa.Integer(), nullable=False),
        sa.Column("num_referenced_blocks", sa.Integer(), nullable=False),
        sa.Column("num_evictable_blocks", sa.Integer(), nullable=False),
        sa.Column("num_free_blocks", sa.Integer(), nullable=False),
    )
    _create_record_table(
        "samples",
        ["time"],
        sa.Column("time", sa.Float(), nullable=True),
        sa.Column("host_memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("device_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("weights_bytes", sa.BigInteger(), nullable=True),
        sa.Column("kv_cache_bytes", sa.BigInteger(), nullable=True),
        sa.Column("cpu_percent", sa.Float(), nullable=True),
        sa.Column("gpu_percent", sa.Float(), nullable=True),
        sa.Column("gpu_power_w", sa.Float(), nullable=True),
    )
    _create_record_table(
        "chunks",
        ["kind", "first_step"],
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("first_step", sa.Integer(), nullable=False),
        sa.Column("last_step", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
    )


def downgrade() -> None:
    for table in ("chunks", "samples", "steps", "requests", "runs"):
        op.drop_table(table)


def _create_record_table(table: str, order: list[str], *columns: sa.Column) -> None:
    """A table of records that go with their run, indexed by run and in the order they are read."""
    op.create_table(
        table,
        sa.Column("row_id", _ROW_ID, nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        *columns,
        sa.PrimaryKeyConstraint("row_id", name=f"pk_{table}"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=f"fk_{table}_run_id_runs", ondelete="CASCADE"),
    )
    op.create_index(f"ix_{table}_run_id_{'_'.join(order)}", table, ["run_id", *order])
