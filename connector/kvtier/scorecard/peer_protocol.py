"""How a peer's process is talked to: JSON lines in, JSON lines out, so that whatever becomes of it is an answer or the lack of one.

In: ``{"id", "do": "open", "directory"}``, ``{"id", "do": "store", "number"}``, ``{"id", "do": "load", "numbers"}``. Out, in any order: ``{"id", "outcome",
"seconds", ...}``: "opened"; "stored" or "dropped"; "loaded" with ``hits`` and ``wrong`` (objects); "raised" with ``error``. First of all comes
``{"ready", "version", "setting"}`` or ``{"failed"}``.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np

from kvtier.harness.stub_engine import Bytes, block_hash, content

OBJECT_BYTES = 64 << 10
POLL_SECONDS = 0.002
Answer = dict[str, Any]


class Backend(Protocol):
    """A peer. ``open``, ``store`` and ``load`` block only where the peer blocks its own engine; ``poll`` does one step and says what has ended."""

    version: str
    setting: str

    def open(self, directory: Path) -> None:
        """Begins anew there; what was open is given up."""

    def store(self, call: int, number: int) -> None:
        """Begins to store an object."""

    def load(self, call: int, numbers: list[int]) -> None:
        """Begins to load objects that one request needs."""

    def poll(self) -> list[Answer]:
        """What has ended since."""


def expected(number: int) -> Bytes:
    """The bytes of an object."""
    return content(b"\0" + block_hash(number), OBJECT_BYTES)


def is_right(number: int, found: Bytes) -> bool:
    """Whether these are the object's bytes."""
    return bool(np.array_equal(found[:OBJECT_BYTES], expected(number)))


def raised(error: BaseException) -> str:
    """An exception in one line, with the place in the peer that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}: {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{place}".replace("\n", " ")[:300]


def serve(make: Callable[[], Backend]) -> int:
    """Until standard input ends."""
    out = sys.stdout
    # What the libraries print must not be taken for an answer.
    sys.stdout = sys.stderr
    try:
        backend = make()
    except Exception as error:  # noqa: BLE001 whatever keeps a foreign library from starting is the answer
        _say(out, {"failed": raised(error)})
        return 0
    _say(out, {"ready": True, "version": backend.version, "setting": backend.setting})
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=POLL_SECONDS)
        except queue.Empty:
            line = None
        if line == "":
            # No clean-up: a thread of the peer may be stuck for ever.
            os._exit(0)
        if line is not None:
            _begin(out, backend, json.loads(line))
        for answer in backend.poll():
            _say(out, answer)


def _begin(out: TextIO, backend: Backend, asked: dict[str, Any]) -> None:
    begun = time.monotonic()
    try:
        match asked["do"]:
            case "open":
                backend.open(Path(asked["directory"]))
                _say(
                    out,
                    {"id": asked["id"], "outcome": "opened", "seconds": time.monotonic() - begun},
                )
            case "store":
                backend.store(asked["id"], asked["number"])
            case "load":
                backend.load(asked["id"], asked["numbers"])
    except Exception as error:  # noqa: BLE001 raised into its engine, which has no handler for it
        seconds = time.monotonic() - begun
        _say(
            out,
            {"id": asked["id"], "outcome": "raised", "error": raised(error), "seconds": seconds},
        )


def _read(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put("")


def _say(out: TextIO, answer: Answer) -> None:
    print(json.dumps(answer), file=out, flush=True)
