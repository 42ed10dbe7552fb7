"""`kvtier inspect`, `kvtier verify` and `kvtier gc`."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.tier_files import bytes_below

from kvtier.cli.directory import age_text, size_text
from kvtier.cli.main import main
from kvtier.config.models import FileSystemTierDocument
from kvtier.errors import TierMissError
from kvtier.harness.file_writers import NAMESPACE, OBJECT_BYTES, directory_bytes, make, open_tier
from kvtier.processes import process_tag
from kvtier.tenants import tenant_id
from kvtier.testing.damage import flip
from kvtier.testing.objects import make_object
from kvtier.tiers.base import ObjectRef, TierLimits
from kvtier.tiers.checksum import preferred
from kvtier.tiers.filesystem import FileSystemTier, index_saver
from kvtier.tiers.filesystem.announcement_log import AnnouncementLog
from kvtier.tiers.filesystem.election import is_visible
from kvtier.tiers.filesystem.gc import CollectHooks, collect
from kvtier.tiers.filesystem.inspect import survey
from kvtier.tiers.filesystem.layout import IDENTITY as IDENTITY_NAME
from kvtier.tiers.filesystem.layout import SAVED_INDEX
from kvtier.tiers.filesystem.maintenance import DirectoryMaintenance
from kvtier.tiers.filesystem.prefixes import survey_prefixes
from kvtier.tiers.filesystem.seal import Sealing
from kvtier.tiers.filesystem.walker import object_path
from kvtier.tiers.isolation_keys import read_key_set

IDENTITY = {
    "engine": {
        "engine": {"name": "vllm", "version": "0.32.0"},
        "model": {"name": "org/model", "revision": "abc123"},
        "dtype": "torch.bfloat16",
        "kv_cache_dtype": "auto",
        "parallel": {"tensor": 2},
        "effective_chunk_tokens": 256,
        "salt": "",
    },
    "layout": [],
}


@dataclass
class Outcome:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def kvtier(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def tier(root: Path) -> Iterator[FileSystemTier]:
    """A tier with 40 objects, running."""
    tier = open_tier(root, 1 << 26)
    for seed in range(40):
        tier.write(*make(seed))
    tier.describe_namespace(NAMESPACE, json.dumps(IDENTITY))
    yield tier
    tier.close()


def path_of(root: Path, seed: int) -> Path:
    ref = make(seed)[0]
    return Path(object_path(str(root), ref.namespace, ref.key))


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of tiers that are opened after this do not run: nothing changes between looks."""
    monkeypatch.setattr(DirectoryMaintenance, "start_loop", lambda _: None)
    monkeypatch.setattr(AnnouncementLog, "start", lambda _: None)


def test_inspect_reports_namespaces_and_writers(
    kvtier: Any, root: Path, still: None, tier: FileSystemTier
) -> None:
    Path(tier.maintenance.writer.new_working_path()).write_bytes(bytes(5_000))
    found = kvtier("inspect", root, "--json").json
    assert found["totalBytes"] == directory_bytes(root)
    [namespace] = found["namespaces"]
    assert namespace["namespace"] == NAMESPACE
    assert namespace["objects"] == 40
    assert namespace["bytes"] == 40 * OBJECT_BYTES
    assert namespace["identity"]["model"] == "org/model"
    assert namespace["identity"]["tensorParallel"] == "2"
    assert 0 <= namespace["newestUseAgeSeconds"] <= namespace["oldestUseAgeSeconds"] + 0.001 < 300
    assert found["temporaries"] == {"files": 1, "bytes": 5_000}
    assert found["janitor"]["state"] == "Alive"
    assert found["janitor"]["capacityBytes"] == 1 << 26
    assert is_visible(found["janitor"]["holder"])
    [writer] = found["writers"]
    assert writer["state"] == "Alive"
    assert writer["grantedBytes"] == 1 << 22


def test_inspect_waits_for_nothing_that_others_have_put_into_a_directory(root: Path) -> None:
    """A pipe in the place of a file has no writer."""
    namespace = root / NAMESPACE
    bucket = namespace / "aa" / "bb"
    bucket.mkdir(parents=True)
    pipes = [namespace / IDENTITY_NAME, namespace / SAVED_INDEX, bucket / "00aabb.kv"]
    for path in pipes:
        os.mkfifo(path)
    found: list[object] = []

    def look() -> None:
        found.append(survey(root, time.time()))
        found.append(survey_prefixes(root, time.time()))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(60)
    waits = thread.is_alive()
    for path in pipes if waits else ():
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    assert not waits
    assert len(found) == 2


def test_inspect_prints_a_table(kvtier: Any, root: Path, tier: FileSystemTier) -> None:
    out = kvtier("inspect", root).out
    assert "org/model" in out
    assert "40" in out
    assert "320.0 KiB" in out
    assert f"process {os.getpid()}, alive" in out
    tier.close()
    assert "released" in kvtier("inspect", root).out


def test_inspect_says_what_each_tenant_holds(kvtier: Any, root: Path, tier: FileSystemTier) -> None:
    tenants = [tenant_id(name, "CacheSalt") for name in ("a", "b")]
    for seed, tenant in ((50, tenants[0]), (51, tenants[1]), (52, tenants[1])):
        ref, data, meta = make(seed)
        tier.write(ref, data, replace(meta, tenant=tenant))
    damaged = path_of(root, 0)
    flip(damaged, 100, 1)
    found = kvtier("inspect", root, "--tenants", "--json").json
    assert found["tenants"] == [
        {"tenant": None, "objects": 39, "bytes": 39 * OBJECT_BYTES},
        {"tenant": tenants[1].hex(), "objects": 2, "bytes": 2 * OBJECT_BYTES},
        {"tenant": tenants[0].hex(), "objects": 1, "bytes": OBJECT_BYTES},
    ]
    assert found["objectsOfUnknownTenant"] == 1
    out = kvtier("inspect", root, "--tenants").out
    assert re.search(rf"{tenants[1].hex()}\s+2\s+16.0 KiB\s+0.0%", out)
    assert "of 1 objects the tenant is unknown" in out
    assert "tenants" not in kvtier("inspect", root, "--json").json


def test_inspect_writes_nothing(kvtier: Any, root: Path, tier: FileSystemTier) -> None:
    tier.close()
    before = {path: path.lstat().st_mtime_ns for path in root.rglob("*")}
    kvtier("inspect", root, "--tenants")
    kvtier("gc", root, "--capacity", "100Ki", "--dry-run")
    assert {path: path.lstat().st_mtime_ns for path in root.rglob("*")} == before


@pytest.mark.parametrize("command", [("inspect",), ("verify",), ("gc", "--capacity", "1Gi")])
def test_a_path_that_is_not_a_tier_directory_is_rejected(
    kvtier: Any, tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    for name, reason in (
        ("gone", "does not exist"),
        ("file", "is not a directory"),
        ("other", "contains no namespace"),
    ):
        outcome = kvtier(command[0], tmp_path / name, *command[1:])
        assert outcome.status == 2
        assert reason in outcome.err
        assert str(tmp_path / name) in outcome.err
    assert os.listdir(tmp_path / "other") == []


def test_verify_finds_every_kind_of_damage(kvtier: Any, root: Path, tier: FileSystemTier) -> None:
    good = kvtier("verify", root)
    assert good.status == 0
    assert "40 objects verified" in good.out
    flip(path_of(root, 3), 5_000, 1)
    flip(path_of(root, 4), 100, 1)
    path_of(root, 5).write_bytes(path_of(root, 6).read_bytes())
    outcome = kvtier("verify", root)
    assert outcome.status == 1
    assert "37 objects verified" in outcome.out
    assert "3 corrupt" in outcome.out
    assert all(str(path_of(root, seed)) in outcome.err for seed in (3, 4, 5))
    assert path_of(root, 3).exists()


def test_verify_allocates_no_memory_for_foreign_files(
    kvtier: Any, root: Path, tier: FileSystemTier
) -> None:
    tier.close()
    os.truncate(path_of(root, 3), 1 << 43)
    path_of(root, 4).write_bytes(bytes(4096))
    os.truncate(path_of(root, 4), 1 << 43)
    outcome = kvtier("verify", root, "--json")
    assert outcome.status == 1
    assert outcome.json["verified"] == 38
    assert outcome.json["corrupt"] == 2


def test_verify_with_delete_removes_corrupt_objects(
    kvtier: Any, root: Path, tier: FileSystemTier
) -> None:
    flip(path_of(root, 3), 5_000, 1)
    outcome = kvtier("verify", root, "--delete", "--json")
    assert outcome.status == 1
    assert outcome.json["verified"] == 39
    [bad] = outcome.json["bad"]
    assert bad["path"] == str(path_of(root, 3))
    assert bad["deleted"]
    assert not path_of(root, 3).exists()
    assert kvtier("verify", root).status == 0


def test_gc_evicts_least_recently_used_objects_while_an_engine_runs(
    kvtier: Any, root: Path, tier: FileSystemTier
) -> None:
    for seed in range(40):
        used_at = 1_000_000_000 + 60 * seed
        os.utime(path_of(root, seed), (used_at, used_at))
    dry = kvtier("gc", root, "--capacity", "400Ki", "--dry-run", "--json").json
    assert dry["dryRun"]
    assert dry["objects"] > 0
    assert dry["afterBytes"] <= 400 * 1024
    assert len(list(root.rglob("*.kv"))) == 40
    command = [
        sys.executable,
        "-m",
        "kvtier.cli.main",
        "gc",
        str(root),
        "--capacity",
        "400Ki",
        "--json",
    ]
    done = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    )
    assert not done["janitor"]
    assert directory_bytes(root) <= 400 * 1024
    assert done["afterBytes"] <= 400 * 1024 < done["beforeBytes"]
    left = [seed for seed in range(40) if path_of(root, seed).exists()]
    assert left == list(range(40 - len(left), 40))
    assert left
    janitor = tier.maintenance.janitor
    assert janitor is not None

    def heard() -> bool:
        # A count is requested, or the maintenance loop has made it already.
        return janitor.recount_requested or tier.usage().objects == len(left)

    until = time.monotonic() + 60
    while not heard() and time.monotonic() < until:
        time.sleep(0.05)
        tier.maintenance.run_once()
    assert heard()
    tier.write(*make(100))
    ref, payload, _ = make(0)
    with pytest.raises(TierMissError):
        tier.read(ref, payload)
    assert not tier.contains(ref)


def test_gc_removes_the_ends_of_prefixes_before_their_beginnings(
    kvtier: Any, tmp_path: Path
) -> None:
    root = tmp_path / "chained"
    with contextlib.closing(open_tier(root, 64 << 20)) as tier:
        for first in (0, 20):
            previous = b""
            for seed in range(first, first + 20):
                ref, payload, meta = make(seed)
                tier.write(ref, payload, replace(meta, previous=previous))
                previous = ref.key
    for seed in range(40):
        # The second prompt was used an hour later; each file a minute after the one before it.
        used_at = 1_000_000_000 + 60 * seed + (3_600 if seed >= 20 else 0)
        os.utime(path_of(root, seed), (used_at, used_at))
    done = kvtier("gc", root, "--capacity", "400Ki", "--json").json
    assert 0 < done["objects"] < 40
    left = [seed for seed in range(40) if path_of(root, seed).exists()]
    first, second = [s for s in left if s < 20], [s for s in left if s >= 20]
    assert not first or len(second) == 20, "the prompt that was used last is removed last"
    assert first == list(range(len(first))), "a prompt shrinks from its end"
    assert second == list(range(20, 20 + len(second)))


def test_gc_leads_the_directory_if_no_leader_is_alive(
    kvtier: Any, root: Path, tier: FileSystemTier
) -> None:
    tier.close()
    boot, space, _ = process_tag().split("-")
    dead = root / ".kvtier" / "writers" / f"{boot}-{space}-4194305-1-00000000"
    dead.mkdir()
    (dead / "t-123").write_bytes(bytes(100_000))
    done = kvtier("gc", root, "--capacity", "1Gi", "--json").json
    assert done["janitor"]
    assert done["objects"] == 0
    assert not dead.exists()
    assert len(list(root.rglob("*.kv"))) == 40
    assert kvtier("inspect", root, "--json").json["janitor"]["state"] == "Released"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files that are another's")
@pytest.mark.parametrize("alive", [True, False], ids=["beside a janitor", "as the janitor"])
def test_files_created_by_gc_as_root_belong_to_the_owner_of_the_control_directory(
    root: Path, tier: FileSystemTier, alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the tier were in another process, which must not be superseded.
    monkeypatch.setattr("kvtier.tiers.filesystem.janitor.in_this_process", lambda _: False)
    monkeypatch.setattr("kvtier.tiers.filesystem.election.in_this_process", lambda _: False)
    if not alive:
        tier.close()
    for path in (root, *root.rglob("*")):
        os.chown(path, 4_321, 4_322)
    before = set((root / ".kvtier").rglob("*"))
    owners: set[tuple[int, int]] = set()
    made: set[Path] = set()

    def look(_: str) -> None:
        for path in set((root / ".kvtier").rglob("*")) - before:
            with contextlib.suppress(FileNotFoundError):
                owners.add((path.lstat().st_uid, path.lstat().st_gid))
                made.add(path)

    done = collect(root, 200 * 1024, None, dry_run=False, hooks=CollectHooks(look))
    look("")
    assert done.janitor is not alive
    assert done.objects > 0
    assert {path.name for path in made} >= {"record"} | (set() if alive else {"ledger"})
    assert owners == {(4_321, 4_322)}


def test_gc_removes_namespaces_past_their_retention(
    kvtier: Any, root: Path, tier: FileSystemTier
) -> None:
    ref, payload, meta = make(1)
    other = ObjectRef("c" * 32, ref.key)
    tier.write(other, payload, meta)
    for path in (root / other.namespace).rglob("*.kv"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    tier.close()
    done = kvtier("gc", root, "--capacity", "1Gi", "--retention", "3600", "--json").json
    assert done["namespaces"] == [other.namespace]
    assert done["objects"] == 1
    assert not (root / other.namespace).exists()
    assert (root / NAMESPACE / "identity.json").exists()


def test_gc_empties_an_unused_directory(kvtier: Any, root: Path, tier: FileSystemTier) -> None:
    tier.close()
    # Used before: the file system's clock may be a tick behind that of this process.
    for path in (root / NAMESPACE).rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    done = kvtier("gc", root, "--capacity", "1Gi", "--retention", "0", "--json").json
    assert done["objects"] == 40
    assert list(root.rglob("*.kv")) == []


@pytest.mark.parametrize("size", ["lots", "0", "-5Gi", ""])
def test_gc_rejects_an_invalid_size(
    kvtier: Any, root: Path, tier: FileSystemTier, size: str
) -> None:
    outcome = kvtier("gc", root, f"--capacity={size}")
    assert outcome.status == 2
    assert "--capacity" in outcome.err
    assert "500Gi" in outcome.err
    assert len(list(root.rglob("*.kv"))) == 40


def test_sizes_and_ages_are_short() -> None:
    assert [size_text(each) for each in (0, 1_023, 1_536, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
    ]
    assert [age_text(each) for each in (None, 5, 90, 5_400, 200_000)] == [
        "-",
        "5 s",
        "1.5 min",
        "1.5 h",
        "2.3 d",
    ]


# Sealed objects.


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    directory = tmp_path / "keys"
    directory.mkdir()
    (directory / "2026-11").write_bytes(b"k" * 32)
    return directory


def sealed(root: Path, keys: Path, encrypt: bool, *seeds: int) -> None:
    """Objects of a tenant with keys."""
    key_set = read_key_set(keys)
    document = FileSystemTierDocument(name="disk", path=str(root), sharing="Pod")
    tier = FileSystemTier(
        document, TierLimits(1 << 26), sealing=Sealing(lambda: key_set, encrypt=encrypt)
    )
    tier.open(lambda *_: None)
    for seed in seeds:
        tier.write(*make(seed))
    tier.close()


def test_verify_without_keys_reports_that_tags_were_not_checked(
    kvtier: Any, root: Path, keys: Path
) -> None:
    sealed(root, keys, False, 1, 2)
    sealed(root, keys, True, 3)
    outcome = kvtier("verify", root)
    assert outcome.status == 0
    assert "2 objects verified" in outcome.out
    assert "1 not verified: encrypted" in outcome.out
    assert "the tags of 2 objects were not checked" in outcome.out
    found = kvtier("verify", root, "--json").json
    assert (found["verified"], found["tagNotChecked"], found["encrypted"]) == (2, 2, 1)


def test_verify_with_keys_checks_tags_and_decrypts(kvtier: Any, root: Path, keys: Path) -> None:
    sealed(root, keys, False, 1, 2)
    sealed(root, keys, True, 3)
    outcome = kvtier("verify", root, "--keys", keys, "--json")
    assert outcome.status == 0
    assert (outcome.json["verified"], outcome.json["tagNotChecked"]) == (3, 0)


def test_verify_with_keys_reports_planted_objects_and_deletes_none(
    kvtier: Any, root: Path, keys: Path, tmp_path: Path
) -> None:
    sealed(root, keys, False, 1)
    other = tmp_path / "other"
    other.mkdir()
    (other / "stranger").write_bytes(b"x" * 32)
    sealed(root, other, False, 2)
    sealed(root, other, True, 3)
    planted = open_tier(root, 1 << 26)
    planted.write(*make(4))
    planted.close()
    outcome = kvtier("verify", root, "--keys", keys, "--delete")
    assert outcome.status == 1
    assert "3 not proven by the keys" in outcome.out
    assert outcome.err.count("not proven: unknown_key") == 2
    assert "not proven: unkeyed: the object carries no tag" in outcome.err
    assert all(path_of(root, seed).exists() for seed in (1, 2, 3, 4))


def test_verify_deletes_no_object_of_another_format_version(
    kvtier: Any, root: Path, tier: FileSystemTier
) -> None:
    tier.close()
    path = path_of(root, 1)
    content = bytearray(path.read_bytes())
    content[8] = 9
    content[4080:4096] = preferred().digest(memoryview(content)[:4080])
    path.write_bytes(content)
    path_of(root, 2).write_bytes(content + bytes(4096))
    outcome = kvtier("verify", root, "--delete", "--json")
    assert outcome.status == 0
    assert outcome.json["otherVersion"] == 2
    assert path.read_bytes() == content
    assert path_of(root, 2).exists()


def test_inspect_tells_how_objects_are_sealed_and_that_it_does_not_check(
    kvtier: Any, root: Path, keys: Path
) -> None:
    sealed(root, keys, False, 1, 2)
    sealed(root, keys, True, 3)
    out = kvtier("inspect", root).out.replace("\n", " ")
    assert "2 tag, key 2026-11" in out
    assert "1 AES256GCM, key 2026-11" in out
    assert "tags are not checked here" in out
    [namespace] = kvtier("inspect", root, "--json").json["namespaces"]
    assert namespace["sampledSeals"] == {"tag, key 2026-11": 2, "AES256GCM, key 2026-11": 1}


@pytest.mark.parametrize(
    ("name", "text"), [("absent", "must hold a file for each key"), ("short", "must have 32 to")]
)
def test_unusable_keys_are_an_error_of_the_option(
    kvtier: Any, root: Path, tier: FileSystemTier, tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "a").write_bytes(b"short")
    outcome = kvtier("verify", root, "--keys", tmp_path / name)
    assert outcome.status == 2
    assert text in outcome.err


# Prefixes.


def prompts(root: Path, tier: FileSystemTier) -> list[list[ObjectRef]]:
    """Prompts of 4, 2 and 3 objects, the second one after the first two of the first; used one
    hour apart, the oldest first. The second object of the last one is removed."""
    numbers = ((100, 101, 102, 103), (100, 101, 110, 111), (120, 121, 122))
    found = []
    for place, prompt in enumerate(numbers):
        refs, previous = [], b""
        for number in prompt:
            ref, payload, meta = make(number)
            tier.write(ref, payload, replace(meta, previous=previous))
            refs.append(ref)
            previous = ref.key
        for ref in refs:
            used = time.time() - (3 - place) * 4_000
            os.utime(object_path(str(root), ref.namespace, ref.key), (used, used))
        found.append(refs)
    os.unlink(path_of(root, 121))
    return found


def test_inspect_shows_prefixes_ages_and_what_is_evicted_next(kvtier: Any, root: Path) -> None:
    tier = open_tier(root, 1 << 26)
    first, second, third = prompts(root, tier)
    tier.close()
    found = kvtier("inspect", root, "--prefixes", "--json").json
    [space] = found["prefixes"]
    assert (space["prefixes"], space["deepest"], space["unusableObjects"]) == (3, 4, 1)
    largest = space["largest"][0]
    assert (largest["objects"], largest["depth"], largest["complete"]) == (6, 4, True)
    assert largest["beginning"] == first[0].key.hex()
    assert [each["objects"] for each in space["heat"]] == [0, 8, 0, 0, 0]
    assert sum(each["bytes"] for each in space["heat"]) == 8 * OBJECT_BYTES
    # What follows nothing that is held; then ends of prompts, the least recently used first.
    order = [bytes.fromhex(each["key"]) for each in found["evictedNext"]]
    wanted = [third[2], first[3], first[2], second[3], second[2], second[1], second[0], third[0]]
    assert order == [ref.key for ref in wanted]
    assert [each["depth"] for each in found["evictedNext"]] == [1, 4, 3, 4, 3, 2, 1, 1]
    out = kvtier("inspect", root, "--prefixes").out
    assert "3 prefixes, the longest of 4 objects" in out
    assert "1 objects follow one that is not held" in out
    assert "(incomplete)" in out
    assert "evicted next" in out


def test_inspect_shows_prefixes_with_a_cycle_and_without_knowledge(
    kvtier: Any, root: Path, keys: Path
) -> None:
    tier = open_tier(root, 1 << 26)
    (one, payload, meta), (two, _, _) = make(1), make(2)
    tier.write(one, payload, replace(meta, previous=two.key))
    tier.write(two, payload, replace(meta, previous=one.key))
    tier.close()
    sealed(root, keys, True, 3)
    found = kvtier("inspect", root, "--prefixes", "--json").json
    [space] = found["prefixes"]
    assert space["unknownObjects"] == 1
    assert sum(tree["objects"] for tree in space["largest"]) == 3
    assert len(found["evictedNext"]) == 3
    assert "it is not known what they follow" in kvtier("inspect", root, "--prefixes").out


def test_inspect_shows_how_often_prefixes_were_used(
    kvtier: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(root, 1 << 26)
    first, *_ = prompts(root, tier)
    [space] = kvtier("inspect", root, "--prefixes", "--json").json["prefixes"]
    assert space["usesCountedAgeSeconds"] is None
    assert all(each["uses"] is None for each in space["largest"])
    assert "is not known: not saved yet" in kvtier("inspect", root, "--prefixes").out
    for ref in first[:3]:
        for _ in range(4):
            tier.touch(ref)
    monkeypatch.setattr(index_saver, "SAVE_SECONDS", 0.0)
    tier.maintain()
    tier.close()
    [space] = kvtier("inspect", root, "--prefixes", "--json").json["prefixes"]
    assert 0 <= space["usesCountedAgeSeconds"] < 600
    found = {each["beginning"]: each["uses"] for each in space["largest"]}
    # Twelve, and two objects of it are stored twice.
    assert found.pop(first[0].key.hex()) == 14
    assert set(found.values()) == {0}
    out = kvtier("inspect", root, "--prefixes").out
    assert "uses: by the process that leads the directory" in out
    assert " 2.3\n" in out, "fourteen uses of six objects"
    [path] = root.glob(f"*/{SAVED_INDEX}")
    path.write_bytes(path.read_bytes()[:-1])
    assert "the saved index cannot be used" in kvtier("inspect", root, "--prefixes").out


def test_inspect_of_an_empty_tier_shows_no_prefixes(kvtier: Any, root: Path) -> None:
    open_tier(root, 1 << 26).close()
    outcome = kvtier("inspect", root, "--prefixes")
    assert outcome.status == 0
    assert "evicted next" not in outcome.out


# Several volumes.


@pytest.fixture
def volumes(tmp_path: Path) -> list[Path]:
    """Two directories with objects, as those of a tier with two disks."""
    found = []
    for name in ("nvme0", "nvme1"):
        document = FileSystemTierDocument(name=name, path=str(tmp_path / name), sharing="Pod")
        each = FileSystemTier(document, TierLimits(1 << 30))
        each.open(lambda *_: None)
        for number in range(4):
            each.write(*make_object(number, (65_536,)))
        each.close()
        found.append(tmp_path / name)
    return found


def test_several_volumes_are_inspected_together(kvtier: Any, volumes: list[Path]) -> None:
    out = kvtier("inspect", *volumes).out
    assert "2 volumes:" in out
    assert "shares 50%, 50%" in out
    document = kvtier("inspect", *volumes, "--json").json
    assert [Path(each["directory"]).name for each in document["directories"]] == ["nvme0", "nvme1"]
    assert all(each["namespaces"][0]["objects"] == 4 for each in document["directories"])


def test_a_volume_that_is_gone_does_not_hide_the_others(
    kvtier: Any, volumes: list[Path], tmp_path: Path
) -> None:
    gone = tmp_path / "nvme2"
    for command in (("inspect",), ("verify",), ("gc", "--capacity", "1Gi", "--dry-run")):
        outcome = kvtier(command[0], gone, *volumes, *command[1:])
        assert outcome.status == 1
        assert str(gone) in outcome.err.replace("\n", "")
        assert "nvme1" in outcome.out
    document = kvtier("inspect", gone, *volumes, "--json").json
    assert "error" in document["directories"][0]
    assert len(document["directories"]) == 3


def test_gc_limits_each_volume(kvtier: Any, volumes: list[Path]) -> None:
    document = kvtier("gc", *volumes, "--capacity", "256Ki", "--json").json
    assert all(each["objects"] > 0 for each in document["directories"])
    for volume in volumes:
        assert bytes_below(volume) <= 256 << 10
