"""Where the milliseconds of a reload go: the steps of an engine from a request to its first token.

One engine after another, without a connector, with KVTier and with vLLM's OffloadingConnector. Each
answers prompts that it has to compute, that its GPU's cache holds, and that lie in the memory tier,
while ``step_trace.py`` records its hooks. The first table has, for each kind of prompt, when each
event happened, in milliseconds since the request was sent (medians), and what the parts took. The
second one has the steps of the reload of median length. The ratio is the time of KVTier's reload by
the floor, at the worst length. The trace takes time itself: compare with ``reload.py``.

What may take the time over the floor (bytes by link, and a hit), and the figure that decides it:

* Steps without tokens. vLLM sleeps 1 ms after each: ``idle steps``, and the gaps between them in
  the second table. Without this, ``first-token step`` would follow ``load known`` at once.
* Asynchronous scheduling. A report is read while the next but one step is made: ``load known`` less
  ``load reported`` is more than one step. With ``--in-process`` it is not there.
* The fingerprint of the weights, after a reset: ``weights known`` is after ``load pinned`` and
  after ``copy submitted``, and ``load reported`` follows it at once.
* The word of tierd that slots are kept: ``load pinned`` is after ``weights known``, and
  ``load reported`` follows it at once. If neither is late, ``load reported`` follows
  ``copy submitted``, or, of a load of more than 512 MiB a rank, the copies.
* Pickling of the message of a step: ``pickled ms`` and ``message bytes``; with one GPU nothing is
  pickled.
* The ring buffer that broadcasts steps to ranks: ``broadcast ms``, from the dispatch of a step
  until the last rank begins it. Compare ``none`` and ``kvtier``: the difference is the message's.
* The start of a load on the scheduler's thread: ``load start ms``.
* Address tables and launches: ``submit ms``, the engine's thread while it submits copies, and
  ``copy began`` less ``copy submitted``, until the device begins.
* Copies in pieces: ``copy ms`` by the device's clock against ``link ms``; the last piece is moved
  by a kernel alone.
* The front end: ``in core`` is the way of the request into the engine's process, and
  ``way back ms`` that of the token. Both are in a hit as well.
* The step of the first token itself: ``first token`` less ``first-token step`` against the same of
  a hit; what is longer waits for copies on the device (``copy ended``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.common import options, progress, report
from benchmarks.gpu import engines, step_trace

LENGTHS = (4096, 16_384)
MODES = ("none", "kvtier", "peer")
OTHER = "kvtier-set"
"""KVTier with other constants (``--set``)."""
FLUSH_PAUSE_SECONDS = 2 * step_trace.FLUSH_SECONDS
WINDOW_SECONDS = 0.1
"""How long after the first token events still belong to a request: reports of ends."""
MARKS = (
    "in core",
    "scheduled",
    "load received",
    "copy submitted",
    "copy began",
    "load pinned",
    "weights known",
    "copy ended",
    "load reported",
    "load known",
    "first-token step",
    "token sampled",
    "first token",
)
COSTS = (
    "idle steps",
    "scheduler hooks ms",
    "worker hooks ms",
    "load start ms",
    "pickled ms",
    "message bytes",
    "broadcast ms",
    "submit ms",
    "copy ms",
    "way back ms",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which prompts and engines."""
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="in tokens")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="engines")
    parser.add_argument("--repetitions", type=int, default=6, help="prompts of each length")
    parser.add_argument(
        "--set",
        nargs="+",
        default=(),
        metavar="MODULE:NAME=NUMBER",
        help="measure KVTier with these constants as well; sys:switchinterval is one",
    )


@dataclass(frozen=True, slots=True)
class Event:
    """What a process of the engine did. Seconds of the monotonic clock."""

    process: int
    name: str
    begin: float
    end: float
    details: dict[str, Any]


@dataclass(slots=True)
class Window:
    """One request: when it was sent, and when its first token came. ``kind``: "computed", "hit" or
    "reload"."""

    kind: str
    length: int
    sent: float
    first: float
    cached: int
    events: list[Event] = field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        """Time to first token."""
        return (self.first - self.sent) * 1e3


def measure(mode: str, chosen: argparse.Namespace) -> None:
    """One engine: its windows."""
    import numpy as np
    from vllm import SamplingParams

    connector = "kvtier" if mode == OTHER else mode
    llm, run_directory = engines.make_engine(connector, chosen, Path(chosen.scratch))
    generator = np.random.default_rng(1)
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
    windows: list[dict[str, Any]] = []

    def prompt(length: int) -> list[int]:
        return [int(each) for each in generator.integers(1000, 127_000, size=length)]

    def ask(tokens: list[int], kind: str = "", length: int = 0) -> None:
        sent = time.monotonic()
        (output,) = llm.generate([{"prompt_token_ids": tokens}], one, use_tqdm=False)
        first = time.monotonic()
        if kind:
            cached = int(output.num_cached_tokens or 0)
            windows.append(
                {"kind": kind, "length": length, "sent": sent, "first": first, "cached": cached}
            )

    def step() -> None:
        ask(prompt(engines.scaled(chosen, 33)))

    def quiet() -> None:
        engines.settle(run_directory, step)
        time.sleep(WINDOW_SECONDS)

    step()
    engines.wait_attached(run_directory, step, chosen.tensor_parallel)
    for number in range(1 + (3 if chosen.quick else chosen.repetitions)):
        for length in chosen.lengths:
            tokens = prompt(engines.scaled(chosen, length) + 1)
            # The first round warms up.
            kinds = ("computed", "hit", "reload") if number else ("", "", "")
            ask(tokens, kinds[0], length)
            quiet()
            ask(tokens, kinds[1], length)
            if mode == "none":
                continue
            quiet()
            engines.reset_prefix_cache(llm, step)
            ask(tokens, kinds[2], length)
            quiet()
        time.sleep(FLUSH_PAUSE_SECONDS)
        step()
        engines.leave(chosen.scratch, mode, {"windows": windows})
    engines.finish(chosen.scratch, mode, {"windows": windows}, llm)


def read_events(directory: Path) -> list[Event]:
    """The events of all processes, in order of their begin."""
    found = []
    for path in directory.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                name, begin, end, details = json.loads(line)
            except ValueError:
                continue  # the process was ended while it wrote
            found.append(Event(int(path.stem), name, begin, end, details))
    return sorted(found, key=lambda event: event.begin)


def windows_of(result: dict[str, Any], events: Sequence[Event]) -> list[Window]:
    """The requests of an engine, each with its events."""
    windows = [Window(**each) for each in result["windows"]]
    for window in windows:
        end = window.first + WINDOW_SECONDS
        window.events = [each for each in events if window.sent <= each.begin <= end]
    return windows


def marks(window: Window) -> dict[str, float]:
    """When each event happened, in milliseconds since the request was sent; what did not happen is
    left out. Of ranks the last one counts."""
    found: dict[str, float] = {"first token": window.milliseconds}

    def note(name: str, seconds: float) -> None:
        if seconds:
            found[name] = (seconds - window.sent) * 1e3

    def of(name: str) -> list[Event]:
        return [each for each in window.events if each.name == name and each.begin < window.first]

    for each in of("add")[:1]:
        note("in core", each.end)
    for each in of("schedule")[:1]:
        note("scheduled", each.end)
    for each in of("load.received"):
        if each.details.get("loads"):
            note("load received", each.end)
    copies = [each for each in of("copy.submit") if each.details["direction"] == "to_device"]
    if copies:
        note("copy submitted", max(each.end for each in copies))
    done = [
        each
        for each in window.events
        if each.name == "copy.done" and each.details["direction"] == "to_device"
    ]
    starts = [each.details["device_start"] for each in done if each.details["device_start"]]
    if starts:
        note("copy began", min(starts))
    if done:
        note("copy ended", max(each.details["device_end"] or each.begin for each in done))
    for each in of("tierd.message"):
        if each.details["message"] == "LoadPinned":
            note("load pinned", each.end)
    for each in of("weights.known"):
        note("weights known", each.end)
    for each in of("load.reported"):
        if not each.details["follows"]:
            note("load reported", each.end)
    for each in of("update"):
        if each.details["loaded"]:
            note("load known", each.end)
        if each.details["sampled"]:
            note("token sampled", each.end)
    for each in of("schedule"):
        if each.details["tokens"]:
            note("first-token step", each.begin)
            break
    return found


def costs(window: Window) -> dict[str, float]:
    """What the parts of a request took, in milliseconds, as far as they happened."""
    inside = [each for each in window.events if each.begin < window.first]

    def total(*names: str) -> float:
        return sum((e.end - e.begin) * 1e3 for e in inside if e.name.startswith(names))

    ranks = max(1, len({each.process for each in inside if each.name == "rank"}))
    found = {
        "idle steps": float(
            sum(each.name == "schedule" and not each.details["tokens"] for each in inside)
        ),
        "scheduler hooks ms": total("scheduler."),
        "worker hooks ms": total("worker.") / ranks,
        "load start ms": total("load.start"),
        "submit ms": total("copy.submit") / ranks,
    }
    for each in inside:
        if "pickled" in each.details:
            found["pickled ms"] = each.details["pickled"] * 1e3
            found["message bytes"] = each.details["bytes"]
    waits = [row["broadcast"] for row in step_rows(window) if row["broadcast"] is not None]
    if waits:
        found["broadcast ms"] = statistics.median(waits)
    ends = [each for each in window.events if each.name == "load.reported"]
    seconds = max((each.details["copy_seconds"] for each in ends), default=0.0)
    if seconds:
        found["copy ms"] = seconds * 1e3
    sampled = [e.end for e in inside if e.name == "update" and e.details["sampled"]]
    if sampled:
        found["way back ms"] = (window.first - sampled[0]) * 1e3
    return found


def step_rows(window: Window) -> list[dict[str, Any]]:
    """The steps of a request, in milliseconds since it was sent. A step ends on the ranks; what was
    reported in it is known when its output is taken (``update``)."""
    inside = [each for each in window.events if each.begin < window.first]
    schedules = [each for each in inside if each.name == "schedule"]
    dispatches = [each for each in inside if each.name == "dispatch"]
    updates = [each for each in inside if each.name == "update"]
    by_rank: dict[int, list[Event]] = {}
    first = dispatches[0].begin if dispatches else window.first
    for each in inside:
        if each.name == "rank" and each.begin >= first:
            by_rank.setdefault(each.process, []).append(each)
    rows = []
    for number, schedule in enumerate(schedules):
        dispatch = dispatches[number] if number < len(dispatches) else None
        ran = [each[number] for each in by_rank.values() if number < len(each)]
        update = updates[number] if number < len(updates) else None
        hooks = [e for e in inside if e.name.startswith("scheduler.") and _within(e, schedule)]
        workers = [
            e
            for e in inside
            for rank in ran
            if e.name.startswith("worker.") and e.process == rank.process and _within(e, rank)
        ]
        rows.append(
            {
                "at": (schedule.begin - window.sent) * 1e3,
                "tokens": schedule.details["tokens"],
                "schedule": (schedule.end - schedule.begin) * 1e3,
                "scheduler hooks": sum((e.end - e.begin) * 1e3 for e in hooks),
                "broadcast": (max(e.begin for e in ran) - dispatch.begin) * 1e3
                if ran and dispatch
                else None,
                "ranks": max((e.end - e.begin) * 1e3 for e in ran) if ran else None,
                "worker hooks": sum((e.end - e.begin) * 1e3 for e in workers) / max(1, len(ran)),
                "hooks": _by_name(workers, max(1, len(ran))),
                "taken": (update.end - window.sent) * 1e3 if update else None,
                "loaded": len(update.details["loaded"]) if update else 0,
            }
        )
    return rows


def _within(event: Event, other: Event) -> bool:
    return other.begin <= event.begin and event.end <= other.end


def _by_name(events: Sequence[Event], ranks: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in events:
        name = each.name.partition(".")[2]
        found[name] = found.get(name, 0.0) + (each.end - each.begin) * 1e3 / ranks
    return found


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each name, over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: statistics.median(row[name] for row in rows if name in row) for name in names}


def median_window(windows: Sequence[Window]) -> Window:
    """The one of median length."""
    ordered = sorted(windows, key=lambda window: window.milliseconds)
    return ordered[(len(ordered) - 1) // 2]


def _print_steps(title: str, window: Window) -> None:
    print(title)
    names = ("at", "tokens", "schedule", "scheduler hooks", "broadcast", "ranks", "worker hooks")
    names += ("taken", "loaded")
    rows = [list(names)]
    for row in step_rows(window):
        rows.append([f"{row[name]:.2f}" if isinstance(row[name], float) else str(row[name])
                     for name in names])  # fmt: skip
    for cells in rows:
        print("  " + "  ".join(cell.rjust(15) for cell in cells))


def main() -> None:
    """Traces all engines and prints the tables."""
    chosen = options(__doc__ or "", engines.add_options, add_options)
    if chosen.child:
        measure(chosen.child, chosen)
        return
    passed = [each for each in sys.argv[1:] if each != "--json"]
    link = engines.link_bytes_per_second(chosen)
    found: dict[str, list[Window]] = {}
    with engines.scratch_directory(chosen) as scratch:
        step_trace.deliver(scratch / "trace")
        modes = [chosen.only] if chosen.only else list(chosen.modes)
        for mode in [*modes, *([OTHER] if chosen.set else [])]:
            progress(f"tracing {mode}")
            events = scratch / f"events-{mode}"
            events.mkdir()
            os.environ[step_trace.VARIABLE] = str(events)
            os.environ[step_trace.CONSTANTS] = " ".join(chosen.set) if mode == OTHER else ""
            result = engines.run_child(__file__, mode, scratch, passed)
            found[mode] = windows_of(result, read_events(events))
        (scratch / "steps.json").write_text(json.dumps(_record(found)))
    table: list[list[object]] = []
    measured: dict[str, float] = {}
    worst = 0.0
    names = [*MARKS, *COSTS, "link ms", "over floor ms"]
    columns = []
    for length in chosen.lengths:
        size = engines.bytes_per_token(chosen) * engines.scaled(chosen, length)
        copy = size / chosen.tensor_parallel / link * 1e3
        for mode, windows in found.items():
            hit = 0.0
            for kind in ("computed", "hit", "reload"):
                some = [each for each in windows if (each.kind, each.length) == (kind, length)]
                if not some:
                    continue
                values = medians([marks(each) for each in some])
                values |= medians([costs(each) for each in some])
                hit = values["first token"] if kind == "hit" else hit
                if kind == "reload":
                    values["link ms"] = copy
                    values["over floor ms"] = values["first token"] - copy - hit
                    if mode == "kvtier":
                        worst = max(worst, values["first token"] / (copy + hit))
                columns.append((f"{mode} {kind} {length}", values))
                measured |= {f"{mode}.{kind}.{length}.{name}": v for name, v in values.items()}
    for heading, values in columns:
        table.append([heading, *(f"{values[n]:.1f}" if n in values else "-" for n in names)])
    if not chosen.json:
        for mode, windows in found.items():
            for length in chosen.lengths:
                for kind in ("hit", "reload"):
                    some = [each for each in windows if (each.kind, each.length) == (kind, length)]
                    if some:
                        _print_steps(f"steps: {mode} {kind} {length}", median_window(some))
    report(
        chosen.json,
        f"milliseconds since a request was sent, TP={chosen.tensor_parallel}, {chosen.runner}"
        f"{', in process' if chosen.in_process else ''}, link {link / 1e9:.1f} GB/s",
        ["", *(heading for heading, _ in columns)],
        [[name, *(row[1 + number] for row in table)] for number, name in enumerate(names)],
        worst,
        "reload of KVTier by link and hit, the worst length; at most 1.05",
        measured,
    )


def _record(found: dict[str, list[Window]]) -> dict[str, Any]:
    """Every window with its marks and steps, for a closer look."""
    return {
        mode: [
            {
                "kind": each.kind,
                "length": each.length,
                "ms": each.milliseconds,
                "cached": each.cached,
                "marks": marks(each),
                "costs": costs(each),
                "steps": step_rows(each),
            }
            for each in windows
        ]
        for mode, windows in found.items()
    }


if __name__ == "__main__":
    main()
