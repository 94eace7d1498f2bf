"""Whose runs are interrupted: only those of a process that is known to have ended."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import db.owner
from db.owner import Owner
from tests.db.records import ROOT
from tests.waiting import until

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]

# Prints the owner that a process sees itself as; then, for the owner given, whether it is gone.
PROGRAM = """
import sys
from db.owner import Owner
print(Owner.this_process(), Owner.this_process().is_gone, flush=True)
if len(sys.argv) > 1:
    print(eval(sys.argv[1]).is_gone, flush=True)
sys.stdin.read()
"""


def start_program(*prefix: str, other: Owner | None = None) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-c", PROGRAM, *([repr(other)] if other else [])]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_owner(process: subprocess.Popen[str]) -> Owner:
    """The owner it prints; that it does not take itself for gone."""
    assert process.stdout is not None
    text, _, gone = process.stdout.readline().rpartition(" ")
    assert gone.strip() == "False"
    return eval(text)


def can_unshare(*options: str) -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE, *options, "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture
def other() -> Iterator[Callable[[], Owner]]:
    """Start another process; gives the owner that it is."""
    processes: list[subprocess.Popen[str]] = []

    def start() -> Owner:
        processes.append(start_program())
        return read_owner(processes[-1])

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_living_process_is_not_gone_and_an_ended_one_is(other: Callable[[], Owner]) -> None:
    mine = Owner.this_process()
    assert mine.is_this_process
    assert not mine.is_gone
    living = other()
    assert not living.is_this_process
    assert not living.is_gone
    process = start_program()
    ended = read_owner(process)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert ended.is_gone, "killed, and not yet collected: a zombie still has its process id"
    process.communicate()
    assert ended.is_gone


@needs_proc
def test_a_later_process_with_the_same_id_is_another_one() -> None:
    mine = Owner.this_process()
    assert mine.start_ticks is not None
    earlier = replace(mine, start_ticks=mine.start_ticks - 1)
    assert earlier.is_gone
    assert not earlier.is_this_process


@needs_proc
@pytest.mark.parametrize("seconds", [-86_400.0, -2.0, 2.0, 86_400.0])
def test_setting_the_clock_interrupts_nothing(
    monkeypatch: pytest.MonkeyPatch, other: Callable[[], Owner], seconds: float
) -> None:
    """The kernel tells a start as a time since boot; in wall time it moves with the clock, as psutil gives it."""
    mine, living = Owner.this_process(), other()
    create_time = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: create_time(process) + seconds)
    assert abs(Owner.this_process().started - mine.started - seconds) < 1
    assert not mine.is_gone
    assert mine.is_this_process
    assert not living.is_gone


@needs_proc
def test_the_start_is_read_whatever_the_command_is_called(tmp_path: Path) -> None:
    name = "a ) Z (b"
    (tmp_path / name).symlink_to(shutil.which("sleep") or "/bin/sleep")
    with subprocess.Popen([tmp_path / name, "60"]) as process:
        try:
            path = Path(f"/proc/{process.pid}/stat")
            until(
                lambda: path.read_text().startswith(f"{process.pid} ({name}) ")
            )  # its name comes after it has started
            stat = path.read_text()
            ticks = int(stat.removeprefix(f"{process.pid} ({name}) ").split()[22 - 3])
            owner = replace(Owner.this_process(), pid=process.pid, start_ticks=ticks)
            assert not owner.is_gone
            assert replace(owner, start_ticks=ticks + 1).is_gone
        finally:
            process.kill()


def test_after_a_reboot_all_processes_of_before_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Owner.this_process()  # its id and its start may well occur again
    monkeypatch.setattr(db.owner, "_boot_id", lambda: "another boot")
    assert replace(before, boot_id="a boot").is_gone
    assert replace(before, boot_id="a boot", pid_namespace=1).is_gone
    assert not replace(before, boot_id="another boot").is_gone
    assert not replace(before, boot_id=None).is_gone, "not known"
    assert not replace(before, boot_id="a boot", host="elsewhere").is_gone, "another machine has boots of its own"


def test_of_another_machine_and_of_another_namespace_nothing_is_known() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ended = replace(Owner.this_process(), pid=gone.pid)
    assert ended.is_gone
    assert not replace(ended, host="elsewhere").is_gone
    assert not replace(ended, pid_namespace=1).is_gone
    assert not replace(Owner.this_process(), host="elsewhere").is_this_process
    assert not replace(Owner.this_process(), pid_namespace=1).is_this_process


@needs_proc
@pytest.mark.parametrize("options", [("--mount-proc",), ()], ids=["own /proc", "/proc of outside"])
def test_a_container_on_the_same_host(options: tuple[str, ...]) -> None:
    """Two real pid namespaces, neither of which can see or may judge the other's processes."""
    if not can_unshare(*options):
        pytest.skip("this system allows no new pid namespace")
    mine = Owner.this_process()
    process = start_program(*UNSHARE, *options, other=mine)
    try:
        inside = read_owner(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "False\n", "from inside, this test's process looks ended"
        assert (inside.host, inside.boot_id) == (mine.host, mine.boot_id)
        assert inside.pid_namespace != mine.pid_namespace
        assert not inside.is_gone
    finally:
        process.kill()
        process.communicate()
    assert not inside.is_gone, "nor can its end be seen from outside"


def test_without_proc_the_creation_time_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: Callable[[], Owner]
) -> None:
    living = other()
    process = start_program()
    ended = read_owner(process)
    process.kill()
    process.communicate()
    monkeypatch.setattr(db.owner, "_PROC", tmp_path)
    mine = Owner.this_process()
    assert (mine.boot_id, mine.pid_namespace, mine.start_ticks) == (None, None, None)
    assert mine.is_this_process
    unknown = {"boot_id": None, "pid_namespace": None, "start_ticks": None}
    living, ended = replace(living, **unknown), replace(ended, **unknown)
    assert [mine.is_gone, living.is_gone, ended.is_gone] == [False, False, True]
    assert not replace(living, started=living.started + 1).is_gone, "two readings may differ by a rounding"
    assert replace(living, started=living.started - 60).is_gone


@needs_proc
def test_a_process_that_is_hidden_from_us_is_not_taken_for_gone(
    monkeypatch: pytest.MonkeyPatch, other: Callable[[], Owner]
) -> None:
    """As with /proc mounted `hidepid`, where another user's processes have no folder."""
    living = other()
    monkeypatch.setattr(db.owner, "_read_stat", lambda pid: None)
    assert not living.is_gone


def test_people_read_the_hosts_name_and_a_time() -> None:
    mine = Owner.this_process()
    assert (mine.host, mine.pid) == (socket.gethostname(), os.getpid())
    assert abs(mine.started - psutil.Process().create_time()) < 1
