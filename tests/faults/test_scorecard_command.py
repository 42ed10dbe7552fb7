"""`kvtier faults` as a process: list of faults, invalid options, cleanup after termination."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.processes import heeded

from kvtier.harness.tierd_testbed import environment, wait_for
from kvtier.scorecard import runner


def faults(*arguments: str, seconds: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtier.cli.main", "faults", *arguments]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=seconds, check=False
    )


def test_every_fault_has_a_unique_name_and_is_listed() -> None:
    done = faults("--list")
    assert done.returncode == 0
    assert len(set(runner.names())) == len(runner.names())
    assert set(runner.names()) <= set(done.stdout.split())


@pytest.mark.parametrize("arguments", [("--fault", "gremlins"), ("--path", "/nowhere")])
def test_invalid_options_are_rejected(arguments: tuple[str, str]) -> None:
    done = faults(*arguments)
    assert done.returncode == 2
    assert arguments[1] in done.stderr


def processes_with(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command:
            found.append(command)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_terminated_scorecard_leaves_no_process_mount_or_file(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [
        sys.executable,
        "-m",
        "kvtier.cli.main",
        "faults",
        "--path",
        str(tmp_path),
        "--fault",
        "latency-1s",
    ]
    with (
        heeded(number),
        subprocess.Popen(
            [*command, "--seconds", "600"], env=environment(), stdout=subprocess.DEVNULL
        ) as running,
    ):
        try:
            wait_for(
                lambda: len(processes_with(f"{tmp_path}/kvtier-faults-")) >= 1,
                "something was started",
            )
            wait_for(
                lambda: next(tmp_path.glob("*/testbed/tierd.log"), None), "the daemon was started"
            )
            running.send_signal(number)
            assert running.wait(60) == 128 + number
        finally:
            running.kill()
    wait_for(lambda: not processes_with(f"{tmp_path}/kvtier-faults-"), "every process has ended")
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert list(tmp_path.iterdir()) == []
