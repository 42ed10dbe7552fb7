"""Calls of a driver are made by daemon threads, and waited for as long as some of them end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvtier.transfer import driver_calls
from kvtier.transfer.driver_calls import DriverCalls, DriverHangsError, wait_for_calls


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Set at the end of a test: what hangs ends."""
    event = threading.Event()
    yield event
    event.set()


def test_results_and_exceptions_belong_to_who_asked() -> None:
    calls = DriverCalls(2, "test")
    good = [calls.submit(divmod, number, 2) for number in range(10)]
    bad = calls.submit(divmod, 1, 0)
    wait_for_calls([*good, bad])
    assert [each.result(0) for each in good] == [divmod(number, 2) for number in range(10)]
    assert isinstance(bad.exception(0), ZeroDivisionError)
    calls.close()
    calls.close()
    with pytest.raises(RuntimeError, match="no further calls"):
        calls.submit(divmod, 1, 1)


def test_a_call_that_hangs_ends_the_wait_and_not_the_others(
    release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = DriverCalls(2, "test")
    hanging = calls.submit(release.wait)
    others = [calls.submit(str, number) for number in range(5)]
    wait_for_calls(others)
    monkeypatch.setattr(driver_calls, "STALL_SECONDS", 0.2)
    with pytest.raises(DriverHangsError, match="1 of 6 calls have not ended"):
        wait_for_calls([hanging, *others])
    assert [each.result(0) for each in others] == list("01234")


def test_what_waits_behind_calls_that_hang_is_not_made(
    release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_calls, "STALL_SECONDS", 0.2)
    calls = DriverCalls(1, "test")
    made: list[int] = []
    hanging = calls.submit(release.wait)
    behind = calls.submit(made.append, 1)
    with pytest.raises(DriverHangsError, match="2 of 2"):
        wait_for_calls([hanging, behind])
    calls.close(cancel=True)
    assert behind.cancelled()
    release.set()
    wait_for_calls([hanging])
    assert made == []


def test_without_a_thread_a_call_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(RuntimeError, match="can't start"):
        DriverCalls(1, "test").submit(str)


def test_a_process_with_a_hanging_call_ends() -> None:
    code = (
        "import threading\n"
        "from kvtier.transfer.driver_calls import DriverCalls\n"
        "started = threading.Event()\n"
        "def hang():\n"
        "    started.set()\n"
        "    threading.Event().wait()\n"
        "DriverCalls(1, 'test').submit(hang)\n"
        "assert started.wait(30)\n"
    )
    # Only a process that hangs takes as long.
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
