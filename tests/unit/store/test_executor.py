"""The executor with real threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from kvtier.errors import TierUnavailableError
from kvtier.store import executor
from kvtier.store.executor import IoCall, ThreadExecutor

PATIENCE_SECONDS = 30.0


def collect_until(executor: ThreadExecutor, condition: Callable[[], bool]) -> None:
    """Collects until the condition holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "nothing finished in time"
        if not executor.collect():
            time.sleep(0.001)


def test_results_and_errors_are_delivered_on_the_owners_thread() -> None:
    executor = ThreadExecutor({"hash": 1})
    found: list[object] = []
    where: list[threading.Thread] = []

    def done(result: object, error: BaseException | None) -> None:
        found.append((result, type(error)))
        where.append(threading.current_thread())

    executor.submit("hash", lambda: 1, done)
    executor.submit("hash", lambda: 1 // 0, done)
    collect_until(executor, lambda: len(found) == 2)
    assert found == [(1, type(None)), (None, ZeroDivisionError)]
    assert set(where) == {threading.current_thread()}
    executor.close()


def test_calls_of_a_lane_start_in_order_on_at_most_its_number_of_threads() -> None:
    executor = ThreadExecutor({"read:disk": 2})
    gate = threading.Event()
    started: list[int] = []
    both = threading.Semaphore(0)

    def call(number: int) -> None:
        started.append(number)
        both.release()
        gate.wait(PATIENCE_SECONDS)

    finished: list[object] = []
    for number in range(5):
        executor.submit("read:disk", lambda n=number: call(n), lambda r, e: finished.append(r))  # type: ignore[misc]
    for _ in range(2):
        assert both.acquire(timeout=PATIENCE_SECONDS)
    assert sorted(started) == [0, 1]
    assert (executor.running("read:disk"), executor.queued("read:disk")) == (2, 3)
    gate.set()
    collect_until(executor, lambda: len(finished) == 5)
    assert (executor.running("read:disk"), executor.queued("read:disk")) == (0, 0)
    executor.close()


def test_concurrent_calls_do_not_wait_for_the_same_idle_thread() -> None:
    executor = ThreadExecutor({"read:disk": 4})
    finished: list[object] = []
    executor.submit("read:disk", lambda: None, lambda r, e: finished.append(r))
    collect_until(executor, lambda: len(finished) == 1)
    # Each waits for the others: they end only if all of them run at the same time.
    together = threading.Barrier(4)
    for _ in range(4):
        executor.submit(
            "read:disk", lambda: together.wait(PATIENCE_SECONDS), lambda r, e: finished.append(e)
        )
    collect_until(executor, lambda: len(finished) == 5)
    assert finished[1:] == [None] * 4
    executor.close()


def test_without_a_new_thread_a_call_fails_or_waits_for_an_existing_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = ThreadExecutor({"read:disk": 2, "hash": 2})
    gate, started = threading.Event(), threading.Event()
    finished: list[BaseException | None] = []

    def hold() -> None:
        started.set()
        gate.wait(PATIENCE_SECONDS)

    executor.submit("hash", hold, lambda r, e: finished.append(e))
    assert started.wait(PATIENCE_SECONDS)

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    executor.submit("read:disk", lambda: None, lambda r, e: finished.append(e))
    executor.submit("hash", lambda: None, lambda r, e: finished.append(e))
    executor.collect()
    assert [type(error) for error in finished] == [TierUnavailableError]
    gate.set()
    collect_until(executor, lambda: len(finished) == 3)
    assert finished[1:] == [None, None]
    monkeypatch.undo()
    executor.submit("read:disk", lambda: None, lambda r, e: finished.append(e))
    collect_until(executor, lambda: len(finished) == 4)
    assert finished[3] is None
    executor.close()


def test_a_hung_call_occupies_its_thread_and_no_other_lane() -> None:
    executor = ThreadExecutor({"read:nfs": 1, "read:disk": 1})
    gate, started = threading.Event(), threading.Event()
    finished: list[object] = []

    def hang() -> None:
        started.set()
        gate.wait(PATIENCE_SECONDS)

    executor.submit("read:nfs", hang, lambda r, e: finished.append("nfs"))
    assert started.wait(PATIENCE_SECONDS)
    executor.submit("read:disk", lambda: None, lambda r, e: finished.append("disk"))
    collect_until(executor, lambda: finished == ["disk"])
    assert executor.running("read:nfs") == 1
    gate.set()
    executor.close()


def test_the_owner_is_woken_once_per_collect() -> None:
    woken: list[int] = []
    executor = ThreadExecutor({"hash": 1}, wake=lambda: woken.append(1))
    finished: list[object] = []
    for _ in range(3):
        executor.submit("hash", lambda: None, lambda r, e: finished.append(r))
    collect_until(executor, lambda: len(finished) == 3)
    assert 1 <= len(woken) <= 3
    executor.close()


def test_a_call_beyond_the_queue_limit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "MAX_QUEUED", 1)
    io = ThreadExecutor({"hash": 1})
    gate, started = threading.Event(), threading.Event()
    errors: list[BaseException | None] = []

    def hang() -> None:
        started.set()
        gate.wait(PATIENCE_SECONDS)

    io.submit("hash", hang, lambda r, e: errors.append(e))
    assert started.wait(PATIENCE_SECONDS)
    io.submit("hash", lambda: None, lambda r, e: errors.append(e))
    io.submit("hash", lambda: None, lambda r, e: errors.append(e))
    io.collect()
    assert [type(error) for error in errors] == [TierUnavailableError]
    gate.set()
    collect_until(io, lambda: len(errors) == 3)
    io.close()


def test_a_closed_executor_starts_nothing_and_its_idle_threads_end() -> None:
    executor = ThreadExecutor({"hash": 2})
    finished: list[BaseException | None] = []
    executor.submit("hash", lambda: None, lambda r, e: finished.append(e))
    collect_until(executor, lambda: len(finished) == 1)
    before = [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-hash")]
    executor.close()
    for thread in before:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    executor.submit("hash", lambda: None, lambda r, e: finished.append(e))
    executor.collect()
    assert isinstance(finished[1], TierUnavailableError)


def test_a_process_with_hung_calls_exits() -> None:
    code = (
        "import threading\n"
        "from kvtier.store.executor import ThreadExecutor\n"
        "executor = ThreadExecutor({'read:nfs': 1})\n"
        "started = threading.Event()\n"
        "hang = lambda: (started.set(), threading.Event().wait())\n"
        "executor.submit('read:nfs', hang, lambda r, e: None)\n"
        "started.wait(30)\n"
    )
    path = os.pathsep.join(sys.path)
    assert (
        subprocess.run(
            [sys.executable, "-c", code], timeout=60, env={"PYTHONPATH": path}
        ).returncode
        == 0
    )


def test_either_the_thread_starts_a_call_or_the_owner_revokes_it() -> None:
    executor = ThreadExecutor({"hash": 2})
    ran: list[int] = []
    ended: list[int] = []
    jobs = []
    for number in range(500):
        job = IoCall(
            lambda: 0.0, lambda n=number: ran.append(n), lambda r, e, n=number: ended.append(n)
        )  # type: ignore[misc]
        jobs.append(job.submit(executor, "hash"))
    revoked = [number for number, job in enumerate(jobs) if job.revoke()]
    collect_until(executor, lambda: len(ended) + len(revoked) == 500)
    assert sorted(ran + revoked) == list(range(500))
    assert sorted(ended + revoked) == list(range(500))
    executor.close()
