"""Damaged and foreign files are misses: the tokens stay those of an engine without KVTier."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.config.models import Daemon
from kvtier.harness.engine_requests import ReferenceEngine
from kvtier.harness.engine_testbed import CHUNK_TOKENS, EngineTestbed, start_reference_engine
from kvtier.harness.tiny_model import prompt, write_llama

HEADER_BYTES = 4096


def _flip(at: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[at(len(content))] ^= 0x10
        path.write_bytes(content)

    return damage


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0" * HEADER_BYTES)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _make_unreadable(path: Path) -> None:
    # Permissions do not stop root; a directory under the name does.
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "the first byte flipped": _flip(lambda size: 0),
    "a byte of the header flipped": _flip(lambda size: 100),
    "the first byte of the payload flipped": _flip(lambda size: HEADER_BYTES),
    "a byte in the middle flipped": _flip(lambda size: size // 2),
    "the last byte flipped": _flip(lambda size: size - 1),
    "truncated": _truncate,
    "over-long": _lengthen,
    "empty": _empty,
    "unreadable": _make_unreadable,
}


@pytest.fixture(scope="module")
def damaged(sidecar: EngineTestbed, plain: ReferenceEngine) -> dict[str, list[int]]:
    """One stored prompt per kind of damage, with all of its files damaged and RAM empty."""
    sidecar.set_faults()
    requests = sidecar.requests()
    prompts, files = {}, {}
    for number, kind in enumerate(DAMAGES):
        tokens = prompts[kind] = prompt(4 * CHUNK_TOKENS + 5, 200 + number)
        before = set(sidecar.files())
        assert requests.run(tokens) == plain.tokens(tokens)
        sidecar.settle_stores()
        files[kind] = set(sidecar.files()) - before
        assert len(files[kind]) == 4
    sidecar.restart_daemon(signal.SIGKILL)
    sidecar.wait_attached()
    # After the new daemon has scanned the directory: it counts on every one of them.
    for kind, damage in DAMAGES.items():
        for path in files[kind]:
            damage(path)
    return prompts


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_a_miss(
    sidecar: EngineTestbed, plain: ReferenceEngine, damaged: dict[str, list[int]], kind: str
) -> None:
    sidecar.empty_gpu_cache()
    failures = sidecar.tier_failures()
    with sidecar.loads() as loads:
        assert sidecar.requests().run(damaged[kind]) == plain.tokens(damaged[kind])
    assert loads.tokens == 0
    sidecar.wait_for(lambda: sidecar.tier_failures() > failures, "no failed read was counted")


def test_the_chunks_before_a_damaged_one_are_loaded(
    testbed: EngineTestbed, plain: ReferenceEngine
) -> None:
    requests = testbed.requests()
    tokens = prompt(8 * CHUNK_TOKENS + 5, 230)
    head = tokens[: 3 * CHUNK_TOKENS + 5]
    assert requests.run(head) == plain.tokens(head)
    testbed.settle_stores()
    before = set(testbed.files())
    assert requests.run(tokens) == plain.tokens(tokens)
    testbed.settle_stores()
    later = set(testbed.files()) - before
    assert len(later) == 5
    for path in later:
        _flip(lambda size: size - 1)(path)
    testbed.restart_daemon(signal.SIGKILL)
    testbed.wait_attached()
    testbed.empty_gpu_cache()
    with testbed.loads("disk") as loads:
        assert requests.run(tokens) == plain.tokens(tokens)
    assert loads.tokens == 3 * CHUNK_TOKENS


def test_a_damaged_file_is_stored_again(
    testbed: EngineTestbed, plain: ReferenceEngine, damaged: dict[str, list[int]]
) -> None:
    requests = testbed.requests()
    tokens = damaged["truncated"]
    testbed.empty_gpu_cache()
    assert requests.run(tokens) == plain.tokens(tokens)
    testbed.settle_stores()
    testbed.restart_daemon(signal.SIGKILL)
    testbed.wait_attached()
    testbed.empty_gpu_cache()
    with testbed.loads("disk") as loads:
        assert requests.run(tokens) == plain.tokens(tokens)
    assert loads.tokens == 4 * CHUNK_TOKENS


def test_another_models_objects_in_the_same_directory_are_not_used(
    testbed: EngineTestbed, plain: ReferenceEngine, payload: Path, scratch: Path
) -> None:
    tokens = prompt(6 * CHUNK_TOKENS + 5, 240)
    testbed.empty_gpu_cache()
    assert testbed.requests().run(tokens) == plain.tokens(tokens)
    testbed.settle_stores()
    [first_namespace] = [
        path for path in testbed.files_root.iterdir() if path.is_dir() and len(path.name) == 32
    ]

    other_model = write_llama(scratch / "other-model", seed=7)
    reference = start_reference_engine(other_model, payload, scratch / "other-plain.log")
    case = EngineTestbed(
        scratch / "other", other_model, payload, replace(testbed.tuning, daemon=Daemon.ENGINE)
    )
    case.files_root = testbed.files_root
    case.write_topology()
    try:
        expected = ReferenceEngine(reference.wait_ready()).tokens(tokens)
        reference.stop()
        assert expected != plain.tokens(tokens)
        case.start()
        case.wait_attached()
        with case.loads() as loads:
            assert case.requests().run(tokens) == expected
        assert loads.tokens == 0
        case.settle_stores()
        [other_namespace] = [
            path
            for path in testbed.files_root.iterdir()
            if path.is_dir() and len(path.name) == 32 and path != first_namespace
        ]
        # Even under the other's name an object is rejected, because its header has its own name.
        for path in other_namespace.rglob("*.kv"):
            shutil.copyfile(first_namespace / path.relative_to(other_namespace), path)
        case.kill_daemon()
        case.wait_attached()
        case.empty_gpu_cache()
        failures = case.tier_failures()
        with case.loads("disk") as loads:
            assert case.requests().run(tokens) == expected
        assert loads.tokens == 0
        case.wait_for(lambda: case.tier_failures() > failures, "no failed read was counted")
    finally:
        reference.kill()
        case.close()
