"""Runs of the kernel lab: a kind for every run, and the table of kernel results."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Added in place, not by copying the table: a copy would forget the ids of deleted runs, and give them out again.
    op.add_column("runs", sa.Column("kind", sa.String(16), nullable=False, server_default="serve"))
    op.create_table(
        "kernel_results",
        sa.Column("row_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("experiment", sa.String(16), nullable=False),
        sa.Column("op", sa.String(64), nullable=False),
        sa.Column("implementation", sa.String(32), nullable=False),
        sa.Column("shape", sa.Text(), nullable=False),
        sa.Column("dtype", sa.String(16), nullable=False),
        sa.Column("device", sa.Text(), nullable=True),
        sa.Column("interpreted", sa.Boolean(), nullable=True),
        sa.Column("passed", sa.Boolean(), nullable=True),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.Column("max_abs_error", sa.Float(), nullable=True),
        sa.Column("max_rel_error", sa.Float(), nullable=True),
        sa.Column("atol", sa.Float(), nullable=True),
        sa.Column("rtol", sa.Float(), nullable=True),
        sa.Column("num_samples", sa.Integer(), nullable=True),
        sa.Column("p20_us", sa.Float(), nullable=True),
        sa.Column("p50_us", sa.Float(), nullable=True),
        sa.Column("p80_us", sa.Float(), nullable=True),
        sa.Column("bytes_moved", sa.BigInteger(), nullable=True),
        sa.Column("flops", sa.BigInteger(), nullable=True),
        sa.Column("gb_per_s", sa.Float(), nullable=True),
        sa.Column("tflop_per_s", sa.Float(), nullable=True),
        sa.Column("read_limit_gb_per_s", sa.Float(), nullable=True),
        sa.Column("matmul_limit_tflop_per_s", sa.Float(), nullable=True),
        sa.Column("share_of_limit", sa.Float(), nullable=True),
        sa.Column("limited_by", sa.String(16), nullable=True),
        sa.Column("length", sa.Integer(), nullable=True),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("row_id", name="pk_kernel_results"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_kernel_results_run_id_runs", ondelete="CASCADE"),
    )
    op.create_index("ix_kernel_results_run_id", "kernel_results", ["run_id"])


def downgrade() -> None:
    """Kernel runs go: the older program would take them for serving runs without a model."""
    op.drop_table("kernel_results")
    op.execute("DELETE FROM runs WHERE kind <> 'serve'")
    op.drop_column("runs", "kind")
