"""The scorecard under a real vLLM: during any fault of the file tier or the daemon, tokens equal
those of an engine without KVTier.

Each fault meets a request whose prefix is only in the file tier, and next to it a request without
hits, which must not be delayed. vLLM is the CPU build with a tiny model; scheduler and worker run
in one process, so killing one kills the other.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier import payload as payload_writer
from kvtier.config.models import Daemon
from kvtier.engines.vllm.plugin import CONNECTOR_MODULE, CONNECTOR_NAME
from kvtier.harness.engine_process import EngineProcessError
from kvtier.harness.engine_requests import ReferenceEngine
from kvtier.harness.engine_testbed import (
    CHUNK_TOKENS,
    EngineOptions,
    EngineTestbed,
    start_reference_engine,
)
from kvtier.harness.tiny_model import prompt, write_llama
from kvtier.scorecard.mount import FaultyMount
from kvtier.scorecard.runner import FAIL, PASS, SKIPPED, ScorecardOptions, ScorecardRow

CHUNKS = 8
RUNS = 3
DELAY_FACTOR = 2.0
DELAY_SECONDS = 0.5
"""A request without hits may take twice as long as without a fault, plus half a second: the two
engines share the CPU."""
PREFIX = "engine-"
DEADLINE_SECONDS = 3


@dataclass(frozen=True, slots=True)
class EngineFault:
    """``mount``: faults of the FUSE mount. ``files``: damages the files. ``process``: which process
    is killed or stopped, and how.
    """

    mount: dict[str, dict[str, Any]] | None = None
    files: Callable[[list[Path]], None] | None = None
    process: str = ""


def _flip(files: list[Path]) -> None:
    for path in files:
        with path.open("r+b") as file:
            file.seek(4096 + 77)
            byte = file.read(1)
            file.seek(4096 + 77)
            file.write(bytes([byte[0] ^ 1]))


def _swap(files: list[Path]) -> None:
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)


def _cut(files: list[Path]) -> None:
    for path in files:
        os.truncate(path, path.stat().st_size // 2)


def _every(**fault: Any) -> dict[str, dict[str, Any]]:
    return {"every": fault}


FAULTS: dict[str, EngineFault] = {
    "latency-1s": EngineFault(mount=_every(delay_seconds=1.0)),
    "hang": EngineFault(mount={"read": {"hang": True}, "write": {"hang": True}}),
    "EIO": EngineFault(mount={"read": {"errno": "EIO"}, "write": {"errno": "EIO"}}),
    "EACCES": EngineFault(mount={"open": {"errno": "EACCES"}, "create": {"errno": "EACCES"}}),
    "EROFS": EngineFault(
        mount={
            call: {"errno": "EROFS"} for call in ("create", "write", "mkdir", "rename", "unlink")
        }
    ),
    "ESTALE": EngineFault(mount=_every(errno="ESTALE")),
    "ENOSPC": EngineFault(mount={"create": {"errno": "ENOSPC"}, "write": {"errno": "ENOSPC"}}),
    "EDQUOT": EngineFault(mount={"create": {"errno": "EDQUOT"}, "write": {"errno": "EDQUOT"}}),
    "flips-in-flight": EngineFault(mount={"read": {"flip": "payload"}}),
    "truncation": EngineFault(files=_cut),
    "bit-flip-payload": EngineFault(files=_flip),
    "wrong-key": EngineFault(files=_swap),
    "tierd-SIGKILL": EngineFault(process="tierd-SIGKILL"),
    "tierd-SIGSTOP": EngineFault(process="tierd-SIGSTOP"),
    "engine-and-worker-SIGKILL": EngineFault(process="engine"),
}


def names(options: ScorecardOptions) -> list[str]:
    """The names of the rows of ``run_engine_faults``."""
    return [PREFIX + name for name in FAULTS if not options.faults or name in options.faults]


def run_engine_faults(
    options: ScorecardOptions, on_start: Callable[[str], None] = lambda _: None
) -> Iterator[ScorecardRow]:
    """Yields the rows. If vLLM is not installed, each is skipped with that reason."""
    selected = [name.removeprefix(PREFIX) for name in names(options)]
    if importlib.util.find_spec("vllm") is None:
        for name in selected:
            yield ScorecardRow(PREFIX + name, SKIPPED, "vllm is not installed", "vLLM")
        return
    home = Path(tempfile.mkdtemp(prefix="kvtier-faults-engine-", dir=options.directory))
    try:
        with ExitStack() as stack:
            on_start("starting vLLM with and without KVTier")
            testbed = _EngineFaultTestbed(home, stack)
            for name in selected:
                on_start(PREFIX + name)
                yield testbed.row(name, FAULTS[name])
    finally:
        shutil.rmtree(home, ignore_errors=True)


def check_shipped(connector: Mapping[str, Any], payload: Path) -> None:
    """Raises ``EngineProcessError`` unless the engine's connector is the one that engine pods get,
    from the same payload. ``connector``: as ``EngineTestbed.drive("connector")`` returns it."""
    name, file = connector.get("class", "none"), Path(connector.get("file", ""))
    shipped = f"{CONNECTOR_MODULE}.{CONNECTOR_NAME}"
    if name != shipped or payload.resolve() not in file.resolve().parents:
        raise EngineProcessError(f"the engine's connector is {name} in {file}: must be {shipped}")


class _EngineFaultTestbed:
    """Two engines, one of them with a file tier on the mount."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        model, payload = (
            write_llama(home / "model", seed=0),
            payload_writer.write(home / "payload", include=("harness", "testing")),
        )
        tuning = EngineOptions(
            daemon=Daemon.SIDECAR,
            persistence="Process",
            load_timeout_seconds=DEADLINE_SECONDS,
            failure_threshold=5,
        )
        self.testbed: EngineTestbed = EngineTestbed(home / "case", model, payload, tuning)
        self.below = home / "below"
        self.below.mkdir()
        self.mount: FaultyMount | None = None
        self.no_mount_reason = ""
        try:
            self.mount = FaultyMount(
                self.below, self.testbed.files_root, home / "faults.json", home / "mount.log"
            )
            stack.callback(self.mount.close)
        except OSError as error:
            self.no_mount_reason, self.below = (
                f"cannot create a FUSE mount: {error.strerror or error}",
                self.testbed.files_root,
            )
        engine = start_reference_engine(model, payload, home / "plain.log")
        stack.callback(engine.kill)
        stack.callback(self.testbed.close)
        self.testbed.start_daemon()
        self.testbed.start()
        check_shipped(self.testbed.drive("connector"), payload)
        self.plain: ReferenceEngine = ReferenceEngine(engine.wait_ready())
        self.seed = 1_000
        self.usual = statistics.median(self._fresh()[0] for _ in range(RUNS))

    def _prompt(self) -> list[int]:
        self.seed += 1
        return prompt(CHUNKS * CHUNK_TOKENS + 5, self.seed)

    def _fresh(self) -> tuple[float, list[int], list[int]]:
        """A request without hits: seconds, prompt, tokens."""
        tokens = self._prompt()
        started = time.monotonic()
        answer = self.testbed.requests().run(tokens)
        return time.monotonic() - started, tokens, answer

    def _stored(self) -> list[int]:
        """A prompt whose chunks are only in files: neither in RAM nor in the GPU's prefix cache."""
        tokens = self._prompt()
        self.testbed.requests().run(tokens)
        self.testbed.settle_stores()
        self.testbed.restart_daemon(signal.SIGKILL)
        self.testbed.wait_attached()
        self.testbed.empty_gpu_cache()
        return tokens

    def row(self, name: str, fault: EngineFault) -> ScorecardRow:
        """Runs one fault."""
        title, means = (
            PREFIX + name,
            "vLLM, FUSE" if fault.mount else "vLLM, files" if fault.files else "vLLM, process",
        )
        if fault.mount and self.mount is None:
            return ScorecardRow(title, SKIPPED, self.no_mount_reason, means)
        wrong, crashes, notes = 0, 0, []
        longest = recovery = None
        try:
            wrong, longest, delay = self._inject(fault)
            if fault.files:
                # Damaged files are removed where they are read. The rest would be counted as
                # objects.
                for path in self.below.rglob("*.kv"):
                    path.unlink(missing_ok=True)
            notes.append(
                f"the request without hits took {delay:.2f} s, {self.usual:.2f} s without a fault"
            )
            if delay > DELAY_FACTOR * self.usual + DELAY_SECONDS:
                notes.append("the request without hits was delayed")
            started = time.monotonic()
            again = self._stored()
            wrong += self.testbed.requests().run(again) != self.plain.tokens(again)
            recovery = round(time.monotonic() - started, 2)
        except (EngineProcessError, TimeoutError, OSError) as error:
            crashes += 1
            notes.append(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
        finally:
            if self.mount is not None:
                self.mount.set()
        failed = wrong or crashes or "the request without hits was delayed" in notes
        reason = (
            ""
            if not failed
            else f"{wrong} requests with wrong tokens, {crashes} crashes; {'; '.join(notes)}"
        )
        return ScorecardRow(
            title,
            FAIL if failed else PASS,
            reason,
            means,
            wrong_bytes=wrong,
            crashes=crashes,
            longest_wait_beyond_clock_seconds=longest,
            recovery_seconds=recovery,
            notes=notes,
        )

    def _inject(self, fault: EngineFault) -> tuple[int, float, float]:
        """Injects the fault. Returns the number of requests with wrong tokens, how long the request
        with hits waited beyond its deadline and the computation, and the duration of the other one.
        """
        hit = self._stored()
        fresh = self._prompt()
        expected = {"hit": self.plain.tokens(hit), "fresh": self.plain.tokens(fresh)}
        if fault.mount and self.mount is not None:
            self.mount.set(**fault.mount)
        if fault.files:
            fault.files(sorted(self.below.rglob("*.kv")))
        if fault.process == "engine":
            return self._engine_killed(hit, expected["hit"])
        if fault.process == "tierd-SIGSTOP":
            os.kill(self.testbed.daemon_pid(), signal.SIGSTOP)
        requests = self.testbed.requests()
        started = time.monotonic()
        with_hits = requests.add(hit)
        requests.engine.call("step", count=2)
        if fault.process == "tierd-SIGKILL":
            os.kill(self.testbed.daemon_pid(), signal.SIGKILL)
        sent = time.monotonic()
        without = requests.add(fresh)
        answers = dict(requests.finish([without]))
        delay = time.monotonic() - sent
        answers.update(requests.finish([with_hits]))
        waited = time.monotonic() - started
        if fault.process == "tierd-SIGSTOP":
            os.kill(self.testbed.daemon_pid(), signal.SIGCONT)
        if fault.process == "tierd-SIGKILL":
            self.testbed.restart_daemon(signal.SIGKILL)
        if self.mount is not None:
            self.mount.set()
        self.testbed.wait_attached()
        wrong = (answers[with_hits]["tokens"] != expected["hit"]) + (
            answers[without]["tokens"] != expected["fresh"]
        )
        return wrong, round(max(0.0, waited - DEADLINE_SECONDS - 2 * self.usual), 3), delay

    def _engine_killed(self, hit: list[int], expected: list[int]) -> tuple[int, float, float]:
        """The engine is killed during a request; the one that replaces it loads from the tiers."""
        engine = self.testbed.engine
        if engine is None:
            raise TimeoutError("no engine is running")
        requests = self.testbed.requests()
        requests.add(hit)
        engine.call("step", count=2)
        engine.kill()
        self.testbed.start()
        self.testbed.wait_attached()
        with self.testbed.loads() as loads:
            wrong = int(self.testbed.requests().run(hit) != expected)
        if not loads.tokens:
            raise TimeoutError("the replacement engine loaded nothing")
        delay, prompt, answer = self._fresh()
        return wrong + (answer != self.plain.tokens(prompt)), 0.0, delay
