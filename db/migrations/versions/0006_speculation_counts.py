"""Requests count their drafts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

COLUMNS = ("num_rounds", "num_draft_tokens", "num_accepted_tokens")


def upgrade() -> None:
    """Older runs did not speculate."""
    for name in COLUMNS:
        op.add_column("requests", sa.Column(name, sa.Integer(), nullable=True))


def downgrade() -> None:
    for name in COLUMNS:
        op.drop_column("requests", name)
