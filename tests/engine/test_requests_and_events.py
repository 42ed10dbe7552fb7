"""What clients and routers see of a real engine: hints of requests, and KV events of the tiers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvtier.harness.engine_process import free_port
from kvtier.harness.engine_requests import ReferenceEngine
from kvtier.harness.engine_testbed import BLOCK_TOKENS, CHUNK_TOKENS, EngineOptions, EngineTestbed
from kvtier.harness.tiny_model import prompt

PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS
CHUNKS = 6
SUPPORT = Path(__file__).parent.parent / "support" / "replica.py"


class Router:
    """A subscriber that knows nothing of the engine but its events."""

    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self.held: dict[tuple[str, str | None], set[Any]] = {}
        self.stored: list[dict[str, Any]] = []
        self.removed: list[dict[str, Any]] = []

    def take(self) -> None:
        """Applies what has arrived."""
        while self._socket.poll(100):
            _, _, payload = self._socket.recv_multipart()
            for event in msgspec.msgpack.decode(payload)[1]:
                self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.held.clear()
            return
        blocks = self.held.setdefault((event["medium"], event.get("ownership")), set())
        if event["type"] == "BlockStored":
            self.stored.append(event)
            blocks.update(event["block_hashes"])
        else:
            self.removed.append(event)
            blocks.difference_update(event["block_hashes"])

    def blocks(self, medium: str, owner: str | None = None) -> set[Any]:
        return self.held.get((medium, owner), set())

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


@pytest.fixture(scope="module")
def served(model: Path, payload: Path, scratch: Path) -> Iterator[tuple[EngineTestbed, Router]]:
    # RAM for about 20 chunks, so that prompts displace one another.
    options = EngineOptions(memory_bytes=8 << 20)
    case = EngineTestbed(scratch / "requests", model, payload, options)
    port = free_port()
    router = Router(port)
    try:
        case.start(
            kvtier_hooks=[f"{SUPPORT}:install"],
            kv_events_config={
                "enable_kv_cache_events": True,
                "endpoint": f"tcp://*:{port}",
            },
        )
        case.wait_attached()
        # A subscriber sees what is published after its connection.
        case.wait_for(lambda: _is_heard(case, router), "the router hears nothing")
        yield case, router
    finally:
        router.close()
        case.close()


def _is_heard(case: EngineTestbed, router: Router) -> bool:
    """Whether what is published reaches the router. Each prompt has blocks of its own."""
    case.requests().run(prompt(2 * BLOCK_TOKENS, time.monotonic_ns() % (1 << 30)))
    router.take()
    return bool(router.stored)


def _agrees(case: EngineTestbed, router: Router) -> bool:
    """Whether the router knows of as many blocks as the engine's replica. vLLM publishes with its
    steps, and events are on their way for a while."""
    case.requests().run(prompt(BLOCK_TOKENS, 799))
    router.take()
    return all(
        len(router.blocks(*where)) == PER_CHUNK * len(_held_by_tierd(case, kind))
        for where, kind in ((("CPU",), "ram"), (("STORAGE", "disk"), "disk"))
    )


def _held_by_tierd(case: EngineTestbed, kind: str) -> set[Any]:
    """Of the chunks of the engine's replica, the hashes of the last blocks, by presence bit."""
    found: dict[str, list[Any]] = case.drive("call", function=f"{SUPPORT}:held")
    return set(found[kind])


def test_a_router_rebuilds_from_events_what_the_tiers_hold(
    served: tuple[EngineTestbed, Router], plain: ReferenceEngine
) -> None:
    case, router = served
    requests = case.requests()
    for seed in range(8):
        tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 700 + seed)
        assert requests.run(tokens) == plain.tokens(tokens)
    case.settle_stores()
    case.wait_for(lambda: _agrees(case, router), "the router and the replica differ")
    in_ram, in_files = router.blocks("CPU"), router.blocks("STORAGE", "disk")
    assert in_files >= _held_by_tierd(case, "disk")
    assert in_ram >= _held_by_tierd(case, "ram")
    assert 0 < len(in_ram) < len(in_files), "RAM has evicted"
    assert any(event["medium"] == "CPU" for event in router.removed)
    # The hashes are those of the engine's own events, so a router can join them.
    assert in_files <= {
        each
        for event in router.stored
        if event["medium"] == "GPU"
        for each in event["block_hashes"]
    }
    of_tiers = [event for event in router.stored if event["medium"] != "GPU"]
    assert {len(event["block_hashes"]) for event in of_tiers} == {PER_CHUNK}
    assert {event["block_size"] for event in of_tiers} == {BLOCK_TOKENS}
    assert all(len(event["token_ids"]) == CHUNK_TOKENS for event in of_tiers)
    # What left RAM and comes back is announced again.
    case.empty_gpu_cache()
    router.take()
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 700)
    with case.loads("disk") as loads:
        assert requests.run(tokens) == plain.tokens(tokens)
    assert loads.tokens > 0
    case.wait_for(lambda: _agrees(case, router), "the router and the replica differ")


def test_requests_decide_what_is_loaded_and_stored(
    served: tuple[EngineTestbed, Router], plain: ReferenceEngine
) -> None:
    case, _ = served
    requests = case.requests()
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 750)
    expected = plain.tokens(tokens)

    def loaded(**hints: Any) -> int:
        case.settle_stores()
        case.empty_gpu_cache()
        transfer = {f"kvtier.{name}": value for name, value in hints.items()}
        with case.loads() as loads:
            assert requests.run(tokens, transfer=transfer) == expected
        return loads.tokens

    assert loaded(skip_store=True) == 0
    assert loaded(skip_store=True) == 0, "nothing was stored"
    assert loaded() == 0
    assert loaded() == CHUNKS * CHUNK_TOKENS
    assert loaded(skip_load=True) == 0
    assert loaded(max_load_tokens=2 * CHUNK_TOKENS + 1) == 2 * CHUNK_TOKENS
    assert loaded(tiers=["ram"]) == CHUNKS * CHUNK_TOKENS
    assert loaded(tiers=["tape"]) == CHUNKS * CHUNK_TOKENS, "an invalid hint has no effect"
    rejected = case.engine_metrics()
    assert any(
        name.startswith("vllm:kvtier_rejected_hints_total")
        and "unknown_tier" in name
        and value == 1
        for name, value in rejected.items()
    )


def test_requests_decide_in_which_tiers_they_are_stored(
    served: tuple[EngineTestbed, Router], plain: ReferenceEngine
) -> None:
    case, _ = served
    requests = case.requests()
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 765)
    others = prompt(CHUNKS * CHUNK_TOKENS + 5, 766)

    def run(wanted: list[int], **hints: Any) -> tuple[int, int]:
        """How many tokens were loaded, and how many files there are more than before."""
        case.empty_gpu_cache()
        files = len(case.files())
        transfer = {f"kvtier.{name}": value for name, value in hints.items()}
        with case.loads() as loads:
            assert requests.run(wanted, transfer=transfer) == plain.tokens(wanted)
        case.settle_stores()
        return loads.tokens, len(case.files()) - files

    case.settle_stores()
    everything = CHUNKS * CHUNK_TOKENS
    assert run(tokens, tiers=["tape"]) == (0, 0), "stored, although the limit cannot be kept"
    assert run(tokens, tiers=["ram"]) == (0, 0), "a file was written"
    assert run(tokens, tiers=["ram"]) == (everything, 0), "nothing is in RAM"
    assert run(tokens, skip_store=True) == (everything, 0)
    # Who has no limit has it written.
    assert run(tokens) == (everything, CHUNKS)
    # Only in files: RAM is passed through.
    assert run(others, tiers=["disk"]) == (0, CHUNKS)
    case.wait_for(lambda: case.daemon_events("objects_passed_on") == CHUNKS, "still in RAM")
    with case.loads("disk") as loads:
        assert run(others)[0] == everything
    assert loads.tokens == everything


def test_a_prefix_is_in_ram_before_its_request_comes(
    served: tuple[EngineTestbed, Router], plain: ReferenceEngine
) -> None:
    case, _ = served
    requests = case.requests()
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 760)
    assert requests.run(tokens) == plain.tokens(tokens)
    for seed in range(6):
        requests.run(prompt(CHUNKS * CHUNK_TOKENS + 5, 770 + seed))
    case.settle_stores()
    case.empty_gpu_cache()
    before, in_ram = case.daemon_events("prefetch_reads"), _held_by_tierd(case, "ram")
    name = requests.add(tokens, transfer={"kvtier.prefetch": True})
    requests.abort(name)
    case.drive("step")
    case.wait_for(
        lambda: case.daemon_events("prefetch_reads") >= before + 2,
        "nothing is prefetched",
    )
    case.wait_for(
        lambda: case.drive("settle") and bool(_held_by_tierd(case, "ram") - in_ram),
        "the engine does not learn of it",
    )
    with case.loads("ram") as loads:
        assert requests.run(tokens) == plain.tokens(tokens)
    assert loads.tokens > 0
