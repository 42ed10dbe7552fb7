"""Two tier daemons on two mounts of a real NFS 4.2 server in a virtual machine: failures of server
and network cause misses only."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
TOOLS = (
    "qemu-system-x86_64",
    "busybox",
    "cpio",
    "modprobe",
    "rpc.nfsd",
    "exportfs",
    "tc",
    "iptables",
)
MACHINE_SECONDS = 900
CLOCK_SECONDS = 2.0
"""What the scenarios give a load."""
SLACK_SECONDS = 1.5
"""The machine is emulated, about ten times slower than this one."""

pytestmark = pytest.mark.timeout(MACHINE_SECONDS + 60)


def _why_not() -> str:
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    missing = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if missing:
        return f"a machine with NFS needs {', '.join(missing)}"
    if os.geteuid() != 0:
        return "a machine with NFS needs root: its files are shared by virtiofsd in a sandbox"
    if not Path("/usr/lib/qemu/virtiofsd").exists():
        return "virtiofsd is missing (part of Debian's qemu-system-x86 up to version 12)"
    return ""


@pytest.fixture(scope="module")
def scenarios() -> dict[str, dict[str, Any]]:
    """What each scenario found, by name. The machine starts once."""
    reason = _why_not()
    if reason:
        pytest.skip(reason)
    paths = f"{REPOSITORY / 'connector'}:{REPOSITORY / 'operator'}"
    command = (
        f"PYTHONPATH={paths} PYTHONDONTWRITEBYTECODE=1 "
        f"{sys.executable} {HERE / 'scenarios.py'} /tmp/kvtier-nfs"
    )
    with subprocess.Popen(
        [sys.executable, str(HERE / "in_vm"), "--timeout", str(MACHINE_SECONDS), command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as machine:
        output, _ = machine.communicate(timeout=MACHINE_SECONDS + 30)
    lines = [line.partition("SCENARIO ")[2] for line in output.splitlines() if "SCENARIO " in line]
    if "in_vm: no kernel" in output:
        pytest.skip(f"the kernel for a machine with NFS cannot be had: {output[-300:]}")
    found = {document["name"]: document for document in map(json.loads, lines)}
    assert found, output[-4000:]
    print(output[-6000:])
    return found


@pytest.mark.parametrize(
    "name",
    [
        "found by another client",
        "never half written",
        "server stopped",
        "partition",
        "end beside a hang",
        "directory replaced",
    ],
)
def test_no_byte_is_wrong_and_no_tierd_exits(
    scenarios: dict[str, dict[str, Any]], name: str
) -> None:
    found = scenarios[name]
    assert "error" not in found
    assert found["wrong"] == 0
    assert found["daemons_live"]


def test_an_object_of_one_client_is_found_by_the_other_or_is_a_miss(
    scenarios: dict[str, dict[str, Any]],
) -> None:
    found = scenarios["found by another client"]
    assert found["filed"] > 0
    assert found["at_once"]["longest_seconds"] <= CLOCK_SECONDS
    assert found["seen"]
    assert found["later"]["loaded"] == found["filed"]


def test_the_other_client_sees_complete_objects_only(
    scenarios: dict[str, dict[str, Any]],
) -> None:
    found = scenarios["never half written"]
    assert found["looked"] > 0
    assert found["partial"] == []
    assert found["later"]["loaded"] == found["filed"] > 0


@pytest.mark.parametrize("name", ["server stopped", "partition"])
def test_an_unresponsive_server_causes_misses_within_the_deadline(
    scenarios: dict[str, dict[str, Any]], name: str
) -> None:
    found = scenarios[name]
    assert found["filed"] > 0
    assert found["during"]["loaded"] == 0
    assert found["during"]["longest_seconds"] <= CLOCK_SECONDS + SLACK_SECONDS
    stored, _, seconds = found["ram"]
    assert stored == 2, "RAM takes what is new beside storage that hangs"
    assert seconds <= SLACK_SECONDS
    assert found["recovered"]
    assert found["later"]["loaded"] >= 1


def test_a_replaced_directory_causes_misses_within_the_deadline(
    scenarios: dict[str, dict[str, Any]],
) -> None:
    found = scenarios["directory replaced"]
    assert found["held"] > 0
    assert found["during"]["loaded"] < found["held"]
    assert found["during"]["longest_seconds"] <= CLOCK_SECONDS + SLACK_SECONDS


def test_a_tierd_with_hung_reads_exits_within_five_seconds(
    scenarios: dict[str, dict[str, Any]],
) -> None:
    assert scenarios["end beside a hang"]["exit_seconds"] <= 5.0
