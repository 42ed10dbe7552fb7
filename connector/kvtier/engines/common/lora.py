"""Digests of LoRA adapters, which become part of the keys of their requests.

vLLM's block hash identifies an adapter by name and path, which says nothing about its weights. So
the digest of the adapter's files is added to the keys. A background thread computes it; until then
the adapter's requests are neither loaded nor stored.

vLLM loads an adapter some time before its first request arrives here. Files that last changed
before the engine started are the ones that were loaded. For files that changed later this cannot
be known, so the keys of such an adapter are valid for its number in this engine only.

An adapter that was removed is loaded again from its path, and so is one for which vLLM had no room.
After a removal, and after a reset of the prefix cache, the files are therefore compared with those
of the digest (``check_again``). If they have changed, it is unknown which of them the engine has.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from blake3 import blake3

logger = logging.getLogger(__name__)
MAX_ADAPTERS = 4_096
MAX_FILES = 256
IDLE_SECONDS = 60.0
CHECK_SECONDS = 1.0
"""How long requests wait until it is known whether the files have changed."""
CLOCK_SKEW_SECONDS = 2.0
"""The clocks of this machine and of a file server may differ this much."""
_PIECE_BYTES = 1 << 20
_Key = tuple[int, str, bool]
"""Number, path, and whether the weights of experts are stored in one tensor."""


class LoraRequest(Protocol):
    """The part of vLLM's ``LoRARequest`` that is used."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool


def adapter_digest(
    path: str, loaded_after: float = math.inf, nonce: bytes = b"", settings: bytes = b""
) -> bytes:
    """Returns the BLAKE3 digest of the names and contents of the files of an adapter's directory.

    ``nonce`` is included if any of them changed after ``loaded_after`` (seconds since the epoch).
    ``settings``: what else of the engine decides an adapter's effect.
    Blocks. Raises ``OSError`` if the directory cannot be read or is not an adapter's.
    """
    root = Path(path)
    files = sorted(file for file in root.rglob("*") if file.is_file())
    if not files or len(files) > MAX_FILES:
        raise FileNotFoundError(
            f"{path} has {len(files)} files: an adapter directory must have 1 to {MAX_FILES}"
        )
    digest = blake3(settings)
    for file in files:
        digest.update(f"{file.relative_to(root)}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            while piece := content.read(_PIECE_BYTES):
                digest.update(piece)
    # A file that was moved here keeps its own time, but changes its directory's.
    changed = max(each.stat().st_ctime for each in {root, *files, *(file.parent for file in files)})
    if changed > loaded_after:
        digest.update(nonce)
    return digest.digest()


def adapter_state(path: str) -> tuple[tuple[str, int, int, int, int], ...]:
    """Returns what changes with every change of the files of an adapter's directory.

    Blocks. Raises ``OSError``.
    """
    root = Path(path)
    states = []
    for each in (root, *sorted(root.rglob("*"))):
        found = each.stat()
        states.append(
            (str(each), found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
        )
        if len(states) > 2 * MAX_FILES:
            raise FileNotFoundError(f"{path} has too many files for an adapter")
    return tuple(states)


class AdapterFiles:
    """Reads the files of adapters. A background thread calls it.

    ``settings``: what of the engine's settings decides an adapter's effect; part of each digest.
    """

    def __init__(self, settings: bytes = b"") -> None:
        self._settings = settings
        self._loaded_after = time.time() - CLOCK_SKEW_SECONDS
        self._nonce = os.urandom(32)

    def state(self, path: str) -> object:
        """Returns what changes with the files. Blocks. Raises ``OSError``."""
        return adapter_state(path)

    def digest(self, path: str, number: int) -> bytes:
        """Returns the digest of an adapter with this number. Blocks. Raises ``OSError``."""
        nonce = self._nonce + number.to_bytes(8, "little", signed=True)
        return adapter_digest(path, self._loaded_after, nonce, self._settings)


@dataclass(slots=True)
class _Adapter:
    """What is known of the files of an adapter. ``state``: when ``digest`` was taken, None if it
    could not be taken. ``check``: which number the last comparison had that it has passed."""

    digest: bytes | None
    state: object
    check: int


class AdapterDigests:
    """The digests of all adapters. The scheduler's thread calls it."""

    def __init__(
        self, files: AdapterFiles | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._files = files or AdapterFiles()
        self._clock = clock
        self._adapters: dict[_Key, _Adapter] = {}
        self._requested: dict[_Key, int] = {}
        """By adapter, the number of the last comparison that was asked for."""
        self._key_by_number: dict[int, _Key] = {}
        self._replaced_numbers: set[int] = set()
        self._replaced_names: set[str] = set()
        self._check = 0
        """Number of the comparison that every adapter has to pass."""
        self._check_began = -math.inf
        self._queue: queue.SimpleQueue[tuple[_Key, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def digest(self, lora: LoraRequest) -> bytes | str:
        """Returns the digest, or why there is none.

        "unknown": still being computed. "checked": it is being compared with the files.
        "unreadable": it cannot be computed. "replaced": the engine may have loaded several sets of
        weights under one name or number.
        """
        number = lora.lora_int_id
        key = (number, lora.lora_path, bool(getattr(lora, "is_3d_lora_weight", False)))
        if getattr(lora, "load_inplace", False):
            # The engine uses other weights for this number, whatever later requests name them.
            self._replaced_numbers.add(number)
            self._replaced_names.add(lora.lora_name)
        if self._key_by_number.setdefault(number, key) != key:
            # The engine keeps the first weights that it loaded for the number.
            self._replaced_numbers.add(number)
        if number in self._replaced_numbers or lora.lora_name in self._replaced_names:
            return "replaced"
        known = self._adapters.get(key)
        if known is not None and known.check == self._check:
            return known.digest or "unreadable"
        if self._requested.get(key) != self._check:
            if key not in self._requested and len(self._requested) >= MAX_ADAPTERS:
                return "unreadable"
            if known is not None:
                self._check_began = self._clock()
            self._requested[key] = self._check
            self._queue.put((key, self._check))
            self._ensure_thread()
        return "unknown" if known is None else "checked"

    def check_again(self) -> None:
        """The engine may load adapters again: the files are compared at the next request of each.

        Not now, because they may change before the engine reads them.
        """
        self._check += 1

    def worth_waiting(self, lora: LoraRequest | None) -> bool:
        """Returns whether a request should wait until its adapter's files are compared."""
        return (
            lora is not None
            and self.digest(lora) == "checked"
            and self._clock() - self._check_began < CHECK_SECONDS
        )

    def _ensure_thread(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kvtier-adapters", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                key, check = self._queue.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._queue.empty():
                        self._thread = None
                        return
                continue
            self._read(key, check)

    def _read(self, key: _Key, check: int) -> None:
        """Takes the digest of an adapter, or compares its files with those of the digest."""
        number, path, fused = key
        known = self._adapters.get(key)
        state: object = None
        try:
            # Before the contents are read: a change meanwhile is seen by the next comparison.
            state = self._files.state(path)
            if known is not None and known.digest is not None and known.state == state:
                digest: bytes | None = known.digest
            else:
                digest = self._files.digest(path, number)
                if fused:
                    digest = blake3(digest + b"3d").digest()
        except Exception as error:  # noqa: BLE001 - a path of a client may hold anything
            digest = None
            logger.warning(
                "KVTier: cannot cache requests with the LoRA adapter in %s: %s", path, error
            )
        if known is not None and known.digest is not None and known.digest != digest:
            logger.warning(
                "KVTier: requests with the LoRA adapter in %s take no part: its files have changed "
                "since it was loaded",
                path,
            )
            self._replaced_numbers.add(number)
        self._adapters[key] = _Adapter(digest, state, check)
