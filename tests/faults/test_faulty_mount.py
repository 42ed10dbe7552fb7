"""The faulty FUSE mount: a hanging call blocks no other call, and the mount ends with its owner."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.harness.tierd_testbed import environment, wait_for
from kvtier.scorecard.mount import FaultyMount, faulty_mount, unavailable

OWNER = """
import sys, time
from pathlib import Path
from kvtier.scorecard.mount import FaultyMount
home = Path(sys.argv[1])
mount = FaultyMount(home / "below", home / "mount", home / "faults.json", home / "mount.log")
mount.set(every={"hang": True})
print("hangs", flush=True)
time.sleep(3600)
"""


@pytest.fixture
def home() -> Iterator[Path]:
    if unavailable():
        pytest.skip(unavailable())
    directory = Path(tempfile.mkdtemp(prefix="kvtier-mount-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def mount(home: Path) -> Iterator[FaultyMount]:
    try:
        with faulty_mount(home) as made:
            yield made
    except OSError as error:
        pytest.skip(f"no FUSE mount can be made here: {error}")


def test_a_hanging_read_blocks_no_other_call_and_resumes(
    mount: FaultyMount,
) -> None:
    (mount.source / "file").write_bytes(b"content")
    mount.set(read={"hang": True})
    found: list[bytes] = []
    reader = threading.Thread(
        target=lambda: found.append((mount.path / "file").read_bytes()), daemon=True
    )
    assert not mount.holds("read")
    reader.start()
    wait_for(lambda: mount.holds("read"), "the read hangs")
    assert not mount.holds("write")
    assert os.listdir(mount.path) == ["file"]
    (mount.path / "another").write_bytes(b"x")
    assert reader.is_alive()
    mount.set()
    reader.join(60)
    assert found == [b"content"]
    assert not mount.holds("read")


@pytest.mark.parametrize(
    ("fault", "expected"), [({"half": True}, b"a" * 4096), ({"flip": "header"}, None)]
)
def test_reads_return_short_or_flipped_data(
    mount: FaultyMount, fault: dict[str, object], expected: bytes | None
) -> None:
    whole = b"a" * 8192
    (mount.source / "file").write_bytes(whole)
    mount.set(read=fault)
    found = (mount.path / "file").read_bytes()
    assert found != whole
    assert found == (expected or found)
    mount.set()
    assert (mount.path / "file").read_bytes() == whole


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_hanging_mount_is_removed_when_its_owner_is_killed(
    home: Path, number: signal.Signals
) -> None:
    (home / "below").mkdir()
    path = home / "mount"
    path.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(home)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        if owner.stdout is None or owner.stdout.readline() != "hangs\n":
            pytest.skip("no FUSE mount can be made here")
        ended = threading.Event()

        def look() -> None:
            try:
                os.listdir(path)
            except OSError:
                pass
            ended.set()

        threading.Thread(target=look, daemon=True).start()
        time.sleep(0.3)
        assert not ended.is_set()
        owner.send_signal(number)
    wait_for(lambda: str(path) not in Path("/proc/mounts").read_text(), "the mount is gone")
    wait_for(ended.is_set, "the call that hung has ended")
