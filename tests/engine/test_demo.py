"""The demo itself, as a newcomer runs it, and what is left of it when it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.support.processes import heeded

COMMAND = [sys.executable, "-m", "kvtier.cli.demo"]


def _environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path), **changes}


def _traces() -> set[str]:
    """What a demo could leave behind."""
    found = {
        str(path) for folder in ("/tmp", "/dev/shm") for path in Path(folder).glob("*kvtier-demo*")
    }
    for process in psutil.process_iter(["cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or ())
        if "kvtier-demo" in command and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.add(f"{process.pid} {command[:80]}")
    return found


@contextmanager
def _started(output: Path, **changes: str) -> Iterator[subprocess.Popen[bytes]]:
    """A demo whose output goes to a file. Afterwards it and its engines have ended."""
    with output.open("w") as out:
        demo = subprocess.Popen(
            COMMAND,
            env=_environment(**changes),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield demo
    finally:
        if demo.poll() is None:
            demo.terminate()  # it ends what it started; killed at once it could not
            try:
                demo.wait(60)
            except subprocess.TimeoutExpired:
                demo.kill()
                demo.wait(30)


@pytest.fixture
def before() -> set[str]:
    return _traces()


def test_the_demo_reloads_from_ram_and_after_a_kill_from_files(
    tmp_path: Path, before: set[str]
) -> None:
    kept = tmp_path / "demo"
    with _started(tmp_path / "out", KVTIER_DEMO_DIR=str(kept)) as demo:
        demo.wait(840)
    output = (tmp_path / "out").read_text()
    assert demo.returncode == 0, output[-6000:]
    last = output.strip().splitlines()[-1]
    assert last.startswith("RESULT ")
    result = json.loads(last.removeprefix("RESULT "))
    assert result["identical_tokens"] is True
    assert result["control_tokens_differ"] is True
    assert result["loaded_tokens_ram"] > 0
    assert result["loaded_tokens_after_restart"] >= 0.95 * result["storable_tokens"]
    assert result["device"] == "cpu"
    assert (kept / "policy.yaml").exists()
    assert (kept / "topology" / "structural.json").exists()
    assert list((kept / "tier").rglob("*.kv"))
    assert _traces() <= before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(
    number: signal.Signals, before: set[str], tmp_path: Path
) -> None:
    with heeded(number), _started(tmp_path / "out") as demo:
        deadline = time.monotonic() + 240
        # Engines are being started by then, one of them perhaps with its daemon.
        while (
            len(psutil.Process(demo.pid).children(recursive=True)) < 3
            and time.monotonic() < deadline
        ):
            assert demo.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.1)
        demo.send_signal(number)
        assert demo.wait(120) == 128 + number
    # A daemon that an engine has started is told to end, and ends by itself.
    deadline = time.monotonic() + 60
    while not _traces() <= before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _traces() <= before
