"""Stored runs as a file, with what the database keeps as chunks or as settings: verdicts, rounds, whose drafts are synthetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from app.services import stored_verdict
from backend.core.speculation import is_synthetic
from backend.errors import DatabaseError
from backend.metrics.speculation_ledger import SPECULATION_KIND, Round, read_rounds

if TYPE_CHECKING:
    from app.services import Services
    from db.export import Format, Table
    from db.run_rows import Row


def export_stored_runs(
    services: Services, run_ids: Sequence[int], file_format: Format, table: Table | None = None
) -> bytes:
    """As `db.export.export_runs`. Raises `DatabaseError` also where a verdict or a speculation ledger is damaged."""
    from db.export import export_runs

    runs = services.repository.get_all(run_ids)
    verdicts = {run.run_id: stored_verdict(services, run.run_id) for run in runs if run.kind == "certificate"}
    return export_runs(
        services.repository,
        run_ids,
        file_format,
        table,
        verdicts={run_id: verdict.to_dict() for run_id, verdict in verdicts.items() if verdict is not None},
        synthetic={run.run_id for run in runs if is_synthetic(run.config)},
        rounds=lambda run_id: _rounds(services, run_id),
    )


def runs_without(services: Services, run_ids: Sequence[int], table: Table) -> list[int]:
    """Those of the runs, in their order, that have no row of the table. Raises `DatabaseError` as `export_stored_runs`."""
    repository = services.repository

    def has_rows(run_id: int) -> bool:
        match table:
            case "requests":
                return bool(repository.request_times(run_id))
            case "steps":
                return bool(repository.step_times(run_id))
            case "rounds":
                return any(True for _ in _rounds(services, run_id))
            case "kernels":
                return bool(repository.kernel_results(run_id))
            case "quantization":
                return bool(repository.quantization_results(run_id))
            case "runs":
                return True

    return [run_id for run_id in dict.fromkeys(run_ids) if not has_rows(run_id)]


def _rounds(services: Services, run_id: int) -> Iterator[Row]:
    """A run's rounds in the order of its steps, a chunk of its ledger at a time."""
    warmup = {row["request_id"]: row["warmup"] for row in services.repository.request_times(run_id)}
    for data, _, _ in services.repository.chunks(run_id, SPECULATION_KIND):
        try:
            rounds = read_rounds(data)
        except DatabaseError as error:
            raise DatabaseError(f"run #{run_id}: {error}") from None
        for each in rounds:
            yield _row(run_id, each, warmup.get(each.request_id))


def _row(run_id: int, each: Round, warmup: bool | None) -> Row:
    is_whole = each.num_accepted == len(each.draft_token_ids)
    return {
        "run_id": run_id,
        "step": each.step,
        "request_id": each.request_id,
        "warmup": warmup,
        "position": each.position,
        "draft_token_ids": list(each.draft_token_ids),
        "draft_probs": list(each.draft_probs),
        "target_probs": list(each.target_probs),
        "accept_probs": list(each.accept_probs),
        "num_accepted": each.num_accepted,
        "rejected_token_id": None if is_whole else each.draft_token_ids[each.num_accepted],
        "token_id": each.token_id,
        "origin": "bonus" if is_whole else "recovered",
        "num_emitted": each.num_emitted,
        "num_nodes": each.num_nodes,
        "draft_ms": each.draft_ms,
        "verify_ms": each.verify_ms,
    }
