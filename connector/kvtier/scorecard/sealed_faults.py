"""Faults of a directory that is protected by keys: a rotation under load, and objects of a process
that can write to the directory but has no key.

Planted objects have other content, with valid checksums: only the tag tells. They must be misses,
counted by reason, and stay until the engine stores the chunk again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier.config.models import Encryption, IsolationSettings
from kvtier.harness.tierd_testbed import wait_for
from kvtier.scorecard.testbed import FaultTestbed, Measurements
from kvtier.tiers.base import ObjectMeta, ObjectRef
from kvtier.tiers.checksum import by_kind, preferred
from kvtier.tiers.filesystem.format import (
    HEADER_BYTES,
    SealFields,
    finish_header,
    set_seal,
    write_header,
)
from kvtier.tiers.filesystem.seal import Encryptor, write_tagged
from kvtier.tiers.isolation_keys import CURRENT_ENTRY, IsolationKey, make_key, read_key_set

MEANS = "files"
FIRST_KEY, SECOND_KEY = "first", "second"
FOLLOW_SECONDS = 20.0
"""How long tierd may take to follow a change of its keys; it polls every second."""


class KeyedTestbed:
    """A testbed whose objects are sealed, and its keys."""

    def __init__(self, directory: Path, encryption: Encryption, place: Path | None = None) -> None:
        self.keys = directory / "keys"
        self.keys.mkdir(parents=True)
        self.set_keys(FIRST_KEY)
        files = (place or directory) / f"{directory.name}-tier"
        files.mkdir()
        isolation = IsolationSettings(key_directory=str(self.keys), encryption=encryption)
        self.testbed = FaultTestbed(directory / "testbed", files, files, isolation=isolation)

    def set_keys(self, current: str, *others: str) -> None:
        """Replaces the keys. The order matters: a reader in between finds valid keys."""
        for name in (current, *others):
            path = self.keys / name
            if not path.exists():
                path.with_name(f".{name}").write_bytes(name.encode().ljust(32, b"-"))
                path.with_name(f".{name}").replace(path)
        (self.keys / f".{CURRENT_ENTRY}").write_text(current)
        (self.keys / f".{CURRENT_ENTRY}").replace(self.keys / CURRENT_ENTRY)
        for path in self.keys.iterdir():
            if path.name not in (current, CURRENT_ENTRY, *others):
                path.unlink()

    def objects(self) -> list[Path]:
        """The files of all objects."""
        return sorted(self.testbed.below.rglob("*.kv"))

    def misses(self, reason: str) -> int:
        """Reads that tierd counted as failed for this reason."""
        return self.testbed.tierd.counter("tier_reads_failed", reason)


SealedFaultFunction = Callable[[KeyedTestbed, float, Measurements], None]


def _violation(measurements: Measurements, text: str) -> None:
    measurements.crashes += 1
    measurements.notes.append(text)


def key_rotated(keyed: KeyedTestbed, seconds: float, measurements: Measurements) -> None:
    """A second key becomes current while the first stays readable; then the first is removed."""
    testbed = keyed.testbed
    keyed.set_keys(SECOND_KEY, FIRST_KEY)
    before = measurements.loaded
    testbed.stream(seconds / 2, measurements)
    if keyed.misses("unknown_key") or keyed.misses("wrong_tag"):
        _violation(measurements, "objects of the earlier key were misses although it was present")
    if measurements.loaded == before:
        _violation(measurements, "nothing was loaded while both keys were present")
    if not testbed.recover(FOLLOW_SECONDS) or not _sealed_with(keyed, SECOND_KEY):
        _violation(measurements, "no new object has the tag of the new key")
    keyed.set_keys(SECOND_KEY)
    held = set(keyed.objects())
    _expect_misses(keyed, "unknown_key", measurements)
    testbed.stream(seconds / 2, measurements)
    _expect_files(held, measurements)


def _sealed_with(keyed: KeyedTestbed, key_id: str) -> bool:
    wanted = key_id.encode().ljust(32, b"\0")
    for path in keyed.objects():
        try:
            with path.open("rb") as file:
                if file.read(HEADER_BYTES)[144:176] == wanted:
                    return True
        except FileNotFoundError:
            continue
    return False


Plant = Callable[[KeyedTestbed, ObjectRef, memoryview, ObjectMeta], bytes]


def _planted(plant: Plant, reason: str) -> SealedFaultFunction:
    """Every file is replaced by one with other content, as ``plant`` makes it."""

    def run(keyed: KeyedTestbed, seconds: float, measurements: Measurements) -> None:
        held = set()
        for number, path in enumerate(keyed.objects()):
            size = path.stat().st_size - HEADER_BYTES
            payload = memoryview(bytearray(bytes([number % 251 + 1]) * size))
            checksum = preferred()
            meta = ObjectMeta((size,), checksum.kind, (checksum.digest(payload),))
            ref = ObjectRef(path.parents[2].name, bytes.fromhex(path.stem))
            replacement = path.with_name(f"planted-{number}")
            replacement.write_bytes(plant(keyed, ref, payload, meta))
            os.replace(replacement, path)
            held.add(path)
        _expect_misses(keyed, reason, measurements)
        keyed.testbed.stream(seconds, measurements)
        _expect_files(held, measurements)

    return run


def _expect_misses(keyed: KeyedTestbed, reason: str, measurements: Measurements) -> None:
    def missed() -> bool:
        keyed.testbed.stream(0.5, measurements)
        return keyed.misses(reason) > 0

    try:
        wait_for(missed, f"a miss is counted as {reason}", FOLLOW_SECONDS * keyed.testbed.patience)
    except TimeoutError:
        _violation(measurements, f"no miss was counted as {reason}")


def _expect_files(held: set[Path], measurements: Measurements) -> None:
    gone = sum(not path.exists() for path in held)
    if gone:
        _violation(measurements, f"{gone} objects that another process may own were deleted")


def _without_tag(_: KeyedTestbed, ref: ObjectRef, payload: memoryview, meta: ObjectMeta) -> bytes:
    header = memoryview(bytearray(HEADER_BYTES))
    write_header(header, ref, meta)
    return bytes(header) + bytes(payload)


def _stranger() -> IsolationKey:
    """Another key under the id of the present one."""
    return make_key(FIRST_KEY, b"material of another tenant, 32 bytes")


def _other_key(_: KeyedTestbed, ref: ObjectRef, payload: memoryview, meta: ObjectMeta) -> bytes:
    header = memoryview(bytearray(HEADER_BYTES))
    write_tagged(header, payload, ref, meta, _stranger())
    return bytes(header) + bytes(payload)


def _other_key_encrypted(
    _: KeyedTestbed, ref: ObjectRef, payload: memoryview, meta: ObjectMeta
) -> bytes:
    header = memoryview(bytearray(HEADER_BYTES))
    into = memoryview(bytearray(payload.nbytes))
    encryptor = Encryptor(header, ref, meta, _stranger())
    encryptor.piece(payload, into)
    encryptor.finish()
    return bytes(header) + bytes(into)


def _half_a_tag(
    keyed: KeyedTestbed, ref: ObjectRef, payload: memoryview, meta: ObjectMeta
) -> bytes:
    """The right tag of this content, cut to its first half."""
    header = memoryview(bytearray(HEADER_BYTES))
    write_tagged(header, payload, ref, meta, read_key_set(keyed.keys).current)
    tag = bytes(header[112:128]).ljust(32, b"\0")
    set_seal(header, False, SealFields(tag, FIRST_KEY))
    checksum = by_kind(meta.checksum_kind)
    if checksum is None:
        raise LookupError(meta.checksum_kind)
    finish_header(header, checksum)
    return bytes(header) + bytes(payload)


@dataclass(frozen=True, slots=True)
class SealedFault:
    """One row of the scorecard over a directory with keys."""

    name: str
    run: SealedFaultFunction
    encryption: Encryption = Encryption.NONE


SEALED_FAULTS: tuple[SealedFault, ...] = (
    SealedFault("key-rotated", key_rotated),
    SealedFault("key-rotated-encrypted", key_rotated, Encryption.AES256GCM),
    SealedFault("planted-without-key", _planted(_without_tag, "unkeyed")),
    SealedFault("planted-wrong-key", _planted(_other_key, "wrong_tag")),
    SealedFault(
        "planted-wrong-key-encrypted",
        _planted(_other_key_encrypted, "wrong_tag"),
        Encryption.AES256GCM,
    ),
    SealedFault("truncated-tag", _planted(_half_a_tag, "wrong_tag")),
)
