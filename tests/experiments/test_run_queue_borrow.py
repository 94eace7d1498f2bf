"""Who has the engine between two runs: runs wait for it, and it for runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from backend.errors import EngineError
from backend.experiments.run_queue import RunQueue
from backend.metrics.stats import RunEnd, StatsSink
from tests.app.chat_host import DictatedHost
from tests.waiting import PATIENCE_S, until


class Held:
    """A run that lasts until it is let go."""

    def __init__(self) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()

    def __call__(self, sink: StatsSink, cancel: threading.Event) -> RunEnd:
        self.begun.set()
        assert self.let_go.wait(PATIENCE_S)
        return RunEnd("finished", time.perf_counter())


@pytest.fixture
def queue() -> Iterator[RunQueue]:
    queue = RunQueue(DictatedHost())
    yield queue
    queue.close()


def test_a_run_waits_for_who_has_borrowed(queue: RunQueue):
    task = Held()
    task.let_go.set()
    assert queue.try_borrow()
    assert queue.try_borrow()
    queue.submit_task(1, task, [])
    queue.give_back()
    assert queue.wait(1, 0.1) is None
    assert queue.queued() == (1,)
    assert not task.begun.is_set()
    queue.give_back()
    end = queue.wait(1, PATIENCE_S)
    assert end is not None
    assert end.status == "finished"


def test_nothing_is_lent_while_a_run_is_queued_or_under_way(queue: RunQueue):
    first, second = Held(), Held()
    queue.submit_task(1, first, [])
    queue.submit_task(2, second, [])
    assert first.begun.wait(PATIENCE_S)
    assert not queue.try_borrow()
    first.let_go.set()
    assert second.begun.wait(PATIENCE_S)
    assert not queue.try_borrow()
    second.let_go.set()
    assert queue.wait(2, PATIENCE_S)
    until(queue.try_borrow)
    queue.give_back()


def test_who_has_to_be_alone_shares_with_nobody(queue: RunQueue):
    assert queue.try_borrow(alone=True)
    assert not queue.try_borrow()
    assert not queue.try_borrow(alone=True)
    queue.give_back()
    assert queue.try_borrow()
    assert not queue.try_borrow(alone=True)
    queue.give_back()
    assert queue.try_borrow(alone=True)
    queue.give_back()


def test_a_run_that_waits_for_a_borrower_can_be_cancelled(queue: RunQueue):
    assert queue.try_borrow()
    queue.submit_task(1, Held(), [])
    assert queue.cancel(1)
    end = queue.wait(1, 0)
    assert end is not None
    assert end.status == "cancelled"
    queue.give_back()
    assert queue.try_borrow()
    queue.give_back()


def test_closing_waits_for_no_borrower_and_lends_nothing_more():
    queue = RunQueue(DictatedHost())
    assert queue.try_borrow()
    queue.close()
    with pytest.raises(EngineError, match="shutting down"):
        queue.try_borrow()
    queue.give_back()
