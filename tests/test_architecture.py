"""The dependency rule app -> db -> backend -> kernels, held by walking every import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("app", "db", "backend", "kernels")

ALLOWED_OF_US = {
    "kernels": {"kernels"},
    "backend": {"backend", "kernels"},
    "db": {"db", "backend"},
    "app": {"app", "db", "backend", "kernels"},
}
FORBIDDEN = {
    "kernels": {"transformers", "streamlit", "sqlalchemy", "numpy", "pydantic"},
    "backend": {"streamlit", "sqlalchemy", "alembic", "altair", "pandas", "typer", "rich"},
    "db": {"torch", "transformers", "streamlit", "triton"},
}
TRANSFORMERS_MAY_BE_IMPORTED_BY = {"backend/tokenizer.py", "backend/models/hf_config.py"}
DB_MAY_IMPORT_OF_BACKEND = {"backend.metrics.stats", "backend.errors", "backend.paths"}


def files() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imports_of(path: Path) -> set[str]:
    """Dotted names of all modules a file imports, function-level imports included; typing-only ones are not."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for child in ast.walk(node)
    }
    names = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide what a module depends on"
            module = node.module or ""
            members = {f"{module}.{alias.name}" for alias in node.names}
            submodules = {name for name in members if (ROOT / (name.replace(".", "/") + ".py")).exists()}
            names |= submodules or {module}
    return names


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", files(), ids=relative)
def test_imports_go_one_way(path: Path) -> None:
    package = relative(path).split("/")[0]
    names = imports_of(path)
    ours = {name.split(".")[0] for name in names} & set(PACKAGES)
    assert ours <= ALLOWED_OF_US[package]
    assert not {name.split(".")[0] for name in names} & FORBIDDEN.get(package, set())
    if package == "db":
        assert {name for name in names if name.startswith("backend")} <= DB_MAY_IMPORT_OF_BACKEND
    if package != "app" and relative(path) not in TRANSFORMERS_MAY_BE_IMPORTED_BY:
        assert not any(name.split(".")[0] == "transformers" for name in names)
    if not relative(path).startswith("kernels/cpu/"):
        assert not any(name.split(".")[0] == "llvmlite" for name in names), "where it is missing, references compute"
    if relative(path).startswith("kernels/reference"):
        assert not any(name.split(".")[0] == "triton" for name in names), "the CPU path runs without triton"


@pytest.mark.parametrize(
    "package", ["backend/analysis", "backend/core", "backend/metrics", "backend/workload", "backend/experiments"]
)
def test_scheduling_metrics_and_workloads_need_no_torch(package: str) -> None:
    """Also through what they import: the modules are loaded in a fresh interpreter."""
    modules = [relative(path)[:-3].replace("/", ".") for path in sorted((ROOT / package).glob("*.py"))]
    code = f"import sys, importlib; [importlib.import_module(m) for m in {modules!r}]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_walk_would_notice_a_forbidden_import(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("def f():\n    import streamlit.runtime\n    from app.state import x\n")
    assert imports_of(file) == {"streamlit.runtime", "app.state"}


@pytest.mark.parametrize("path", [path for path in files() if path.name == "__init__.py"], ids=relative)
def test_init_files_hold_a_docstring_at_most(path: Path) -> None:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body)
