"""Runs of the quantization lab: the table of what each variant of a model was measured to be."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "quantization_results",
        sa.Column("row_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("variant", sa.Text(), nullable=False),
        sa.Column("part", sa.Text(), nullable=True),
        sa.Column("settings", sa.JSON(), nullable=True),
        sa.Column("checkpoint", sa.Text(), nullable=True),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.Column("bits_per_weight", sa.Float(), nullable=True),
        sa.Column("weights_bytes", sa.BigInteger(), nullable=True),
        sa.Column("kv_bytes_per_token", sa.BigInteger(), nullable=True),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("num_tokens", sa.Integer(), nullable=True),
        sa.Column("perplexity", sa.Float(), nullable=True),
        sa.Column("kl_mean", sa.Float(), nullable=True),
        sa.Column("kl_p50", sa.Float(), nullable=True),
        sa.Column("kl_p99", sa.Float(), nullable=True),
        sa.Column("kl_max", sa.Float(), nullable=True),
        sa.Column("top1_agreement", sa.Float(), nullable=True),
        sa.Column("delta_p", sa.Float(), nullable=True),
        sa.Column("delta_p_standard_error", sa.Float(), nullable=True),
        sa.Column("emulated", sa.Boolean(), nullable=True),
        sa.Column("prefill_tok_s", sa.Float(), nullable=True),
        sa.Column("decode_1_tok_s", sa.Float(), nullable=True),
        sa.Column("decode_32_tok_s", sa.Float(), nullable=True),
        sa.Column("prepare_s", sa.Float(), nullable=True),
        sa.Column("measure_s", sa.Float(), nullable=True),
        sa.Column("num_layers", sa.Integer(), nullable=True),
        sa.Column("layers", sa.JSON(), nullable=True),
        sa.Column("layers_problem", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("row_id", name="pk_quantization_results"),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.run_id"], name="fk_quantization_results_run_id_runs", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_quantization_results_run_id", "quantization_results", ["run_id"])


def downgrade() -> None:
    """Its runs go: the older program would take them for serving runs without a workload."""
    op.drop_table("quantization_results")
    op.execute("DELETE FROM runs WHERE kind = 'quantization'")
