"""The surroundings: our `kernels` package against Hugging Face's, and what must be set before torch is imported."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from backend import compat
from backend.errors import ServeLabError

ROOT = Path(__file__).resolve().parents[1]


def test_import_kernels_gives_ours() -> None:
    compat.check_kernels_package()
    import kernels

    assert Path(kernels.__file__ or "").parent == ROOT / "kernels"


def test_our_kernels_package_is_an_empty_shell() -> None:
    """transformers imports it while it looks for Hugging Face's: it may hold a docstring, and no version."""
    body = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body)
    assert len(body) <= 1


def test_transformers_does_not_take_ours_for_its_own() -> None:
    from transformers import LlamaForCausalLM
    from transformers.utils.import_utils import is_kernels_available

    assert is_kernels_available() is False
    assert LlamaForCausalLM.__name__ == "LlamaForCausalLM"


def test_a_foreign_kernels_distribution_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "kernels-0.18.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ServeLabError, match=r"`kernels` 0\.18\.2 is installed .* pip uninstall kernels"):
        compat.check_kernels_package()


@pytest.mark.parametrize("present", [True, False])
def test_another_kernels_package_in_front_of_ours_is_refused(tmp_path: Path, present: bool) -> None:
    if present:
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / "__init__.py").write_text("")
    code = (
        "import importlib.util, sys; from backend import compat; from backend.errors import ServeLabError\n"
        f"sys.path = [{str(tmp_path)!r}] + [p for p in sys.path if 'python3' in p]; sys.meta_path = sys.meta_path[-1:]\n"
        "try: compat.check_kernels_package()\n"
        "except ServeLabError as error: print(error)"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = str(tmp_path / "kernels" / "__init__.py") if present else "nothing"
    assert f"`import kernels` gives {found} where ServeLab needs {ROOT / 'kernels'}" in output


def test_openmp_waits_passively_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY")
    compat.configure_cpu_environment()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    compat.configure_cpu_environment()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_the_seams_import_without_torch() -> None:
    modules = "backend.compat, backend.paths, backend.detokenizer, backend.tokenizer, backend.models.sources"
    code = f"import sys, {modules}; sys.exit(bool({{'torch', 'transformers', 'gguf'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_tests_leave_the_users_database_alone(tmp_path: Path) -> None:
    assert os.environ["SERVELAB_DATABASE_URL"] == f"sqlite:///{tmp_path / 'servelab.db'}"
