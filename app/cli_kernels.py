"""`servelab kernels`: ops checked against their references, timed, and compared over length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from app import cli_labs, formatting, terminal
from app.cli_options import JsonOption

if TYPE_CHECKING:
    from backend.experiments.kernel_config import Experiment, KernelLabConfig
    from db.run_rows import Run

kernels = typer.Typer(help="Check and time the kernels of this machine.", no_args_is_help=True)

OpsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[OP]...", help="Ops, as in `servelab kernels list`; all by default.")
]
DtypeOption = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option("--dtype", help="By default bfloat16 on CUDA, float32 on the CPU."),
]
LabelOption = Annotated[str | None, typer.Option("--label", help="A name for the run.")]
NoStoreOption = Annotated[bool, typer.Option("--no-store", help="Do not record it as a run.")]


@kernels.command("list")
def list_ops(as_json: JsonOption = False) -> None:
    """Ops by name, what they do, and where Triton runs on this machine."""
    from backend.compat import configure_cpu_environment
    from backend.experiments import kernel_lab

    configure_cpu_environment()
    with terminal.results() as out:
        ops, use = kernel_lab.list_ops(), kernel_lab.triton_use()
        if as_json:
            terminal.write_document(out, {"triton": use, "ops": [asdict(op) for op in ops]})
            return
        rows = [(op.name, op.purpose, ", ".join(op.dtypes), "\n".join(op.shapes)) for op in ops]
        terminal.print_table(("Op", "Purpose", "Dtypes", "Timed shapes"), rows, "l", out)
        out.write(f"\n{use}\n")


@kernels.command()
def check(ops: OpsArgument = None, dtype: DtypeOption = None, as_json: JsonOption = False) -> None:
    """Compare each kernel with its reference, element by element; exit code 1 when one is outside its tolerance.

    Without a GPU kernels go through Triton's interpreter, on small inputs. Nothing is recorded.
    """
    _run(_config(("check",), ops, dtype), None, False, as_json)


@kernels.command()
def bench(
    ops: OpsArgument = None,
    dtype: DtypeOption = None,
    implementation: Annotated[
        Literal["both", "launch", "reference"],
        typer.Option("--implementation", help="Triton kernel, torch reference, or both. A CPU times references only."),
    ] = "both",
    label: LabelOption = None,
    no_store: NoStoreOption = False,
    as_json: JsonOption = False,
) -> None:
    """Time every shape of each op, against what this machine was measured to read and to multiply at most."""
    _run(_config(("bench",), ops, dtype, implementation), label, not no_store, as_json)


@kernels.command()
def attention(
    dtype: DtypeOption = None, label: LabelOption = None, no_store: NoStoreOption = False, as_json: JsonOption = False
) -> None:
    """Time and memory of attention over length: with all scores in memory, torch's fused one, and ours."""
    _run(_config(("attention",), None, dtype), label, not no_store, as_json)


def _config(
    experiments: Sequence[Experiment], ops: Sequence[str] | None, dtype: str | None, implementation: str = "both"
) -> KernelLabConfig:
    from backend.experiments.kernel_config import KernelLabConfig

    values = {"experiments": experiments, "ops": ops or None, "dtype": dtype, "implementation": implementation}
    return KernelLabConfig.from_dict(values)


def _run(config: KernelLabConfig, label: str | None, store: bool, as_json: bool) -> None:
    from app.services import start_kernel_run

    with (
        terminal.results() as out,
        terminal.Interruption() as interruption,
        cli_labs.services(store) as services,
    ):
        run_id = start_kernel_run(services, config, label)
        if store:
            terminal.note(f"run {formatting.run_name(run_id, label)}")
        with terminal.Status() as status:
            end = cli_labs.wait(services, run_id, interruption, status)
        run, results = services.repository.get_all([run_id])[0], services.repository.kernel_results(run_id)
        if as_json:
            terminal.write_document(out, _document(run, results, store))
        else:
            _print(run, results, out)
        cli_labs.exit_unless_finished(services, run_id, end, interruption)


def _document(run: Run, results: Sequence[dict[str, Any]], store: bool) -> dict[str, Any]:
    return {
        "run_id": run.run_id if store else None,
        "status": run.status,
        "error": run.error,
        "environment": run.environment,
        "limits": run.load,
        "notices": run.notices,
        "results": [{name: value for name, value in row.items() if name != "run_id"} for row in results],
    }


def _print(run: Run, results: Sequence[dict[str, Any]], out: TextIO) -> None:
    by_experiment = {name: [row for row in results if row["experiment"] == name] for name in _TABLES}
    for name, rows in by_experiment.items():
        timed = [row for row in rows if name == "check" or row["p50_us"] is not None]
        if timed:
            headers, align, cells = _TABLES[name]
            terminal.print_table(headers, [cells(row) for row in timed], align, out)
        for row in rows:
            if row["problem"] and row not in timed:
                terminal.note(f"left out: {row['op']} ({row['implementation']}), {row['shape']}: {row['problem']}")
    limits = run.load or {}
    if limits:
        read, matmul = limits["read_limit_gb_per_s"], limits["matmul_limit_tflop_per_s"]
        out.write(
            f"\nMeasured limits of {limits['device']}: {formatting.number(read)} GB/s read, "
            f"{formatting.number(matmul)} TFLOP/s in a matrix product.\n"
        )
    for notice in run.notices:
        terminal.note(notice)


def _check_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["op"],
        row["shape"],
        row["dtype"],
        "interpreter" if row["interpreted"] else "GPU",
        formatting.number(row["max_abs_error"]),
        formatting.number(row["max_rel_error"]),
        f"{row['atol']:g} + {row['rtol']:g} |x|",
        "passed" if row["passed"] else "FAILED",
    )


def _bench_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["op"],
        row["shape"],
        row["dtype"],
        row["implementation"],
        formatting.number(row["p50_us"]),
        f"{formatting.number(row['p20_us'])}..{formatting.number(row['p80_us'])}",
        formatting.number(row["gb_per_s"]),
        formatting.number(row["tflop_per_s"]),
        formatting.percent(row["share_of_limit"]),
        row["limited_by"],
    )


def _attention_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        formatting.count(row["length"]),
        row["implementation"],
        formatting.number(row["p50_us"]),
        f"{formatting.number(row['p20_us'])}..{formatting.number(row['p80_us'])}",
        formatting.memory(row["peak_memory_bytes"]),
        formatting.number(row["max_abs_error"]),
    )


_TABLES: dict[str, Any] = {
    "check": (
        ("Op", "Shape", "Dtype", "Checked on", "Max abs error", "Max rel error", "Tolerance", ""),
        "llllrrll",
        _check_cells,
    ),
    "bench": (
        ("Op", "Shape", "Dtype", "Timed", "p50 µs", "p20..p80", "GB/s", "TFLOP/s", "Share", "of limit"),
        "llllrrrrrl",
        _bench_cells,
    ),
    "attention": (
        ("Tokens", "Attention", "p50 µs", "p20..p80", "Peak memory", "Max abs error"),
        "rlrrrr",
        _attention_cells,
    ),
}
