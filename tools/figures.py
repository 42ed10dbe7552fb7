"""Measures how easy the code is to find one's way in, and prints the figures.

    python tools/figures.py            figures of the source text
    python tools/figures.py --paths    also what one lookup, load and store pass (runs an engine)
    python tools/figures.py --json     the same as JSON

Counted are the files of both source roots, generated files and blank `__init__.py` left out.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE_ROOTS = ("connector", "operator")
TEXT = ("connector", "operator", "tests", "benchmarks", "tools", "docs", "README.md",
        "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")  # fmt: skip
MAX_COLUMNS = 100
PRAGMA = re.compile(r"\s+# (?:type: ignore|noqa).*$")
"""A comment for a tool, which has to stand on its line."""
MAX_PARAMETERS = 6
SMALL_LINES = 80
IDLE_SECONDS = 3.0
"""Long enough for everything periodic: heartbeats, snapshots, maintenance. It is subtracted."""
CLUSTER_PLUMBING = (
    "operator/kvtier_operator/kube/",
    "operator/kvtier_operator/runtime.py",
    "operator/kvtier_operator/main.py",
    "operator/kvtier_operator/entry.py",
)
"""Our own code for watching, caching, queueing, calling the API server and running processes."""


def sources() -> list[Path]:
    """The Python files of both source roots."""
    found = [path for root in SOURCE_ROOTS for path in (ROOT / root).rglob("*.py")]
    return sorted(path for path in found if path.read_text().strip())


def module_name(path: Path) -> str:
    """The dotted name under which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, known: set[str]) -> set[str]:
    """Modules of the project that a file imports anywhere, for running or for typing."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found & known


def cycles() -> list[list[str]]:
    """Strongly connected groups of more than one module."""
    paths = {module_name(path): path for path in sources()}
    graph = {name: imports(path, set(paths)) - {name} for name, path in paths.items()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = []
            while True:
                group.append(stack.pop())
                if group[-1] == name:
                    break
            if len(group) > 1:
                found.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for name in graph:
        if name not in index:
            visit(name)
    return found


def definitions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """All functions and classes of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of parameters, ``self`` and ``cls`` left out."""
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def long_lines() -> list[str]:
    """Lines of code and prose over the limit: ``file:line``. A line without a space is one word."""
    listed = subprocess.run(
        ["git", "ls-files", *TEXT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = []
    for name in listed.stdout.split():
        if not name.endswith((".py", ".md")) or name.startswith("docs/reference/"):
            continue
        fenced = False
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            if name.endswith(".md"):
                fenced ^= line.lstrip().startswith("```")
                if fenced or line.startswith("|") or line.strip().startswith("|"):
                    continue
            line = PRAGMA.sub("", line)
            if len(line) > MAX_COLUMNS and " " in line.strip():
                found.append(f"{name}:{number}")
    return found


def static() -> dict[str, object]:
    """Figures of the source text."""
    files = sources()
    lines = {path: len(path.read_text().splitlines()) for path in files}
    many = []
    names = collections.Counter[str]()
    for path in files:
        for node in definitions(path):
            if isinstance(node, ast.ClassDef):
                names[node.name] += 1
            elif parameters(node) > MAX_PARAMETERS:
                many.append(f"{path.relative_to(ROOT)}:{node.name}")
    plumbing = sum(
        count
        for path, count in lines.items()
        if str(path.relative_to(ROOT)).startswith(CLUSTER_PLUMBING)
    )
    return {
        "files": len(files),
        "lines": sum(lines.values()),
        "median_lines": statistics.median(lines.values()),
        f"files_below_{SMALL_LINES}_lines": sum(count < SMALL_LINES for count in lines.values()),
        "import_cycles": cycles(),
        f"functions_with_more_than_{MAX_PARAMETERS}_parameters": many,
        "class_names_used_twice": sorted(name for name, count in names.items() if count > 1),
        f"lines_over_{MAX_COLUMNS}_columns": long_lines(),
        "lines_of_watch_client_queue_process_code": plumbing,
    }


def paths() -> dict[str, dict[str, str]]:
    """What one lookup, one load from RAM and one store pass: modules/functions by process."""
    sys.path.insert(0, str(ROOT))
    from kvtier import payload
    from kvtier.config.models import Daemon
    from kvtier.harness.engine_testbed import EngineOptions, EngineTestbed
    from kvtier.harness.tiny_model import write_llama

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        write_llama(model)
        code = payload.write(folder / "payload", include=("harness", "testing"))

        class Traced(EngineTestbed):
            def environment(self) -> dict[str, str]:
                inherited = super().environment()
                path = f"{ROOT / 'tools' / 'trace'}:{inherited['PYTHONPATH']}"
                return {**inherited, "PYTHONPATH": path, "KVTIER_TRACE": str(folder)}

        def phase(text: str) -> None:
            (folder / "phase.new").write_text(text)
            (folder / "phase.new").replace(folder / "phase")
            time.sleep(0.2)

        case = Traced(
            folder / "case", model, code, EngineOptions(daemon=Daemon.SIDECAR, file_bytes=None)
        )
        try:
            case.start_daemon()
            case.start()
            case.wait_attached()
            requests = case.requests()
            prompt = [7 + position % 200 for position in range(600)]
            phase("idle")
            time.sleep(IDLE_SECONDS)
            phase("store")
            requests.run(prompt)
            case.settle_stores()
            phase("")
            case.empty_gpu_cache()
            phase("load")
            with case.loads("ram") as loaded:
                requests.run(prompt, max_tokens=1)
            phase("")
            if not loaded.tokens:
                raise SystemExit("nothing was loaded: the figures would say nothing")
            engine = case.engine
            engine_pid = engine.process.pid if engine is not None else 0
            return {
                "lookup_in_ram": counted(folder, "load-lookup", engine_pid),
                "load_from_ram": counted(folder, "load", engine_pid),
                "store": counted(folder, "store", engine_pid),
            }
        finally:
            case.close()


def functions(folder: Path, phase: str) -> dict[str, set[str]]:
    """The functions that ran in a phase, by process id."""
    return {
        file.suffix: {
            line
            for line in file.read_text().splitlines()
            if not line.startswith(("harness/", "testing/"))
        }
        for file in folder.glob(f"{phase}.[0-9]*")
    }


def counted(folder: Path, phase: str, engine_pid: int) -> dict[str, str]:
    """``{"engine": "modules/functions", "tierd": ...}`` of one phase, without what runs anyway."""
    result = {}
    idle = functions(folder, "idle")
    for process, ran in functions(folder, phase).items():
        passed = ran - idle.get(process, set())
        modules = {each.partition(":")[0] for each in passed}
        side = "engine" if process == f".{engine_pid}" else "tierd"
        result[side] = f"{len(modules)}/{len(passed)}"
    return result


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--paths", action="store_true", help="run an engine and count what it passes"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    figures: dict[str, object] = static()
    if options.paths:
        figures["modules/functions"] = paths()
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        if isinstance(value, list):
            print(f"{name}: {len(value)}")
            for each in value[:20]:
                print(f"    {each}")
        elif isinstance(value, dict):
            for each, sides in value.items():
                print(f"{name}, {each}: {sides}")
        else:
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
