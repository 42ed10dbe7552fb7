"""The protocol with the process of a peer: JSON lines in, JSON lines out. Whatever happens to the
peer shows as a reply or as a missing reply.

In: ``{"id", "do": "open", "directory"}``, ``{"id", "do": "store", "number"}``,
``{"id", "do": "load", "numbers"}``. Out, in any order: ``{"id", "outcome", "seconds", ...}``:
"opened"; "stored" or "dropped"; "loaded" with ``hits`` and ``wrong`` (objects); "raised" with
``error``. The first line is ``{"ready", "version", "setting"}`` or ``{"failed"}``.
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

from kvtier.harness.stub_worker import Bytes, block_hash, content

OBJECT_BYTES = 64 << 10
POLL_SECONDS = 0.002
Answer = dict[str, Any]


class Backend(Protocol):
    """A peer. ``open``, ``store`` and ``load`` block only if the peer blocks its own engine;
    ``poll`` makes one step and returns what has completed.
    """

    version: str
    setting: str

    def open(self, directory: Path) -> None:
        """Starts with this directory and closes the previous one."""

    def store(self, call: int, number: int) -> None:
        """Starts to store an object."""

    def load(self, call: int, numbers: list[int]) -> None:
        """Starts to load the objects of one request."""

    def poll(self) -> list[Answer]:
        """Operations completed since the last call."""


def expected(number: int) -> Bytes:
    """The bytes of an object."""
    return content(b"\0" + block_hash(number), OBJECT_BYTES)


def is_right(number: int, found: Bytes) -> bool:
    """Whether these are the object's bytes."""
    return bool(np.array_equal(found[:OBJECT_BYTES], expected(number)))


def raised(error: BaseException) -> str:
    """An exception on one line, with the function that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}: {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{place}".replace("\n", " ")[:300]


def serve(make: Callable[[], Backend]) -> int:
    """Serves requests until standard input ends. Returns the exit status."""
    out = sys.stdout
    # What libraries print must not be parsed as a reply.
    sys.stdout = sys.stderr
    try:
        backend = make()
    except Exception as error:  # noqa: BLE001 any failure of the library to start is the reply
        _send(out, {"failed": raised(error)})
        return 0
    _send(out, {"ready": True, "version": backend.version, "setting": backend.setting})
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=POLL_SECONDS)
        except queue.Empty:
            line = None
        if line == "":
            # No cleanup: a thread of the peer may hang.
            os._exit(0)
        if line is not None:
            _start(out, backend, json.loads(line))
        for answer in backend.poll():
            _send(out, answer)


def _start(out: TextIO, backend: Backend, request: dict[str, Any]) -> None:
    started = time.monotonic()
    try:
        match request["do"]:
            case "open":
                backend.open(Path(request["directory"]))
                _send(
                    out,
                    {
                        "id": request["id"],
                        "outcome": "opened",
                        "seconds": time.monotonic() - started,
                    },
                )
            case "store":
                backend.store(request["id"], request["number"])
            case "load":
                backend.load(request["id"], request["numbers"])
    except Exception as error:  # noqa: BLE001 its engine does not handle it
        seconds = time.monotonic() - started
        _send(
            out,
            {"id": request["id"], "outcome": "raised", "error": raised(error), "seconds": seconds},
        )


def _read(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put("")


def _send(out: TextIO, answer: Answer) -> None:
    print(json.dumps(answer), file=out, flush=True)
