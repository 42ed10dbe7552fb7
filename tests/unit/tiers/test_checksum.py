"""Checksums: other threads run while a large input is hashed."""

import sys
import threading
from collections.abc import Iterator

import pytest

from kvtier.tiers.checksum import Blake3, Checksum, Xxh3

LARGE_BYTES = 64 << 20
MAX_DIGESTS = 300


@pytest.fixture
def no_forced_switch() -> Iterator[None]:
    """The interpreter takes its lock from no thread: another thread runs only while the holder has
    released it.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(3_600.0)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("no_forced_switch")
@pytest.mark.parametrize("checksum", [Xxh3(), Blake3()], ids=lambda each: each.kind)
def test_other_threads_run_while_a_checksum_is_computed(checksum: Checksum) -> None:
    data = memoryview(bytes(LARGE_BYTES))
    gate, ran = threading.Lock(), []
    gate.acquire()

    def other() -> None:
        gate.acquire()
        ran.append(True)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    gate.release()
    # Nothing in this loop gives the lock away except the digest. Several, because the system may
    # not run the other thread during the first ones.
    for _ in range(MAX_DIGESTS):
        checksum.digest(data)
        if ran:
            break
    during = bool(ran)
    thread.join()
    assert during
