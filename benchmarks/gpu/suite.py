"""Runs sets of the GPU benchmarks within a time budget, and judges what they measured.

    python -m benchmarks.gpu.suite one-a --seconds 560 --out DIRECTORY

Each part is a process with a deadline and a directory of its own. A part that fails, or is cut,
does not stop the others. After each part ``--out`` holds everything that is known so far:
``suite.json``, ``suite.md`` with the tables and one line for each target, and ``suite.log`` with
the ends of all logs. A part for which less than half of its expected time is left is not started.

``--cpu`` is a trial of all programs on the CPU engine; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.common import machine, options
from benchmarks.gpu import engines
from benchmarks.gpu.targets import judged

HERE = Path(__file__).parent
MARK = "KVTIER_BENCHMARK_PART"
"""A variable that all processes of a part inherit, so that none is left behind."""
END_SECONDS = 10.0
"""How long what a part has started may take to end by itself: tierd ends after its engines."""
TERM_SECONDS = 3.0
MARGIN_SECONDS = 5.0
"""For the results, once the budget is used up."""
LOG_BYTES = 20_000
"""Of each log."""
SHOWN_LINES = 8
"""Of the log of a part that failed, in the text."""
SHARE = 0.5
"""A part is started if this share of its expected time is left: what it has measured until it is
cut counts."""
PATIENCE = 2.0
"""A part is cut after this multiple of its expected time, so that the next ones get theirs."""
CPU_PATIENCE = 20.0
SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")


@dataclass(frozen=True, slots=True)
class Part:
    """``seconds``: what it is expected to take. ``arguments``: of ``script``, a file beside this
    one. ``trial``: further ones with ``--cpu``. ``command``: in place of a script."""

    name: str
    what: str
    seconds: int
    script: str = ""
    arguments: tuple[str, ...] = ()
    trial: tuple[str, ...] = ()
    command: Callable[[argparse.Namespace], list[str] | None] | None = None
    read: Callable[[str], dict[str, Any]] | None = None
    files: tuple[str, ...] = ()
    """What it leaves in its directory for ``--out``."""


@dataclass(slots=True)
class Outcome:
    """How a part ended. ``report``: the JSON object that it printed. ``left``: if there is none,
    what its engines had measured."""

    part: str
    state: str
    seconds: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)
    left: dict[str, Any] = field(default_factory=dict)
    log: str = ""


def _sanitizer(chosen: argparse.Namespace) -> list[str] | None:
    test = [sys.executable, "-m", "kvtier.transfer.selftest", "--device"]
    if chosen.cpu:
        return [*test, "cpu", "--bytes", "1000000"]
    tool = next(filter(None, map(shutil.which, SANITIZERS)), None)
    return tool and [tool, "--tool", "memcheck", *test, "cuda", "--bytes", "100000000"]


def _sanitized(text: str) -> dict[str, Any]:
    found = re.findall(r"ERROR SUMMARY: (\d+) error", text)
    return {"measured": {"errors": float(sum(map(int, found)))}} if found else {}


LONGER_WAIT = "kvtier.engines.vllm.worker:IDLE_WAIT_SECONDS=0.008"
"""Whether an idle step that waits until a load can be reported is worth another one."""
QUICK = ("--quick",)
RELOADS = ("--lengths", "4096", "16384")
SHORT = ("--conversations", "4", "--rounds", "3", "--gpu-blocks", "512", "--layers", "1")
TINY = ("--layers", "1")
SETS: Mapping[str, Sequence[Part]] = {
    "one-a": (
        Part("reload-v2", "reload from RAM, V2, both connectors", 160, "reload.py",
             QUICK, (*RELOADS, *TINY)),
        Part("reload-v1", "the same, V1", 145, "reload.py",
             (*QUICK, "--runner", "v1", "--ram-gib", "20"), (*RELOADS, *TINY)),
        Part("rounds-48", "48 conversations, 2,048 blocks, both connectors", 170, "rounds.py",
             (*QUICK, "--conversations", "48", "--gpu-blocks", "2048", "--ram-gib", "42"),
             SHORT),
        Part("reload-v2-in-process", "reload from RAM, V2, in process, KVTier", 70, "reload.py",
             (*QUICK, "--in-process", "--only", "kvtier", "--ram-gib", "20"), (*RELOADS, *TINY)),
    ),
    "one-b": (
        Part("busy", "reloads beside 32 streams, both connectors", 170, "busy.py",
             QUICK, ("--streams", "2", *TINY)),
        Part("stores", "new prompts, with RAM and with files", 190, "stores.py",
             (*QUICK, "--directory", "{shm}", "--ram-gib", "20"), TINY),
        Part("files-tmpfs", "reload from files in shared memory", 80, "files.py",
             (*QUICK, "--directory", "{shm}"), TINY),
        Part("files-disk", "reload from files on a disk", 110, "files.py",
             (*QUICK, "--directory", "{disk}"), TINY),
        Part("sanitizer", "compute-sanitizer over the self-test of copies", 60,
             command=_sanitizer, read=_sanitized),
    ),
    "one-c": (
        Part("steps-one", "trace of the steps of a reload, both connectors and none", 200,
             "engine_steps.py", (*QUICK, "--set", LONGER_WAIT), TINY, files=("steps.json",)),
        Part("busy-switch", "as busy, KVTier, threads taking turns of 0.5 ms", 90, "busy.py",
             (*QUICK, "--only", "kvtier", "--set", "sys:switchinterval=0.0005"),
             ("--streams", "2", *TINY)),
        Part("rounds-32", "32 conversations, 4,096 blocks, both connectors", 150, "rounds.py",
             QUICK, SHORT),
        Part("rounds-256", "the same with chunks of 256 tokens, KVTier", 80, "rounds.py",
             (*QUICK, "--only", "kvtier", "--chunk-tokens", "256"), SHORT),
    ),
    "one-d": (
        Part("reload-v1-in-process", "reload from RAM, V1, in process, KVTier", 75, "reload.py",
             (*QUICK, "--in-process", "--runner", "v1", "--only", "kvtier"), (*RELOADS, *TINY)),
    ),
    "two-a": (
        Part("reload-two", "reload from RAM, two GPUs, KVTier", 90, "reload.py",
             (*QUICK, "--tensor-parallel", "2", "--ram-gib", "64", "--only", "kvtier"),
             (*RELOADS, *TINY)),
        Part("two-engines", "two engines, one tierd, six rounds", 110, "two_engines.py",
             (), ("--conversations", "4", "--gpu-blocks", "512", *TINY)),
        Part("rounds-two", "32 conversations, two GPUs, both connectors", 170, "rounds.py",
             (*QUICK, "--tensor-parallel", "2"), SHORT),
    ),
    "two-b": (
        Part("steps-two", "trace of the steps of a reload, two GPUs, both connectors", 190,
             "engine_steps.py", (*QUICK, "--tensor-parallel", "2", "--modes", "kvtier", "peer",
                                 "--set", LONGER_WAIT),
             TINY, files=("steps.json",)),
    ),
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is run, how long, and where the results go."""
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of: {', '.join(SETS)}")
    parser.add_argument("--list", action="store_true", help="print the sets and their parts")
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help="these parts")
    parser.add_argument("--seconds", type=float, default=560.0, help="stop after this time")
    parser.add_argument("--out", default="", help="directory for results, written after each part")
    parser.add_argument("--work", default="/tmp", help="where parts have their directories")
    parser.add_argument(
        "--cpu", action="store_true", help="a trial on the CPU engine: figures mean nothing"
    )


def chosen_parts(chosen: argparse.Namespace, sets: Mapping[str, Sequence[Part]]) -> list[Part]:
    """The parts to run, in order. Raises ``SystemExit`` for names that do not exist."""
    unknown = [each for each in chosen.sets if each not in sets]
    known = [each for each in chosen.sets or sets if each not in unknown]
    parts = [part for name in known for part in sets[name]]
    names = {part.name for part in parts}
    unknown += [each for each in chosen.only if each not in names and not unknown]
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}; --list prints what there is")
    if not chosen.sets and not chosen.only:
        raise SystemExit("name a set, or a part with --only; --list prints what there is")
    return [part for part in parts if not chosen.only or part.name in chosen.only]


class Suite:
    """Runs parts one after the other, and writes what is known after each."""

    def __init__(self, chosen: argparse.Namespace, started_at: float) -> None:
        self._chosen = chosen
        self._until = started_at + chosen.seconds - MARGIN_SECONDS
        self._name = f"kvtier-suite-{os.getpid()}"
        self._work = Path(chosen.work) / self._name
        self._out = Path(chosen.out) if chosen.out else None
        self._started_at = started_at
        self._link = 0.0
        self.card = "unknown"
        self.outcomes: list[Outcome] = []

    def prepare(self) -> None:
        """Asks for the card and measures the link, once for all parts."""
        self._work.mkdir(parents=True, exist_ok=True)
        try:
            self.card = engines.card(self._chosen)
            gpus = max(self._gpus(), 1)
            wanted = argparse.Namespace(cpu=self._chosen.cpu, link=0.0, tensor_parallel=gpus)
            self._link = engines.link_bytes_per_second(wanted)
        except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
            self.outcomes.append(Outcome("card and link", f"failed: {error}"))

    def _gpus(self) -> int:
        return 2 if any(each.startswith("two") for each in self._chosen.sets) else 1

    def run(self, parts: Sequence[Part]) -> None:
        """Runs the parts; returns early when the time is up."""
        for part in parts:
            left = self._until - time.monotonic()
            if left < (0.0 if self._chosen.cpu else SHARE * part.seconds):
                self.outcomes.append(Outcome(part.name, f"not started: {left:.0f} s left"))
            else:
                print(f"{part.name}: {part.what}", file=sys.stderr, flush=True)
                most = part.seconds * (CPU_PATIENCE if self._chosen.cpu else PATIENCE)
                self.outcomes.append(self._run(part, max(1.0, min(left, most))))
            self.write()

    def _command(self, part: Part, keep: Path) -> list[str] | None:
        if part.command is not None:
            return part.command(self._chosen)
        places = {"{shm}": f"/dev/shm/{keep.name}-files", "{disk}": str(keep / "files")}
        arguments = [places.get(each, each) for each in part.arguments]
        command = [sys.executable, str(HERE / part.script), *arguments, "--json"]
        # The link of both GPUs at once is lower than that of one.
        if self._link and ("--tensor-parallel" in arguments or self._gpus() == 1):
            command += ["--link", f"{self._link:.0f}"]
        return [
            *command,
            "--keep",
            str(keep),
            *(("--cpu", *part.trial) if self._chosen.cpu else ()),
        ]

    def _run(self, part: Part, seconds: float) -> Outcome:
        keep = self._work / f"{self._name}-{part.name}"
        keep.mkdir(parents=True, exist_ok=True)
        command = self._command(part, keep)
        if command is None:
            return Outcome(part.name, "skipped: its program is not installed")
        began, mark = time.monotonic(), f"{self._name}/{part.name}"
        log = keep / "part.log"
        with (keep / "part.out").open("wb") as output, log.open("wb") as errors:
            child = subprocess.Popen(
                command,
                cwd=HERE.parents[1],
                env={**os.environ, MARK: mark},
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            try:
                child.wait(seconds)
                state = "done" if child.returncode == 0 else f"failed: status {child.returncode}"
            except subprocess.TimeoutExpired:
                state = f"cut after {seconds:.0f} s"
            finally:
                _end(child, mark, patient=child.returncode is not None)
        outcome = Outcome(part.name, state, time.monotonic() - began)
        self._collect(part, keep, outcome)
        self._clean(keep)
        return outcome

    def _collect(self, part: Part, keep: Path, outcome: Outcome) -> None:
        printed = (keep / "part.out").read_text(errors="replace")
        errors = (keep / "part.log").read_text(errors="replace")
        if part.read is not None:
            outcome.report = part.read(printed + errors)
        else:
            outcome.report = last_object(printed)
        logs = [("part.out", "" if outcome.report else printed), ("part.log", errors)]
        for path in sorted([*keep.parent.glob(f"{keep.name}*/*.log"), *keep.glob("*.log")]):
            if path != keep / "part.log" and (path.name, "") not in logs:
                logs.append((path.name, path.read_text(errors="replace")))
        outcome.log = "".join(f"-- {name}\n{text[-LOG_BYTES:]}\n" for name, text in logs if text)
        if not outcome.report.get("measured"):
            for path in sorted(keep.parent.glob(f"{keep.name}*/*.json")):
                if path.name not in part.files:
                    outcome.left[path.stem] = json.loads(path.read_text())
        for name in part.files:
            if self._out is not None and (keep / name).exists():
                self._out.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(keep / name, self._out / f"{part.name}-{name}")

    def _clean(self, keep: Path) -> None:
        for path in [*keep.parent.glob(f"{keep.name}*"), *Path("/dev/shm").glob(f"{keep.name}*")]:
            shutil.rmtree(path, ignore_errors=True)

    def values(self) -> dict[str, dict[str, float]]:
        """What the parts have measured, by part."""
        return {each.part: each.report.get("measured", {}) for each in self.outcomes}

    def result(self) -> dict[str, Any]:
        """Everything that is known."""
        return {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "card": self.card,
            "machine": machine(),
            "link_bytes_per_second": self._link,
            "seconds": time.monotonic() - self._started_at,
            "parts": [
                {
                    "part": each.part,
                    "state": each.state,
                    "seconds": each.seconds,
                    "report": each.report,
                    "left": each.left,
                }
                for each in self.outcomes
            ],
            "targets": judged(self.values()),
        }

    def text(self) -> str:
        """The tables, and one line for each target."""
        result = self.result()
        lines = [f"# {result['card']}, {result['date']} ({result['machine']})", ""]
        if self._link:
            lines += [f"Link: {self._link / 1e9:.1f} GB/s", ""]
        for each in self.outcomes:
            lines += [f"## {each.part}: {each.state}, {each.seconds:.0f} s", ""]
            if each.state != "done" and each.log:
                lines += ["```text", *each.log.splitlines()[-SHOWN_LINES:], "```", ""]
            if each.report.get("head"):
                lines += [each.report["title"], ""]
                lines += _table(each.report["head"], each.report["rows"])
                lines += ["", f"ratio {each.report['ratio']:.3f} ({each.report['judged']})", ""]
        head = ["target", "measured", "limit", "", "card", "date"]
        rows = [[*row, result["card"], result["date"]] for row in result["targets"]]
        rows.sort(key=lambda row: row[1] == "-")
        return "\n".join([*lines, "## Targets", "", *_table(head, rows), ""])

    def write(self) -> None:
        """Writes what is known into ``--out``. Each file is replaced as a whole."""
        if self._out is None:
            return
        self._out.mkdir(parents=True, exist_ok=True)
        logs = "".join(f"==== {each.part}: {each.state}\n{each.log}" for each in self.outcomes)
        texts = {
            "suite.json": json.dumps(self.result()),
            "suite.md": self.text(),
            "suite.log": logs,
        }
        for name, text in texts.items():
            staged = self._out / f".{name}"
            staged.write_text(text)
            staged.replace(self._out / name)

    def close(self) -> None:
        """Removes the directories of the parts."""
        shutil.rmtree(self._work, ignore_errors=True)


def last_object(printed: str) -> dict[str, Any]:
    """The last line that is a JSON object; {} if there is none."""
    for line in reversed(printed.splitlines()):
        if line.startswith("{"):
            try:
                found: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            return found
    return {}


def _table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> list[str]:
    every = [list(map(str, head)), ["---"] * len(head), *(list(map(str, row)) for row in rows)]
    return [f"| {' | '.join(row)} |" for row in every]


def marked_processes(mark: str) -> list[int]:
    """The processes that have inherited the mark of a part."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                variables = Path(entry.path, "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if wanted in variables:
                found.append(int(entry.name))
    return found


def _end(child: subprocess.Popen[bytes], mark: str, *, patient: bool) -> None:
    """Ends every process of a part, each by its id. ``patient``: the part itself has ended, and
    what it has started ends by itself."""
    if not patient:
        _signal(signal.SIGTERM, [child.pid])
        try:
            child.wait(TERM_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        engines_left = [each for each in marked_processes(mark) if not _is_tierd(each)]
        _signal(signal.SIGKILL, engines_left)
    deadline = time.monotonic() + END_SECONDS
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    _signal(signal.SIGKILL, left)
    child.wait(30)


def _is_tierd(pid: int) -> bool:
    """Whether a process is a tierd: it removes its pool when its last engine has ended."""
    try:
        return b"kvtier.tierd" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _signal(number: int, pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def print_sets(sets: Mapping[str, Sequence[Part]]) -> None:
    """The sets, their parts, and how long each is expected to take."""
    for name, parts in sets.items():
        print(f"{name} ({sum(part.seconds for part in parts)} s)")
        for part in parts:
            print(f"  {part.name:24} {part.seconds:4} s  {part.what}")


def main(sets: Mapping[str, Sequence[Part]] = SETS) -> None:
    """Runs the parts and prints the tables."""
    started_at = time.monotonic()
    chosen = options(__doc__ or "", add_options)
    if chosen.list:
        print_sets(sets)
        return
    parts = chosen_parts(chosen, sets)
    suite = Suite(chosen, started_at)

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        suite.prepare()
        suite.run(parts)
    except KeyboardInterrupt:
        print("interrupted: what has ended until now counts", file=sys.stderr)
    finally:
        suite.write()
        suite.close()
    print(json.dumps(suite.result()) if chosen.json else suite.text())


if __name__ == "__main__":
    main()
