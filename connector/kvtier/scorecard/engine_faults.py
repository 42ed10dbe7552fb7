"""The scorecard under a real vLLM: whatever the file tier or the daemon does, tokens are those of an engine without KVTier.

Each fault meets a request whose prefix lies in the file tier alone, and beside it a request without hits, which must not be delayed. vLLM is the CPU
build, with a tiny model; scheduler and worker run in one process, so what kills the one kills the other.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.scorecard.mount import FaultyMount

if TYPE_CHECKING:
    from kvtier.harness.engine_testbed import EngineTestbed, ReferenceEngine
    from kvtier.scorecard.runner import ScorecardOptions, ScorecardRow
CHUNKS = 8
RUNS = 3
DELAY_FACTOR = 2.0
DELAY_SECONDS = 0.5
"""A request without hits may take twice as long as without a fault and half a second more: two processes share few cores here."""
PREFIX = "engine-"
CLOCK_SECONDS = 3


@dataclass(frozen=True, slots=True)
class EngineFault:
    """``mount``: what the FUSE mount does wrong; ``files``: what is done to the files; ``blow``: what is done to a process."""

    mount: dict[str, dict[str, Any]] | None = None
    files: Callable[[list[Path]], None] | None = None
    blow: str = ""


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
    "tierd-SIGKILL": EngineFault(blow="tierd-SIGKILL"),
    "tierd-SIGSTOP": EngineFault(blow="tierd-SIGSTOP"),
    "engine-and-worker-SIGKILL": EngineFault(blow="engine"),
}


def names(options: ScorecardOptions) -> list[str]:
    """The rows that ``play`` gives: of the faults that were named, or of all."""
    return [PREFIX + name for name in FAULTS if not options.faults or name in options.faults]


def run_engine_faults(
    options: ScorecardOptions, on_start: Callable[[str], None] = lambda _: None
) -> Iterator[ScorecardRow]:
    """The rows, one by one. Where no vLLM is installed each is skipped with that reason."""
    from kvtier.scorecard.runner import SKIPPED, ScorecardRow

    wanted = [name.removeprefix(PREFIX) for name in names(options)]
    if importlib.util.find_spec("vllm") is None:
        for name in wanted:
            yield ScorecardRow(PREFIX + name, SKIPPED, "vllm is not installed", "vLLM")
        return
    home = Path(tempfile.mkdtemp(prefix="kvtier-faults-engine-", dir=options.directory))
    try:
        with ExitStack() as stack:
            on_start("starting vLLM with and without KVTier")
            scene = _Scene(home, stack)
            for name in wanted:
                on_start(PREFIX + name)
                yield scene.row(name, FAULTS[name])
    finally:
        shutil.rmtree(home, ignore_errors=True)


class _Scene:
    """Two engines, one of them with a file tier on the mount."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        from kvtier import payload as payload_writer
        from kvtier.config.models import Daemon
        from kvtier.harness.engine_testbed import (
            EngineOptions,
            EngineTestbed,
            ReferenceEngine,
            start_reference_engine,
        )
        from kvtier.harness.tiny_model import write_llama

        model, payload = write_llama(home / "model", seed=0), payload_writer.write(home / "payload")
        tuning = EngineOptions(
            daemon=Daemon.SIDECAR,
            persistence="Process",
            load_timeout_seconds=CLOCK_SECONDS,
            failure_threshold=5,
        )
        self.case: EngineTestbed = EngineTestbed(home / "case", model, payload, tuning)
        self.below = home / "below"
        self.below.mkdir()
        self.mount: FaultyMount | None = None
        self.why = ""
        try:
            self.mount = FaultyMount(
                self.below, self.case.files_root, home / "faults.json", home / "mount.log"
            )
            stack.callback(self.mount.close)
        except OSError as error:
            self.why, self.below = (
                f"no FUSE mount can be made here: {error.strerror or error}",
                self.case.files_root,
            )
        engine = start_reference_engine(model, payload, home / "plain.log")
        stack.callback(engine.kill)
        stack.callback(self.case.close)
        self.case.start_daemon()
        self.case.start()
        self.plain: ReferenceEngine = ReferenceEngine(engine.wait_ready())
        self.seed = 1_000
        self.usual = statistics.median(self._fresh()[0] for _ in range(RUNS))

    def _prompt(self) -> list[int]:
        from kvtier.harness.engine_testbed import CHUNK_TOKENS
        from kvtier.harness.tiny_model import prompt

        self.seed += 1
        return prompt(CHUNKS * CHUNK_TOKENS + 5, self.seed)

    def _fresh(self) -> tuple[float, list[int], list[int]]:
        """A request without hits: seconds, prompt, tokens."""
        tokens = self._prompt()
        begun = time.monotonic()
        answer = self.case.requests().run(tokens)
        return time.monotonic() - begun, tokens, answer

    def _stored(self) -> list[int]:
        """A prompt whose chunks are in files and in no RAM, and whose blocks the GPU cache does not hold."""
        tokens = self._prompt()
        self.case.requests().run(tokens)
        self.case.settle_stores()
        self.case.restart_daemon(signal.SIGKILL)
        self.case.wait_attached()
        self.case.empty_gpu_cache()
        return tokens

    def row(self, name: str, fault: EngineFault) -> ScorecardRow:
        """Plays one fault."""
        from kvtier.harness.engine_process import EngineProcessError
        from kvtier.scorecard.runner import FAIL, PASS, SKIPPED, ScorecardRow

        title, means = (
            PREFIX + name,
            "vLLM, FUSE" if fault.mount else "vLLM, files" if fault.files else "vLLM, process",
        )
        if fault.mount and self.mount is None:
            return ScorecardRow(title, SKIPPED, self.why, means)
        wrong, crashes, notes = 0, 0, []
        longest = recovery = None
        try:
            wrong, longest, delay = self._play(fault)
            if fault.files:
                # What is damaged is found where it is read; the rest would be waited for by whoever counts files.
                for path in self.below.rglob("*.kv"):
                    path.unlink(missing_ok=True)
            notes.append(
                f"the request without hits took {delay:.2f} s, {self.usual:.2f} s without a fault"
            )
            if delay > DELAY_FACTOR * self.usual + DELAY_SECONDS:
                notes.append("it was delayed")
            begun = time.monotonic()
            again = self._stored()
            wrong += self.case.requests().run(again) != self.plain.tokens(again)
            recovery = round(time.monotonic() - begun, 2)
        except (EngineProcessError, TimeoutError, OSError) as error:
            crashes += 1
            notes.append(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
        finally:
            if self.mount is not None:
                self.mount.set()
        failed = wrong or crashes or "it was delayed" in notes
        reason = (
            ""
            if not failed
            else f"{wrong} requests with other tokens, {crashes} crashes; {'; '.join(notes)}"
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

    def _play(self, fault: EngineFault) -> tuple[int, float, float]:
        """Requests with other tokens, what the one with hits waited beyond clock and computing, what the other one took."""
        hit = self._stored()
        fresh = self._prompt()
        expected = {"hit": self.plain.tokens(hit), "fresh": self.plain.tokens(fresh)}
        if fault.mount and self.mount is not None:
            self.mount.set(**fault.mount)
        if fault.files:
            fault.files(sorted(self.below.rglob("*.kv")))
        if fault.blow == "engine":
            return self._engine_killed(hit, expected["hit"])
        if fault.blow == "tierd-SIGSTOP":
            os.kill(self.case.daemon_pid(), signal.SIGSTOP)
        requests = self.case.requests()
        begun = time.monotonic()
        with_hits = requests.add(hit)
        requests.engine.call("step", count=2)
        if fault.blow == "tierd-SIGKILL":
            os.kill(self.case.daemon_pid(), signal.SIGKILL)
        asked = time.monotonic()
        without = requests.add(fresh)
        answers = dict(requests.finish([without]))
        delay = time.monotonic() - asked
        answers.update(requests.finish([with_hits]))
        waited = time.monotonic() - begun
        if fault.blow == "tierd-SIGSTOP":
            os.kill(self.case.daemon_pid(), signal.SIGCONT)
        if fault.blow == "tierd-SIGKILL":
            self.case.restart_daemon(signal.SIGKILL)
        if self.mount is not None:
            self.mount.set()
        self.case.wait_attached()
        wrong = (answers[with_hits]["tokens"] != expected["hit"]) + (
            answers[without]["tokens"] != expected["fresh"]
        )
        return wrong, round(max(0.0, waited - CLOCK_SECONDS - 2 * self.usual), 3), delay

    def _engine_killed(self, hit: list[int], expected: list[int]) -> tuple[int, float, float]:
        """The engine dies in the middle of a request; another one in its place is served from the tiers."""
        engine = self.case.engine
        if engine is None:
            raise TimeoutError("there is no engine")
        requests = self.case.requests()
        requests.add(hit)
        engine.call("step", count=2)
        engine.kill()
        self.case.start()
        self.case.wait_attached()
        with self.case.loads() as loads:
            wrong = int(self.case.requests().run(hit) != expected)
        if not loads.tokens:
            raise TimeoutError("the engine that came after it loaded nothing")
        delay, prompt, answer = self._fresh()
        return wrong + (answer != self.plain.tokens(prompt)), 0.0, delay
