"""The suite of GPU benchmarks without a GPU: what it runs, what it leaves, how it judges, and how
the trace of an engine's steps is read."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.gpu import engine_steps, engines, step_trace, suite, targets
from benchmarks.gpu.engine_steps import Event, Window
from benchmarks.gpu.suite import MARK, Part, Suite

ROOT = Path(__file__).parents[3]
DETACHED = """
import pathlib, subprocess, sys, time
command = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(command, start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""
MEASURED = 'print(\'{"title": "t", "head": ["a"], "rows": [["1"]], "ratio": 1.0, "judged": "j", '
MEASURED += '"measured": {"kvtier.attach": 3.0}}\')'


def trivial(name: str, program: str, *arguments: str, seconds: int = 30) -> Part:
    command = [sys.executable, "-c", program, *arguments]
    return Part(name, "trivial", seconds, command=lambda chosen: command)


def chosen(directory: Path, seconds: float = 600.0, **more: object) -> argparse.Namespace:
    values = {"cpu": True, "sets": [], "only": (), "work": str(directory / "work")}
    values |= {"out": str(directory / "out"), "seconds": seconds, "json": False}
    return argparse.Namespace(**{**values, **more})


def run(parts: list[Part], directory: Path, seconds: float = 600.0, **more: object) -> Suite:
    found = Suite(chosen(directory, seconds, **more), time.monotonic())
    try:
        found.prepare()
        found.run(parts)
    finally:
        found.close()
    return found


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("option", ["--list", "--help"])
def test_its_command_names_the_sets(option: str) -> None:
    paths = os.pathsep.join(str(ROOT / each) for each in ("connector", "operator", "."))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.suite", option],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    for name in suite.SETS:
        assert name in done.stdout


def test_every_part_exists_and_every_target_belongs_to_a_part() -> None:
    parts = [part for every in suite.SETS.values() for part in every]
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        assert part.command is not None or (suite.HERE / part.script).is_file()
    assert {each.part for each in targets.TARGETS} <= {part.name for part in parts}


def test_the_children_of_all_benchmarks_find_what_they_import(tmp_path: Path) -> None:
    """A child has the payload in place of the installed package."""
    scripts = {part.script for every in suite.SETS.values() for part in every if part.script}
    modules = ", ".join(f"benchmarks.gpu.{Path(each).stem}" for each in sorted(scripts))
    environment = {**os.environ, **engines.environment(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path / "payload"), str(ROOT)))
    program = f"import {modules}, kvtier; print(kvtier.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stdout.startswith(str(tmp_path))


def test_sets_fit_into_one_command() -> None:
    for name in ("one-a", "one-c", "one-d", "two-a", "two-b"):
        assert sum(part.seconds for part in suite.SETS[name]) <= 560


def test_unknown_names_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="unknown: three-a"):
        suite.chosen_parts(chosen(tmp_path, sets=["three-a"]), suite.SETS)
    with pytest.raises(SystemExit, match="unknown: lunch"):
        suite.chosen_parts(chosen(tmp_path, sets=["one-a"], only=["lunch"]), suite.SETS)
    with pytest.raises(SystemExit, match="name a set"):
        suite.chosen_parts(chosen(tmp_path), suite.SETS)
    only = suite.chosen_parts(chosen(tmp_path, only=["busy"]), suite.SETS)
    assert [part.name for part in only] == ["busy"]


def test_a_part_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    failing = trivial("failing", "import sys; print('broken'); sys.exit(3)")
    found = run([failing, trivial("reload-v2", MEASURED)], tmp_path)
    assert [each.state for each in found.outcomes] == ["failed: status 3", "done"]
    left = json.loads((tmp_path / "out" / "suite.json").read_text())
    assert [each["part"] for each in left["parts"]] == ["failing", "reload-v2"]
    assert left["parts"][1]["report"]["measured"] == {"kvtier.attach": 3.0}
    row = next(each for each in left["targets"] if "36 GiB" in each[0])
    assert row[1:] == ["3.000", "<= 4", "met"]
    assert "broken" in (tmp_path / "out" / "suite.log").read_text()
    text = (tmp_path / "out" / "suite.md").read_text()
    assert "figures mean nothing" in text
    assert "broken" in text
    assert "| seconds until a pool of 36 GiB is usable | 3.000 | <= 4 | met |" in text


def test_a_part_that_hangs_is_cut(tmp_path: Path) -> None:
    hanging = trivial("hanging", "import time; time.sleep(600)", seconds=0)
    found = run([hanging, trivial("next", MEASURED)], tmp_path)
    assert [each.state.split()[0] for each in found.outcomes] == ["cut", "done"]


def test_without_time_left_no_part_is_started(tmp_path: Path) -> None:
    found = Suite(chosen(tmp_path, 10.0, cpu=False), time.monotonic())
    found.run([trivial("late", MEASURED, seconds=100)])
    assert found.outcomes[-1].state.startswith("not started")


def test_what_a_part_has_started_elsewhere_is_ended(tmp_path: Path) -> None:
    note, mark = tmp_path / "pid", f"test-{os.getpid()}/{tmp_path.name}"
    child = subprocess.Popen(
        [sys.executable, "-c", DETACHED, str(note)],
        env={**os.environ, MARK: mark},
        start_new_session=True,
    )
    wait_until(lambda: note.exists() and bool(note.read_text()))
    detached = int(note.read_text())
    assert {child.pid, detached} <= set(suite.marked_processes(mark))
    suite._end(child, mark, patient=False)
    wait_until(lambda: ended(detached))
    assert suite.marked_processes(mark) == []


def test_a_part_whose_program_is_missing_is_skipped(tmp_path: Path) -> None:
    missing = Part("sanitizer", "", 1, command=lambda chosen: None)
    assert run([missing], tmp_path).outcomes[0].state.startswith("skipped")


def test_the_sanitizer_is_read() -> None:
    assert suite._sanitized("x\n========= ERROR SUMMARY: 2 errors\n") == {
        "measured": {"errors": 2.0}
    }
    assert suite._sanitized("nothing") == {}


def test_a_target_is_compared_with_the_best_of_the_others() -> None:
    target = next(each for each in targets.TARGETS if each.beside and each.part == "reload-v1")
    name = target.name
    values = {
        "reload-v1": {name: 20.0, target.beside[1][1]: 25.0},
        "reload-v2": {target.beside[0][1]: 16.0},
    }
    assert target.value(values) == pytest.approx(20 / 16)
    assert not target.met(20 / 16)
    assert target.value({"reload-v1": {name: 20.0}}) is None


def event(name: str, begin: float, end: float, process: int = 1, **details: object) -> Event:
    return Event(process, name, begin, end, dict(details))


def traced() -> Window:
    """A reload: an idle step that submits the copy, one that does nothing, and the token's."""
    window = Window("reload", 4096, sent=10.0, first=10.020, cached=4096)
    window.events = [
        event("add", 10.001, 10.0015),
        event("schedule", 10.002, 10.003, tokens=0),
        event("scheduler.build_connector_meta", 10.0021, 10.0024, pickled=0.0001, bytes=900),
        event("load.start", 10.0022, 10.0023),
        event("dispatch", 10.003, 10.0031),
        event("rank", 10.0035, 10.005, process=2, tokens=0),
        event("rank", 10.0037, 10.005, process=3, tokens=0),
        event("worker.start_load_kv", 10.0036, 10.0040, process=2),
        event("load.received", 10.0037, 10.0037, process=2, loads=1),
        event("copy.submit", 10.0037, 10.0039, process=2, direction="to_device", bytes=1),
        event("tierd.message", 10.0042, 10.0042, process=2, message="LoadPinned"),
        event("load.reported", 10.0045, 10.0045, process=2, follows=False, copy_seconds=0.0),
        event("schedule", 10.006, 10.0061, tokens=0),
        event("dispatch", 10.0062, 10.0063),
        event("update", 10.0064, 10.0065, loaded=["r"], sampled=False),
        event("schedule", 10.008, 10.0082, tokens=1),
        event("dispatch", 10.0083, 10.0084),
        event("copy.done", 10.012, 10.012, process=2, direction="to_device", bytes=1,
              device_start=10.0041, device_end=10.0100),
        event("update", 10.0185, 10.019, loaded=[], sampled=True),
        event("load.reported", 10.021, 10.021, process=2, follows=True, copy_seconds=0.0059),
    ]  # fmt: skip
    return window


def test_a_trace_says_when_everything_happened() -> None:
    found = engine_steps.marks(traced())
    assert {name: round(value, 3) for name, value in found.items()} == {
        "in core": 1.5,
        "scheduled": 3.0,
        "load received": 3.7,
        "copy submitted": 3.9,
        "copy began": 4.1,
        "load pinned": 4.2,
        "copy ended": 10.0,
        "load reported": 4.5,
        "load known": 6.5,
        "first-token step": 8.0,
        "token sampled": 19.0,
        "first token": 20.0,
    }


def test_a_trace_says_what_the_parts_took() -> None:
    found = engine_steps.costs(traced())
    assert found["idle steps"] == 2
    assert found["pickled ms"] == pytest.approx(0.1)
    assert found["message bytes"] == 900
    assert found["broadcast ms"] == pytest.approx(0.7)
    assert found["submit ms"] == pytest.approx(0.1)
    assert found["copy ms"] == pytest.approx(5.9)
    assert found["way back ms"] == pytest.approx(1.0)


def test_a_trace_is_divided_into_steps() -> None:
    rows = engine_steps.step_rows(traced())
    assert [row["tokens"] for row in rows] == [0, 0, 1]
    assert [row["loaded"] for row in rows] == [1, 0, 0]
    assert rows[0]["ranks"] == pytest.approx(1.5)
    assert rows[0]["hooks"] == {"start_load_kv": pytest.approx(0.2)}


def test_the_plugin_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.delenv(step_trace.VARIABLE, raising=False)
    step_trace.deliver(tmp_path / "plugin")
    program = (
        "import importlib.metadata as m, sys;"
        "(e,) = [e for e in m.entry_points(group='vllm.general_plugins') if 'trace' in e.name];"
        "e.load()(); print(sys.getswitchinterval())"
    )
    # Without a directory for its events it sets constants, and does not need vLLM.
    environment = {**os.environ, step_trace.CONSTANTS: "sys:switchinterval=0.001"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=True
    )
    assert float(done.stdout) == pytest.approx(0.001)
