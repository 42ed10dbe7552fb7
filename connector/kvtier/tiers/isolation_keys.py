"""The keys of ``isolation.keySecretRef``, read from the mounted Secret and followed as it changes.

Every entry of the Secret is a key: its name is the key's id, its content the key material. The
entry ``current`` is not a key; it holds the id of the key for new objects. Without it, the Secret
must have exactly one key. Objects name the id of their key, so objects of earlier keys can be read
for as long as the Secret has those keys.

The files are polled, as the live configuration is: the kubelet replaces them by swapping the link
``..data``. All entries are read from the directory behind that link, so a swap in between never
mixes two versions. A Secret that becomes invalid keeps the last valid keys, with a problem that
says so. A Secret that has no entries takes the keys away.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvtier.errors import ConfigurationError, TierKeyMissingError
from kvtier.hashing import derived_key

CURRENT_ENTRY = "current"
MIN_MATERIAL_BYTES = 32
MAX_MATERIAL_BYTES = 4096
MAX_KEYS = 64
MAX_ID_CHARACTERS = 32
POLL_SECONDS = 1.0

_KUBELET_DATA = "..data"
_ID = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_ID_CHARACTERS - 1}}}")
_TAG_CONTEXT = "kvtier.io v1 BLAKE3 tag of an object in a file tier"
_CIPHER_CONTEXT = "kvtier.io v1 root of the AES-256-GCM keys of objects in a file tier"
_ATTEMPTS = 5
_log = logging.getLogger("kvtier.tiers")


@dataclass(frozen=True, slots=True)
class IsolationKey:
    """One key. ``tag_key``: for tags. ``cipher_root``: from which the keys of encrypted objects are
    derived. Both have 32 bytes, and neither reveals the other or the material."""

    id: str
    tag_key: bytes
    cipher_root: bytes

    def __repr__(self) -> str:
        return f"IsolationKey({self.id!r})"


@dataclass(frozen=True, slots=True)
class KeySet:
    """The keys of one version of the Secret. ``current``: for new objects."""

    current: IsolationKey
    by_id: Mapping[str, IsolationKey]


def make_key(key_id: str, material: bytes) -> IsolationKey:
    """Derives a key. White space around the material, such as a final newline, is not part of it.

    Raises ``ConfigurationError``.
    """
    material = material.strip()
    if not _ID.fullmatch(key_id):
        raise ConfigurationError(
            "isolation.keySecretRef",
            key_id,
            f"must be a key id: letters, digits, ., _ and -, at most {MAX_ID_CHARACTERS}",
        )
    if not MIN_MATERIAL_BYTES <= len(material) <= MAX_MATERIAL_BYTES:
        # The material itself must not appear in a message.
        raise ConfigurationError(
            "isolation.keySecretRef",
            key_id,
            f"must have {MIN_MATERIAL_BYTES} to {MAX_MATERIAL_BYTES} bytes; it has {len(material)}",
        )
    return IsolationKey(
        key_id, derived_key(material, _TAG_CONTEXT), derived_key(material, _CIPHER_CONTEXT)
    )


def make_key_set(entries: Mapping[str, bytes]) -> KeySet | None:
    """The keys of a Secret's entries; None if there are no entries.

    Raises ``ConfigurationError``.
    """
    if not entries:
        return None
    material = {name: data for name, data in entries.items() if name != CURRENT_ENTRY}
    if not 1 <= len(material) <= MAX_KEYS:
        raise ConfigurationError(
            "isolation.keySecretRef", f"{len(material)} keys", f"must have 1 to {MAX_KEYS} keys"
        )
    keys = {name: make_key(name, data) for name, data in sorted(material.items())}
    current = entries.get(CURRENT_ENTRY)
    if current is None:
        if len(keys) > 1:
            raise ConfigurationError(
                "isolation.keySecretRef",
                ", ".join(keys),
                f"with several keys, the entry {CURRENT_ENTRY} must name the one for new objects",
            )
        chosen = next(iter(keys))
    else:
        chosen = current.strip().decode("ascii", "replace")[: 2 * MAX_ID_CHARACTERS]
        if chosen not in keys:
            raise ConfigurationError(
                f"isolation.keySecretRef.{CURRENT_ENTRY}",
                chosen,
                f"must name a key of the Secret: {', '.join(keys)}",
            )
    return KeySet(keys[chosen], MappingProxyType(keys))


def _source(directory: Path) -> Path:
    """The directory that holds the entries: of a mounted Secret, the target of its link."""
    data = directory / _KUBELET_DATA
    return data.resolve(strict=True) if data.is_symlink() else directory


def read_entries(directory: Path) -> dict[str, bytes]:
    """The entries of a mounted Secret, or of a directory with one file per entry. Empty if the
    directory does not exist.

    Raises ``OSError`` and ``ConfigurationError``.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return _read_once(_source(directory))
        except FileNotFoundError:
            # The link was swapped in between, or nothing is mounted.
            if not directory.is_dir():
                return {}
            if attempt == _ATTEMPTS - 1:
                raise
    return {}


def _read_once(source: Path) -> dict[str, bytes]:
    entries: dict[str, bytes] = {}
    for name in sorted(os.listdir(source)):
        path = source / name
        if name.startswith(".") or not path.is_file():
            continue
        if len(entries) > MAX_KEYS:
            raise ConfigurationError(
                "isolation.keySecretRef", str(source), f"must have at most {MAX_KEYS} keys"
            )
        with path.open("rb") as file:
            # Longer than any valid material, so that a cut file is invalid.
            entries[name] = file.read(2 * MAX_MATERIAL_BYTES)
    return entries


def read_key_set(directory: Path) -> KeySet:
    """The keys in a directory, for commands. Raises ``ConfigurationError`` and ``OSError``."""
    keys = make_key_set(read_entries(directory))
    if keys is None:
        raise ConfigurationError("--keys", str(directory), "must hold a file for each key")
    return keys


class KeyRing:
    """The keys in a directory, as it changes.

    Any thread may call ``keys`` and read the attributes: each is replaced as a whole. ``poll`` is
    called by the ring's own thread, or before ``start``.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._keys: KeySet | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._handlers: list[Callable[[], None]] = []
        self.problem = f"{directory} has not been read"
        """Why there are no keys, or why the last valid ones are retained; empty: all is well."""
        self.generation = 0
        """Rises with every change of the keys."""

    def on_change(self, handler: Callable[[], None]) -> None:
        """Registers a handler that is called after each change, on the thread that polls. It must
        not block. Before ``start``."""
        self._handlers.append(handler)

    def start(self) -> None:
        """Starts polling. ``stop`` ends it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtier-keys", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stops polling. Does not wait."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self.poll()

    @property
    def available(self) -> bool:
        """Whether there are keys."""
        return self._keys is not None

    def keys(self) -> KeySet:
        """The keys in effect. Raises ``TierKeyMissingError``."""
        keys = self._keys
        if keys is None:
            raise TierKeyMissingError(self.problem)
        return keys

    def poll(self) -> bool:
        """Reads the directory; True if the keys changed.

        A Secret is at most 1 MiB in memory, so it is read each time: contents compare reliably
        where time stamps do not.
        """
        try:
            found, problem = make_key_set(read_entries(self._directory)), ""
        except (ConfigurationError, OSError) as error:
            retained = "; the last valid keys are retained" if self._keys is not None else ""
            found, problem = self._keys, f"{error}{retained}"
        if found is None and not problem:
            problem = (
                f"{self._directory} holds no key: the Secret of isolation.keySecretRef does not "
                "exist, or is empty"
            )
        if problem != self.problem and problem:
            _log.warning("isolation keys: %s", problem)
        changed = not _equal(found, self._keys)
        # The keys first: a thread that reads the new generation uses them.
        self._keys = found
        self.problem = problem
        if changed:
            self.generation += 1
            if found is not None:
                _log.info(
                    "isolation keys: %s; current: %s", ", ".join(found.by_id), found.current.id
                )
            for handler in self._handlers:
                handler()
        return changed


def _equal(one: KeySet | None, other: KeySet | None) -> bool:
    if one is None or other is None:
        return one is other
    return (
        one.current.id == other.current.id
        and one.by_id.keys() == other.by_id.keys()
        and all(
            hmac.compare_digest(key.tag_key, other.by_id[name].tag_key)
            for name, key in one.by_id.items()
        )
    )
