"""Digests of LoRA adapters, which become part of the keys of their requests.

vLLM's block hash identifies an adapter by name and path, which says nothing about its weights. So
the digest of the adapter's files is added to the keys. A background thread computes it; until then
the adapter's requests are neither loaded nor stored.

vLLM loads an adapter some time before its first request arrives here. Files that last changed
before the engine started are the ones that were loaded. For files that changed later this cannot
be known, so the keys of such an adapter are valid for this engine only.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from blake3 import blake3

logger = logging.getLogger(__name__)
MAX_ADAPTERS = 4_096
MAX_FILES = 256
IDLE_SECONDS = 60.0
CLOCK_SKEW_SECONDS = 2.0
"""The clocks of this machine and of a file server may differ this much."""
_PIECE_BYTES = 1 << 20


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


class AdapterDigests:
    """The digests of all adapters. The scheduler's thread calls it.

    ``settings``: what of the engine's settings decides an adapter's effect; part of each digest.
    """

    def __init__(
        self, compute: Callable[[str], bytes] | None = None, *, settings: bytes = b""
    ) -> None:
        self._compute = compute or partial(
            adapter_digest,
            loaded_after=time.time() - CLOCK_SKEW_SECONDS,
            nonce=os.urandom(32),
            settings=settings,
        )
        self._digests: dict[tuple[int, str], bytes | None] = {}
        """By (number, path); None if it cannot be computed."""
        self._requested: set[tuple[int, str]] = set()
        self._path_by_number: dict[int, str] = {}
        self._replaced_numbers: set[int] = set()
        self._replaced_names: set[str] = set()
        self._queue: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def digest(self, lora: LoraRequest) -> bytes | str:
        """Returns the digest, or why there is none.

        "unknown": still being computed. "unreadable": it cannot be computed. "replaced": the
        engine has loaded several sets of weights under one name or number.
        """
        number, path = lora.lora_int_id, lora.lora_path
        if getattr(lora, "load_inplace", False):
            # The engine uses other weights for this number, whatever later requests name them.
            self._replaced_numbers.add(number)
            self._replaced_names.add(lora.lora_name)
        if self._path_by_number.setdefault(number, path) != path:
            # The engine keeps the first weights that it loaded for the number.
            self._replaced_numbers.add(number)
        if number in self._replaced_numbers or lora.lora_name in self._replaced_names:
            return "replaced"
        key = (number, path)
        if key in self._digests:
            return self._digests[key] or "unreadable"
        if key not in self._requested:
            if len(self._requested) >= MAX_ADAPTERS:
                return "unreadable"
            self._requested.add(key)
            self._queue.put(key)
            self._ensure_thread()
        return "unknown"

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
                key = self._queue.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._queue.empty():
                        self._thread = None
                        return
                continue
            try:
                self._digests[key] = self._compute(key[1])
            except (OSError, ValueError) as error:
                self._digests[key] = None
                logger.warning(
                    "KVTier: cannot cache requests with the LoRA adapter in %s: %s", key[1], error
                )
