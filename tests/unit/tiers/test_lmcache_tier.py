"""The lmcache tier beyond the conformance suite: its process, lists of objects and refusals."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from tests.support import lmcache_backends as backends

from kvtier.config.models import LMCacheTierDocument
from kvtier.errors import (
    KVTierError,
    TierError,
    TierMissError,
    TierNoSpaceError,
    TierUnavailableError,
)
from kvtier.harness.lmcache_servers import (
    FaultyProxy,
    LMCacheProcess,
    RedisProcess,
    ServerProcess,
)
from kvtier.processes import Liveness, ProcessIdentity, liveness_of, pid_namespace, process_start
from kvtier.testing.objects import buffer, make_object
from kvtier.tiers.base import ObjectRef, TierLimits
from kvtier.tiers.lmcache import LMCacheTier, stock
from kvtier.tiers.lmcache.process import ChildLane, ChildProcess
from kvtier.tiers.lmcache.tier import require_lmcache
from kvtier.tiers.lmcache.wire import ENTRY_BYTES, LaneReply, LaneRequest, OpenRequest

pytestmark = pytest.mark.slow
PATIENCE_SECONDS = 60.0


def document(url: str, credentials: Path | None = None) -> LMCacheTierDocument:
    directory = None if credentials is None else str(credentials)
    return LMCacheTierDocument(name="remote", url=url, credentials_directory=directory)


def directory_url(tmp_path: Path) -> str:
    return f"fs://localhost:0{tmp_path}/objects"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.05)


def ignore(*_: object) -> None:
    return


@pytest.fixture
def empty_redis(redis: RedisProcess) -> RedisProcess:
    client = backends.RedisClient(redis.port)
    client("CONFIG", "SET", "maxmemory", "0")
    client("FLUSHALL")
    client.close()
    return redis


class TestPackage:
    def test_without_the_package_the_tier_says_so(self) -> None:
        def absent(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        with pytest.raises(KVTierError, match=r"not installed: use an image with lmcache 0\.5\.6"):
            require_lmcache(absent)

    def test_another_version_is_refused(self) -> None:
        with pytest.raises(KVTierError, match=r"lmcache is 0\.4\.0: must be 0\.5\.6"):
            require_lmcache(lambda _: "0.4.0")

    def test_no_process_but_the_child_imports_lmcache(self) -> None:
        code = (
            "import kvtier.tierd.daemon, kvtier.tiers.lmcache, sys\n"
            "found = {'lmcache', 'torch'} & set(sys.modules)\n"
            "assert not found, found"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


class TestProcess:
    def test_a_killed_process_costs_misses_and_is_started_again(
        self, child: backends.ReusedChild, tmp_path: Path
    ) -> None:
        tier = LMCacheTier(document(directory_url(tmp_path)), TierLimits(1 << 30), child)
        tier.open(ignore)
        ref, payload, meta = make_object(1)
        tier.write(ref, payload, meta)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        wait_until(lambda: child.pid is None)
        with pytest.raises(TierUnavailableError, match="does not run"):
            tier.read(ref, buffer(payload.nbytes))
        assert tier.contains(ref), "an object does not vanish because the process does"
        tier.maintain()
        into = buffer(payload.nbytes)
        assert tier.read(ref, into) == meta
        assert into == payload

    def test_a_process_that_hangs_is_killed_and_the_read_fails_in_time(
        self, child: backends.ReusedChild, tmp_path: Path
    ) -> None:
        limits = TierLimits(1 << 30, load_timeout_seconds=1)
        tier = LMCacheTier(document(directory_url(tmp_path)), limits, child)
        tier.open(ignore)
        ref, payload, meta = make_object(2)
        tier.write(ref, payload, meta)
        kills, pid = child.kills, child.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TierUnavailableError, match="hung for 3 s"):
            tier.read(ref, buffer(payload.nbytes))
        assert child.kills == kills + 1
        assert child.pid is None
        tier.check()
        into = buffer(payload.nbytes)
        assert tier.read(ref, into) == meta
        assert into == payload

    def test_starts_that_fail_are_spaced(self, tmp_path: Path) -> None:
        class Failing(ChildProcess):
            starts = 0

            def start(self, target: object) -> None:
                Failing.starts += 1
                raise TierUnavailableError("no memory")

        tier = LMCacheTier(document(directory_url(tmp_path)), TierLimits(1 << 30), Failing())
        with pytest.raises(TierUnavailableError, match="no memory"):
            tier.open(ignore)
        with pytest.raises(TierUnavailableError, match="its next start is in"):
            tier.check()
        assert Failing.starts == 1

    def test_the_process_ends_with_the_process_of_the_tier(self, tmp_path: Path) -> None:
        backends.require_lmcache()
        code = (
            "import os, sys\n"
            "from kvtier.config.models import LMCacheTierDocument\n"
            "from kvtier.tiers.base import TierLimits\n"
            "from kvtier.tiers.lmcache import LMCacheTier\n"
            f"document = LMCacheTierDocument(name='x', url={directory_url(tmp_path)!r})\n"
            "tier = LMCacheTier(document, TierLimits(1 << 30))\n"
            "tier.open(lambda *change: None)\n"
            "print(tier.child.pid, flush=True)\n"
            "os._exit(0)\n"
        )
        found = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE)
        pid = int(found.stdout)
        identity = ProcessIdentity(pid, process_start(pid), pid_namespace())
        wait_until(lambda: liveness_of(identity) is Liveness.GONE)


class TestRaces:
    """Reads of an object that another thread removes and stores again."""

    @pytest.fixture
    def tier(self, child: backends.ReusedChild, tmp_path: Path) -> LMCacheTier:
        tier = LMCacheTier(document(directory_url(tmp_path)), TierLimits(1 << 30), child)
        self.changes: list[bool] = []
        tier.open(lambda *change: self.changes.append(change[2]))
        tier.write(*make_object(7))
        return tier

    @staticmethod
    def replace_during_the_read(
        tier: LMCacheTier, outcome: Literal["missing", "corrupt"], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The next read sees the object gone or cut, and then it is stored again."""
        call, reads = tier.child.call, []

        def racing(lane: ChildLane, request: LaneRequest) -> LaneReply:
            if request.operation != "get" or reads:
                return call(lane, request)
            reads.append(request)
            tier.delete(make_object(7)[0])
            tier.write(*make_object(7))
            return LaneReply(outcome)

        monkeypatch.setattr(tier.child, "call", racing)

    @pytest.mark.parametrize("outcome", ["missing", "corrupt"])
    def test_an_object_that_is_stored_again_stays(
        self,
        tier: LMCacheTier,
        outcome: Literal["missing", "corrupt"],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.replace_during_the_read(tier, outcome, monkeypatch)
        ref, payload, meta = make_object(7)
        into = buffer(payload.nbytes)
        with pytest.raises(TierMissError):
            tier.read(ref, into)
        assert tier.contains(ref)
        assert self.changes == [True, False, True]
        assert tier.usage().objects == 1
        assert tier.read(ref, into) == meta
        assert into == payload

    def test_a_file_that_is_replaced_while_it_is_read_is_no_damage(self, tmp_path: Path) -> None:
        backends.require_lmcache()
        from kvtier.tiers.lmcache.backends import DirectoryBackend, engine_key

        backend = DirectoryBackend(OpenRequest(directory_url(tmp_path)))
        ref, content = make_object(7)[0], memoryview(bytearray(b"x" * 5_000))
        key, into = engine_key(ref.namespace, ref.key.hex()), memoryview(bytearray(5_000))
        connector = backend.connector()
        read, reads = connector.get, []

        async def racing(key: object) -> object:
            reads.append(key)
            if len(reads) > 1:
                return await read(key)
            # The reader finds no file, and then a writer makes one.
            path = backends.object_file(tmp_path / "objects", ref)
            path.with_suffix(".new").write_bytes(path.read_bytes())
            path.with_suffix(".new").replace(path)
            return None

        assert backend.put(key, content, 5.0).outcome == "done"
        connector.get = racing
        found = backend.get(key, into, 5.0)
        assert (found.outcome, found.size_bytes, len(reads)) == ("found", 5_000, 2)
        assert into == content
        backends.object_file(tmp_path / "objects", ref).write_bytes(b"cut")
        assert backend.get(key, into, 5.0).outcome == "corrupt"
        assert backend.delete(key, 5.0).outcome == "done"
        assert backend.get(key, into, 5.0).outcome == "missing"


class TestBackEnds:
    def test_objects_of_other_pods_are_found_and_lost_ones_are_dropped(
        self, child: backends.ReusedChild, empty_redis: RedisProcess
    ) -> None:
        first, second = (
            LMCacheTier(document(empty_redis.url), TierLimits(1 << 30), child, refresh_seconds=0)
            for _ in range(2)
        )
        changes: list[tuple[str, bytes, bool]] = []
        first.open(ignore)
        second.open(lambda *change: changes.append(change))
        ref, payload, meta = make_object(3)
        first.write(ref, payload, meta)
        second.maintain()
        assert changes == [(ref.namespace, ref.key, True)]
        assert second.usage().used_bytes == first.usage().used_bytes
        client = backends.RedisClient(empty_redis.port)
        client("DEL", backends.object_name(ref) + "metadata")
        second.maintain()
        assert changes[1:] == [(ref.namespace, ref.key, False)]
        # The value that is left over occupies memory, and no pod would look for it again.
        second.maintain()
        assert client("EXISTS", backends.object_name(ref) + "kv_bytes") == 0
        client.close()

    def test_a_full_server_is_no_failure_of_the_tier(
        self, child: backends.ReusedChild, empty_redis: RedisProcess
    ) -> None:
        tier = LMCacheTier(document(empty_redis.url), TierLimits(1 << 30), child)
        tier.open(ignore)
        client = backends.RedisClient(empty_redis.port)
        client("CONFIG", "SET", "maxmemory", "1")
        client.close()
        with pytest.raises(TierNoSpaceError, match="maxmemory"):
            tier.write(*make_object(4))
        assert tier.usage().used_bytes == 0

    def test_the_password_comes_from_a_file_and_is_nowhere_else(
        self, child: backends.ReusedChild, tmp_path: Path
    ) -> None:
        backends.require_redis()
        server = RedisProcess(tmp_path / "server", "--requirepass", "s3cret/@:")
        server.start()
        try:
            secret = tmp_path / "secret"
            secret.mkdir()
            (secret / "username").write_text("default")
            (secret / "password").write_text("wrong")
            tier = LMCacheTier(document(server.url, secret), TierLimits(1 << 30), child)
            with pytest.raises(TierUnavailableError, match="password"):
                tier.open(ignore)
            (secret / "password").write_text("s3cret/@:\n")
            tier.open(ignore)
            tier.write(*make_object(5))
            assert child.pid is not None
            for name in ("cmdline", "environ"):
                assert b"s3cret" not in Path(f"/proc/{child.pid}/{name}").read_bytes()
        finally:
            server.kill()

    @pytest.mark.parametrize("kind", ["empty_redis", "server"])
    def test_a_read_from_a_hung_server_ends_in_time_and_the_process_stays(
        self, child: backends.ReusedChild, request: pytest.FixtureRequest, kind: str
    ) -> None:
        hung: ServerProcess = request.getfixturevalue(kind)
        limits = TierLimits(1 << 30, load_timeout_seconds=1)
        tier = LMCacheTier(document(hung.url), limits, child)
        tier.open(ignore)
        ref, payload, meta = make_object(60)
        tier.write(ref, payload, meta)
        kills, pid = child.kills, child.pid
        hung.suspend()
        try:
            with pytest.raises(TierUnavailableError):
                tier.read(ref, buffer(payload.nbytes))
        finally:
            hung.resume()
        assert (child.kills, child.pid) == (kills, pid)
        tier.check()
        into = buffer(payload.nbytes)
        assert tier.read(ref, into) == meta
        assert into == payload

    @pytest.mark.parametrize("kind", ["empty_redis", "server"])
    @pytest.mark.parametrize("fault", ["lie", "garble", "cut"])
    def test_a_server_that_lies_gives_no_object(
        self, child: backends.ReusedChild, request: pytest.FixtureRequest, kind: str, fault: str
    ) -> None:
        proxy = FaultyProxy(request.getfixturevalue(kind))
        try:
            limits = TierLimits(1 << 30, load_timeout_seconds=2)
            tier = LMCacheTier(document(proxy.url), limits, child)
            tier.open(ignore)
            ref, payload, meta = make_object(61, (200_000,))
            tier.write(ref, payload, meta)
            proxy.set(fault)
            for _ in range(3):
                with pytest.raises(TierError):
                    tier.read(ref, buffer(payload.nbytes))
            proxy.set("")
            tier.write(ref, payload, meta)
            into = buffer(payload.nbytes)
            assert tier.read(ref, into) == meta
            assert into == payload
        finally:
            proxy.close()

    def test_the_lists_of_two_pods_are_merged(
        self, child: backends.ReusedChild, server: LMCacheProcess
    ) -> None:
        first, second = (
            LMCacheTier(document(server.url), TierLimits(1 << 30), child, refresh_seconds=0)
            for _ in range(2)
        )
        first.open(ignore)
        second.open(ignore)
        for seed in range(20, 30):
            first.write(*make_object(seed))
            second.write(*make_object(seed + 100))
        first.maintain()
        second.maintain()
        first.maintain()
        for seed in (*range(20, 30), *range(120, 130)):
            assert first.contains(make_object(seed)[0])
            assert second.contains(make_object(seed)[0])
        second.delete(make_object(20)[0])
        second.maintain()
        third = LMCacheTier(document(server.url), TierLimits(1 << 30), child)
        third.open(ignore)
        assert not third.contains(make_object(20)[0])
        assert third.contains(make_object(21)[0])

    def test_a_server_that_was_restarted_has_nothing(
        self, child: backends.ReusedChild, tmp_path: Path
    ) -> None:
        backends.require_lmcache()
        server = LMCacheProcess(tmp_path / "server")
        server.start()
        proxy = FaultyProxy(server)
        try:
            tier = LMCacheTier(document(proxy.url), TierLimits(1 << 30), child, refresh_seconds=0)
            tier.open(ignore)
            refs = [make_object(seed)[0] for seed in range(40, 43)]
            for seed in range(40, 43):
                tier.write(*make_object(seed))
            tier.maintain()
            server.kill()
            with pytest.raises(TierUnavailableError):
                tier.read(refs[0], buffer(8_192))
            assert tier.contains(refs[0]), "a server that is down has lost nothing yet"
            server.start()
            tier.maintain()
            assert not any(tier.contains(ref) for ref in refs)
            assert tier.usage().used_bytes == 0
        finally:
            proxy.close()
            server.kill()

    def test_a_list_in_parts_is_complete_or_fails(
        self, child: backends.ReusedChild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stock, "LIST_BYTES", 4 * ENTRY_BYTES)
        tier = LMCacheTier(document(directory_url(tmp_path)), TierLimits(1 << 30), child)
        tier.open(ignore)
        for seed in range(12):
            tier.write(*make_object(seed))
        again = LMCacheTier(
            document(directory_url(tmp_path)), TierLimits(1 << 30), child, refresh_seconds=0
        )
        again.open(ignore)
        assert again.usage().objects == 12
        # The process is replaced between two parts: what was not listed must not be dropped.
        fetch, parts = again._stock._read, []

        def replacing(request: LaneRequest) -> tuple[LaneReply, bytes]:
            parts.append(request.start)
            if request.start == 4:
                child.kill()
                child.start(again._target)
            return fetch(request)

        monkeypatch.setattr(again._stock, "_read", replacing)
        with pytest.raises(TierUnavailableError, match="interrupted"):
            again.maintain()
        assert parts == [0, 4]
        assert again.usage().objects == 12

    def test_a_lowered_capacity_is_reached(
        self, child: backends.ReusedChild, tmp_path: Path
    ) -> None:
        tier = LMCacheTier(document(directory_url(tmp_path)), TierLimits(1 << 30), child)
        tier.open(ignore)
        for seed in range(20):
            tier.write(*make_object(seed))
        tier.touch(make_object(0)[0])
        used = tier.usage().used_bytes
        tier.configure(TierLimits(used // 2, 90, 50))
        tier.maintain()
        assert tier.usage().used_bytes <= used // 4
        assert tier.contains(make_object(0)[0]), "the most recently used object stays"
        files = list((tmp_path / "objects").glob("*.data"))
        assert len(files) == tier.usage().objects

    def test_what_killed_writers_left_is_removed(
        self, child: backends.ReusedChild, tmp_path: Path
    ) -> None:
        objects = tmp_path / "objects"
        objects.mkdir()
        old, new, other = (
            objects / f"kvtier-{'1' * 32}@1@0@1{digit}@uint8.tmp" for digit in ("aa", "bb", "cc")
        )
        other = objects / "model@1@0@abc@half.tmp"
        for path in (old, new, other):
            path.write_bytes(b"part")
        os.utime(old, (0, 0))
        os.utime(other, (0, 0))
        tier = LMCacheTier(document(directory_url(tmp_path)), TierLimits(1 << 30), child)
        tier.open(ignore)
        assert not old.exists()
        assert new.exists(), "it may still be written"
        assert other.exists(), "it is not KVTier's"

    def test_a_key_that_lmcache_cannot_name_is_refused(
        self, child: backends.ReusedChild, tmp_path: Path
    ) -> None:
        tier = LMCacheTier(document(directory_url(tmp_path)), TierLimits(1 << 30), child)
        tier.open(ignore)
        _, payload, meta = make_object(6)
        longest, longer = (ObjectRef("ab" * 16, bytes([7]) * count) for count in (49, 50))
        tier.write(longest, payload, meta)
        assert tier.read(longest, buffer(payload.nbytes)) == meta
        with pytest.raises(TierUnavailableError, match="key of 50 bytes"):
            tier.write(longer, payload, meta)
        with pytest.raises(TierMissError):
            tier.read(longer, payload)
        assert not tier.probe(longer)
        tier.delete(longer)
