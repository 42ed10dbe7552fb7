"""Real vLLM on CPU, each engine in its own process.

Tokens are compared with those of an engine without KVTier, computed once per session on the same
machine, because golden values would differ between processors.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier import payload as payload_writer
from kvtier.config.models import Daemon
from kvtier.harness.engine_requests import ReferenceEngine
from kvtier.harness.engine_testbed import EngineOptions, EngineTestbed, running_reference
from kvtier.harness.tiny_model import write_llama


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    installed = importlib.util.find_spec("vllm") is not None
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)
            if not installed:
                item.add_marker(
                    pytest.mark.skip(reason="vllm is not installed: install the extra `engine`")
                )


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def model(scratch: Path) -> Path:
    return write_llama(scratch / "model", seed=0)


@pytest.fixture(scope="session")
def payload(scratch: Path) -> Path:
    return payload_writer.write(scratch / "payload", include=("harness", "testing"))


@pytest.fixture(scope="session")
def plain(model: Path, payload: Path, scratch: Path) -> Iterator[ReferenceEngine]:
    with running_reference(model, payload, scratch / "plain.log") as engine:
        yield engine


@pytest.fixture(scope="session")
def sidecar(model: Path, payload: Path, scratch: Path) -> Iterator[EngineTestbed]:
    """One engine for all tests of a failing daemon or storage.

    RAM does not outlive the daemon, so after a new daemon everything comes from files.
    """
    tuning = EngineOptions(daemon=Daemon.SIDECAR, persistence="Process", load_timeout_seconds=10)
    case = EngineTestbed(scratch / "sidecar", model, payload, tuning)
    try:
        case.start_daemon()
        from tests.support.slow_copies import INSTALL  # imports torch

        case.start(kvtier_hooks=[INSTALL])
        yield case
    finally:
        case.close()


@pytest.fixture
def testbed(sidecar: EngineTestbed) -> Iterator[EngineTestbed]:
    """``sidecar`` with a living daemon and no faults."""
    sidecar.set_faults()
    sidecar.wait_attached()
    yield sidecar
    sidecar.set_faults()
    from tests.support.slow_copies import set_copy_seconds  # imports torch

    set_copy_seconds(sidecar, 0)
