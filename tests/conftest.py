"""Order and scheduling of all tests, and a report of every skipped test with its reason."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from kvtier.engines.vllm import counters as engine_counters
from kvtier.store import counters as store_counters

engine_counters.strict = store_counters.strict = True
"""A counter that is not registered fails the test that counts it."""
RANDOM_EXAMPLES = os.environ.get("KVTIER_RANDOM_EXAMPLES", "") == "1"
settings.register_profile("kvtier", deadline=None, derandomize=not RANDOM_EXAMPLES)
settings.load_profile("kvtier")
"""No example fails because the machine is busy, and each run has the same examples. With
``KVTIER_RANDOM_EXAMPLES=1`` each run has others."""
REPOSITORY = Path(__file__).resolve().parents[1]
DEBIAN_PACKAGES = REPOSITORY / "tools" / "debian-packages.txt"
ORDER = (
    "unit",
    "faults",
    "cluster",
    "engine",
)  # what fails in seconds comes before what takes minutes
NODE_FILES = frozenset(
    f"tests/cluster/test_{name}.py"
    for name in (
        "attached_pods_on_node",
        "chart_on_node",
        "chart_lifecycle",
        "fixtures",
        "hanging_storage",
        "sidecar_on_node",
        "injection_on_node",
        "keys_on_node",
        "openshift_on_node",
        "e2e",
    )
)
"""Where tests have a node that runs pods."""


@pytest.fixture(autouse=True)
def _logs_of_kvtier() -> Iterator[None]:
    """The plugin gives vLLM's handlers to the logger, which later tests would not read then."""
    logger = logging.getLogger("kvtier")
    before = logger.propagate, logger.level, list(logger.handlers)
    yield
    logger.propagate, logger.level, logger.handlers[:] = before


@pytest.fixture(autouse=True, scope="session")
def _sockets_of_vllm() -> Iterator[None]:
    """vLLM leaves the files of its sockets behind; they lie in a directory that is removed. Its
    path is short: a socket's has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvtier-rpc-", ignore_cleanup_errors=True) as path:
        os.environ["VLLM_RPC_BASE_PATH"] = path
        yield
        del os.environ["VLLM_RPC_BASE_PATH"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring the quick directories to the front. Inside a directory the order stays."""

    def rank(item: pytest.Item) -> int:
        directory = _directory(item)
        return ORDER.index(directory) if directory in ORDER else 0

    items.sort(key=rank)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Reject a test with a node outside ``NODE_FILES``: two nodes cannot run on one machine."""
    file = item.nodeid.partition("::")[0]
    if "node_cluster" in getattr(item, "fixturenames", ()) and file not in NODE_FILES:
        raise pytest.UsageError(
            f"{file} has tests with a node: add it to NODE_FILES in tests/conftest.py"
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Split the tests into scopes, each of which runs in one process at a time.

    The tests with a node are one, because two nodes cannot run on one machine. Each file of engine
    tests is one of its own, which the process that is free first takes. The API server's tests are
    one, because they share it, and so are all others.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scopes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file in NODE_FILES:
                return "nodes"
            if file.startswith("tests/engine/"):
                return file
            return "cluster" if file.startswith("tests/cluster/") else "others"

    return Scopes(config, log)


def _directory(item: pytest.Item) -> str:
    """The directory below ``tests``; empty for what lies elsewhere."""
    return (
        item.path.relative_to(REPOSITORY / "tests").parts[0]
        if REPOSITORY in item.path.parents
        else ""
    )


def missing_debian_packages() -> list[tuple[str, str]]:
    """``(package, purpose)`` of each package in ``tools/debian-packages.txt`` that is missing."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    lines = DEBIAN_PACKAGES.read_text(encoding="utf-8").splitlines()
    rows = [line.split(maxsplit=2) for line in lines if line.strip() and not line.startswith("#")]
    return [
        (package, reason)
        for package, command, reason in rows
        if shutil.which(command, path=path) is None
    ]


def skipped_tests(reports: list[pytest.TestReport | pytest.CollectReport]) -> list[tuple[str, str]]:
    """``(test, reason)`` of every report of a skip."""
    rows = []
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        rows.append((report.nodeid, reason.removeprefix("Skipped: ")))
    return rows


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> Generator[None, None, None]:
    """Print each skipped test with its reason, and the missing Debian packages, last."""
    yield
    skipped = skipped_tests(terminalreporter.stats.get("skipped", []))
    missing = missing_debian_packages()
    terminalreporter.section("skipped tests")
    for test, reason in skipped:
        terminalreporter.line(f"{test}: {reason}")
    if not skipped:
        terminalreporter.line("none")
    for package, reason in missing:
        terminalreporter.line(f"missing Debian package {package}: {reason}")
