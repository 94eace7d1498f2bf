"""The query for a run's steps, thinned in SQL: a chart of a long run needs hundreds of points, not a million rows."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Float, Select, cast, func, literal, select
from sqlalchemy.orm import Session

from db.models import StepRow

# How the steps of one bucket become one point. Tokens, preemptions and what is swapped add up, queue lengths show their
# peak, durations and blocks are means: the three kinds of blocks then still add up to the pool.
_SUMS = (
    StepRow.num_prefill_tokens,
    StepRow.num_decode_tokens,
    StepRow.num_output_tokens,
    StepRow.num_preempted,
    StepRow.num_swapped,
    StepRow.num_swapped_out_blocks,
    StepRow.num_swapped_in_blocks,
    StepRow.swapped_bytes,
)
_PEAKS = (StepRow.end_time, StepRow.num_scheduled_requests, StepRow.num_running, StepRow.num_waiting)
_MEANS = (
    StepRow.duration_ms,
    StepRow.schedule_ms,
    StepRow.execute_ms,
    StepRow.process_ms,
    StepRow.num_referenced_blocks,
    StepRow.num_evictable_blocks,
    StepRow.num_free_blocks,
)


def select_steps(session: Session, run_id: int, max_points: int | None) -> Select[Any]:
    """All columns of `steps`, with `num_steps` in a point and its peak `kv_cache_usage` (0..1), in order of step.

    Args:
        max_points: most points wanted, at least 1; None for one per step. Otherwise buckets of 2^n neighbouring steps are
            merged: `step` is the first of them, the rest as in `_SUMS`, `_PEAKS` and `_MEANS`. A power of two keeps the
            points of a growing run where they are until their number has doubled.
    """
    width = 1 if max_points is None else _bucket_width(session, run_id, max_points)
    if width == 1:
        columns = [column for column in StepRow.__table__.columns if column.name != "row_id"]
        query = select(*columns, literal(1).label("num_steps"), _usage().label("kv_cache_usage"))
        return query.where(StepRow.run_id == run_id).order_by(StepRow.step)
    first_step = func.min(StepRow.step)
    return (
        select(
            StepRow.run_id,
            first_step.label("step"),
            *(func.sum(column).label(column.key) for column in _SUMS),
            *(func.max(column).label(column.key) for column in _PEAKS),
            *(func.avg(column).label(column.key) for column in _MEANS),
            func.count().label("num_steps"),
            func.max(_usage()).label("kv_cache_usage"),
        )
        .where(StepRow.run_id == run_id)
        .group_by(StepRow.run_id, StepRow.step // width)
        .order_by(first_step)
    )


def _bucket_width(session: Session, run_id: int, max_points: int) -> int:
    """The smallest power of two that cuts the run's steps into at most `max_points` buckets."""
    if max_points < 1:
        raise ValueError(f"max_points = {max_points}; it must be at least 1")
    bounds = select(func.min(StepRow.step), func.max(StepRow.step)).where(StepRow.run_id == run_id)
    first, last = session.execute(bounds).one()
    width = 1
    while first is not None and last // width - first // width >= max_points:
        width *= 2
    return width


def _usage() -> ColumnElement[float]:
    """Referenced / usable blocks; 0 without a pool, as in `StepStats.kv_cache_usage`."""
    blocks = StepRow.num_referenced_blocks + StepRow.num_evictable_blocks + StepRow.num_free_blocks
    return func.coalesce(cast(StepRow.num_referenced_blocks, Float) / func.nullif(blocks, 0), 0.0)
