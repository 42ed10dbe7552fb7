"""The process of a peer, seen from the scorecard. Every wait has a deadline, and nothing is left
behind.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.harness.tierd_testbed import environment

END_SECONDS = 10.0
QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false",
}


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply. ``outcome``: see ``peer_protocol``; "silent": no reply in time; "ended": the process
    has exited.
    """

    call: int
    outcome: str
    seconds: float = 0.0
    hits: int = 0
    wrong: int = 0
    error: str = ""

    def text(self) -> str:
        """The outcome, for messages."""
        return f"{self.outcome} ({self.error})" if self.error else self.outcome


class PeerProcess:
    """A client of the process. One thread."""

    def __init__(self, module: str, log: Path) -> None:
        self._module, self._log = module, log
        self._calls = itertools.count(1)
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                env={**environment(), **QUIET},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name="peer-reader", daemon=True)
        self._reader.start()
        self.version = self.setting = ""
        self.late: list[Reply] = []
        """Replies that arrived while waiting for another one."""

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(json.loads(line))

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def wait_ready(self, seconds: float) -> str:
        """Waits until the peer is ready. Returns an error, empty for success."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                message = self._lines.get(timeout=0.2)
            except queue.Empty:
                if not self.alive and self._lines.empty():
                    return f"the process exited: {self.exit_report()}"
                continue
            if message.get("ready"):
                self.version, self.setting = str(message["version"]), str(message["setting"])
                return ""
            return str(message.get("failed") or message)
        return f"the process did not start within {seconds:g} s"

    def send(self, operation: str, **parts: Any) -> int:
        """Sends a request. Returns the id of its reply."""
        call = next(self._calls)
        # If the process has exited, waiting for the reply shows it.
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.write(json.dumps({"id": call, "do": operation, **parts}) + "\n")
                self._process.stdin.flush()
        return call

    def replies(self, seconds: float) -> list[Reply]:
        """Waits for a reply, and returns all that have arrived."""
        found: list[Reply] = []
        try:
            message = self._lines.get(timeout=seconds)
            while True:
                found.append(Reply(message.pop("id"), **message))
                message = self._lines.get_nowait()
        except queue.Empty:
            return found

    def call(self, operation: str, seconds: float, **parts: Any) -> Reply:
        """Sends a request and waits for its reply."""
        call = self.send(operation, **parts)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = self.replies(0.05)
            self.late.extend(reply for reply in found if reply.call != call)
            for reply in found:
                if reply.call == call:
                    return reply
            if not self.alive and self._lines.empty():
                return Reply(call, "ended", error=self.exit_report())
        return Reply(call, "silent")

    def exit_report(self) -> str:
        """The exit status and the last line of the log."""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").strip().splitlines() or [""]
        return f"status {self._process.poll()}, {lines[-1][:200]}"

    def end(self) -> None:
        """Kills the process. The mount must be released before: a thread in a hanging call cannot
        be killed.
        """
        self._process.kill()
        self._process.wait(END_SECONDS)
        self._reader.join(END_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
