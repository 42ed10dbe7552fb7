"""A stub engine that starts in a second: it attaches to tierd as vLLM's connector does (with
``kvtier.harness.stub_engine``) and is controlled over HTTP. For tests of the engine's container; it
computes nothing.

    GET /health        200 once it listens: it serves whether or not there are tiers
    GET /seen          {"configured", "attached", "stored", "loaded", "promoted", "wrong", ...}
    POST /store?n=COUNT&from=NUMBER     stores chunks; {"done": how many}
    POST /load?n=COUNT&from=NUMBER&budget=SECONDS     loads a prefix; {"done", "seconds"}
    POST /touch?bytes=BYTES     takes that much memory of its own and keeps it
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

# The payload, which comes first on PYTHONPATH, has no test code; the image has all of KVTier here.
sys.path.insert(0, "/opt/kvtier/source")

from kvtier.config.loader import load
from kvtier.errors import KVTierError
from kvtier.harness.stub_engine import StubEngine
from kvtier.harness.stub_worker import StubEngineOptions

PORT = int(os.environ.get("PORT", "8000"))
OBJECT_BYTES = 256 << 10
ANNOUNCED_SECONDS = 3.0


class StandIn:
    """The engine, if the pod has a topology; one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[bytearray] = []
        self._engine: StubEngine | None = None
        self.problem = ""
        directory = os.environ.get("KVTIER_TOPOLOGY")
        if directory:
            try:
                run = load(Path(directory)).structural.run_directory
                self._engine = StubEngine(
                    StubEngineOptions(Path(run), object_bytes=OBJECT_BYTES, limit_seconds=10.0)
                )
                self._engine.start()
                threading.Thread(target=self._keep_stepping, daemon=True).start()
            except (KVTierError, OSError) as error:
                self.problem = str(error)

    def _keep_stepping(self) -> None:
        while True:
            with self._lock:
                if self._engine is not None:
                    self._engine.step()
            time.sleep(0.05)

    def seen(self) -> dict[str, object]:
        """What happened so far."""
        if self._engine is None:
            return {"configured": False, "attached": False, "problem": self.problem}
        state = asdict(self._engine.seen)
        held = {"credits": self._engine.credits, "refusal": self._engine.client.refusal}
        return {
            **state,
            **held,
            "configured": True,
            "attached": self._engine.usable,
            "problem": self.problem,
        }

    def do(self, what: str, options: dict[str, str]) -> dict[str, object]:
        """One of the commands."""
        if what == "touch":
            self._kept.append(bytearray(os.urandom(1 << 20)) * (int(options["bytes"]) >> 20))
            return {"done": int(options["bytes"])}
        if self._engine is None:
            return {"done": 0}
        first, count = int(options.get("from", 0)), int(options.get("n", 1))
        start = time.monotonic()
        with self._lock:
            numbers = range(first, first + count)
            if what == "load":
                # What was just stored is announced a moment later.
                engine = self._engine
                engine.wait_for(lambda: all(map(engine.holds, numbers)), ANNOUNCED_SECONDS)
                done = self._engine.load(list(numbers), float(options.get("budget", 5)))
            else:
                done = sum(self._store(self._engine, number) for number in numbers)
        return {"done": done, "seconds": time.monotonic() - start}

    @staticmethod
    def _store(engine: StubEngine, number: int) -> bool:
        return engine.wait("can_store", 5.0) and engine.store(number)


class Handler(BaseHTTPRequestHandler):
    """HTTP of one ``StandIn``."""

    engine: StandIn

    def do_GET(self) -> None:
        self._answer({} if self.path == "/health" else self.engine.seen())

    def do_POST(self) -> None:
        parts = urlsplit(self.path)
        options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        self._answer(self.engine.do(parts.path.strip("/"), options))

    def log_message(self, *_: object) -> None:
        return

    def _answer(self, body: dict[str, object]) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main() -> int:
    """Serves until SIGTERM."""
    server = ThreadingHTTPServer(("", PORT), Handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    Handler.engine = StandIn()
    print("stand-in engine listens", Handler.engine.seen(), flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
