"""Requests know the prompt whose sample they are; steps count what preempted requests moved to host memory and back."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_COUNTS = ("num_swapped", "num_swapped_out_blocks", "num_swapped_in_blocks", "swapped_bytes")


def upgrade() -> None:
    """Older runs had one sample of every prompt, and swapped nothing."""
    op.add_column("requests", sa.Column("parent_id", sa.Text(), nullable=True))
    for name in _COUNTS:
        width = sa.BigInteger() if name == "swapped_bytes" else sa.Integer()
        op.add_column("steps", sa.Column(name, width, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("requests", "parent_id")
    for name in _COUNTS:
        op.drop_column("steps", name)
