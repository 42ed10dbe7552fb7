"""Digests of LoRA adapters.

vLLM's block hash knows an adapter by its name and path, which says nothing about its weights: other files may lie there tomorrow. So the
digest of the adapter's files goes into the keys of its requests. It is computed on a thread of its own; until it is known such a
request neither loads nor stores.

vLLM loads an adapter some time before its first request gets here. What was last changed before the engine started is what was loaded;
of files that were changed later nobody can say, so the keys of such an adapter mean something to this engine alone.
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
CLOCK_SECONDS = 2.0
"""By so much the clocks of this machine and of a file server may differ."""
_PIECE_BYTES = 1 << 20


class LoraRequest(Protocol):
    """What vLLM's LoRARequest has."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool


def digest_of(path: str, loaded_after: float = math.inf, nonce: bytes = b"") -> bytes:
    """BLAKE3 over names and contents of the files of an adapter's directory, with ``nonce`` if any of them was changed after
    ``loaded_after`` (seconds since the epoch). Blocks. Raises ``OSError`` where there is none."""
    root = Path(path)
    files = sorted(file for file in root.rglob("*") if file.is_file())
    if not files or len(files) > MAX_FILES:
        raise FileNotFoundError(
            f"{path}: {len(files)} files; a local adapter directory has 1 to {MAX_FILES}"
        )
    digest = blake3()
    for file in files:
        digest.update(f"{file.relative_to(root)}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            while piece := content.read(_PIECE_BYTES):
                digest.update(piece)
    # The directories too: a file that was moved here keeps its own time.
    changed = max(each.stat().st_ctime for each in {root, *files, *(file.parent for file in files)})
    if changed > loaded_after:
        digest.update(nonce)
    return digest.digest()


class Adapters:
    """Digests by adapter. Called by the scheduler's thread; ``digest`` may be replaced for tests."""

    def __init__(self, digest: Callable[[str], bytes] | None = None) -> None:
        self._digest = digest or partial(
            digest_of, loaded_after=time.time() - CLOCK_SECONDS, nonce=os.urandom(32)
        )
        self._known: dict[tuple[int, str], bytes | None] = {}
        """By (number, path); None: it cannot be established."""
        self._asked: set[tuple[int, str]] = set()
        self._path_of: dict[int, str] = {}
        self._replaced: set[int] = set()
        self._names_replaced: set[str] = set()
        self._work: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def state(self, lora: LoraRequest) -> bytes | str:
        """The digest, or why there is none: "unknown" (ask again), "unreadable", "replaced" (other weights under one name)."""
        number, path = lora.lora_int_id, lora.lora_path
        if getattr(lora, "load_inplace", False):
            # From now on the engine computes with other weights under this number, whatever later requests call them.
            self._replaced.add(number)
            self._names_replaced.add(lora.lora_name)
        if self._path_of.setdefault(number, path) != path:
            # The engine keeps what it loaded first under the number.
            self._replaced.add(number)
        if number in self._replaced or lora.lora_name in self._names_replaced:
            return "replaced"
        key = (number, path)
        if key in self._known:
            return self._known[key] or "unreadable"
        if key not in self._asked:
            if len(self._asked) >= MAX_ADAPTERS:
                return "unreadable"
            self._asked.add(key)
            self._work.put(key)
            self._begin()
        return "unknown"

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kvtier-adapters", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                key = self._work.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._work.empty():
                        self._thread = None
                        return
                continue
            try:
                self._known[key] = self._digest(key[1])
            except (OSError, ValueError) as error:
                self._known[key] = None
                logger.warning(
                    "KVTier: requests with the adapter in %s are not cached: %s", key[1], error
                )
