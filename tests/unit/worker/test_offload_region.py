"""Regions of vLLM's own offloading in ``/dev/shm``, over kills of the engine's container."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.engines.vllm import offload_region

POD = "7d8f8f3e-0000-4000-8000-00000000000a"
ENGINE = """
import mmap, os, sys
from pathlib import Path
from types import SimpleNamespace
from kvtier.engines.vllm import offload_region
directory, size = Path(sys.argv[1]), int(sys.argv[2])
transfer = SimpleNamespace(engine_id="own", kv_connector_extra_config={"cpu_bytes_to_use": size})
reason = offload_region.prepare(transfer, directory)
if reason:
    sys.exit(reason)
path = directory / f"vllm_offload_{transfer.engine_id}.mmap"
descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
os.posix_fallocate(descriptor, 0, size)
region = mmap.mmap(descriptor, size)
if sys.argv[3] == "mapped":
    os.close(descriptor)
print(path.name, flush=True)
sys.stdin.read()
"""


def transfer(size: int = 1) -> Any:
    return SimpleNamespace(engine_id="own", kv_connector_extra_config={"cpu_bytes_to_use": size})


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(offload_region.POD_VARIABLE, POD)
    return POD


@pytest.fixture
def engines() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for each in started:
        each.kill()
        each.wait()


def start(
    engines: list[subprocess.Popen[str]], directory: Path, size: int = 1 << 20, kept: str = "open"
) -> str:
    """Starts what an engine does and returns the name of its region."""
    command = [sys.executable, "-c", ENGINE, str(directory), str(size), kept]
    path = os.pathsep.join(sys.path)
    engine = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    engines.append(engine)
    assert engine.stdout is not None
    name = engine.stdout.readline().strip()
    assert name, "the engine did not start"
    return name


def test_ten_kills_leave_room_for_the_next_start(
    tmp_path: Path, pod: str, engines: list[subprocess.Popen[str]]
) -> None:
    names = set()
    for _ in range(10):
        name = start(engines, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [name], "only its own region is there"
        names.add(name)
        engines[-1].send_signal(signal.SIGKILL)
        engines[-1].wait()
    assert len(names) == 10
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("kept", ["open", "mapped"])
def test_the_region_of_a_living_engine_stays(
    tmp_path: Path, pod: str, engines: list[subprocess.Popen[str]], kept: str
) -> None:
    first = start(engines, tmp_path, kept=kept)
    second = start(engines, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([first, second])


def test_regions_of_other_pods_and_of_vllm_stay(tmp_path: Path, pod: str) -> None:
    others = ["vllm_offload_kvtier-other-1.mmap", "vllm_offload_3f.mmap", "psm_1"]
    for name in (*others, f"vllm_offload_kvtier-{POD}-0.mmap"):
        (tmp_path / name).write_bytes(b"x")
    assert offload_region.prepare(transfer(), tmp_path) == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_without_a_pod_the_region_keeps_vllms_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(offload_region.POD_VARIABLE, raising=False)
    (tmp_path / f"vllm_offload_kvtier-{POD}-0.mmap").write_bytes(b"x")
    found = transfer()
    assert offload_region.prepare(found, tmp_path) == ""
    assert found.engine_id == "own"
    assert len(list(tmp_path.iterdir())) == 1


def test_too_little_room_is_a_reason_and_no_crash(tmp_path: Path, pod: str) -> None:
    reason = offload_region.prepare(transfer(1 << 60), tmp_path)
    assert f"the tiers need {1 << 60} bytes in {tmp_path}" in reason
