"""A file tier on storage that hangs in uninterruptible I/O, with the real vLLM in a pod."""

from __future__ import annotations

import importlib.util
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from nodes import ok, wait_for
from serving import EnginePod, ask, container_status, engine_deployment
from stub_engine_pods import STORAGE_GID

from kvtier.harness.tiny_model import TinyLlama, prompt, write_llama
from kvtier.scorecard.mount import FaultyMount, faulty_mount, unavailable

pytest.importorskip(
    "helm_python", reason="charts are installed by Helm's own code: helm-python-sdk"
)
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vllm is not installed: install the extra `engine`",
    ),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
    pytest.mark.engine,
]

NAMESPACE, POLICY, APP = "frozen", "tiers", "chat"
CHUNK_TOKENS, CHUNKS = 128, 6
NEW_TOKENS = 4
FIRST_CLOCK_SECONDS, CLOCK_SECONDS, OTHER_CLOCK_SECONDS = 3, 6, 2
"""The deadline at the start, the one applied before the storage hangs, and while it hangs."""
SLACK_SECONDS = 3.0
"""Computing a prompt, and a machine that does much else."""
OTHERS = 10
"""Prompts that push the first two out of RAM, which has room for 32 chunks."""
POD_GONE_SECONDS = 60


def policy(directory: Path, clock_seconds: int) -> dict[str, Any]:
    """RAM for five prompts, and the directory. The breaker stays closed: an open
    one would avoid the wait that is measured here.
    """
    volume = {"hostPath": {"path": str(directory)}}
    disk = {"capacity": "1Gi", "minFree": "0", "sharing": "Node", "volume": volume}
    return {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierPolicy",
        "metadata": {"name": POLICY},
        "spec": {
            "podSelector": {"matchLabels": {"app": APP}},
            "chunkTokens": CHUNK_TOKENS,
            "minLoadTokens": CHUNK_TOKENS,
            "selection": "Weighted",
            "security": {"storageGid": STORAGE_GID},
            "breaker": {"failureThreshold": 1000, "periodSeconds": 60},
            "resources": {"daemon": {"requests": {"cpu": "100m"}, "limits": {"cpu": "2"}}},
            "tiers": [
                {"name": "ram", "memory": {"capacity": "8Mi"}},
                {"name": "disk", "loadTimeoutSeconds": clock_seconds, "fileSystem": disk},
            ],
        },
    }


def tokens_of(number: int) -> list[int]:
    """A prompt of six whole chunks and less than a block, like no other."""
    return prompt(CHUNKS * CHUNK_TOKENS + 17, 100 + number, TinyLlama().vocabulary)


@dataclass(slots=True)
class Frozen:
    """What was seen, in order."""

    expected: dict[int, tuple[int, ...]] = field(default_factory=dict)
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    hit_seconds: float = 0.0
    hit_seconds_after_change: float = 0.0
    other_seconds: list[float] = field(default_factory=list)
    live_change: bool = False
    container_end_seconds: float = 0.0
    conditions: str = ""
    event: str = ""
    still_there_before_thaw: bool = False
    gone_after_thaw_seconds: float = 0.0


@pytest.fixture(scope="module")
def frozen(operator_on_node: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frozen]:
    """Everything that takes an engine to find out, with one start of it."""
    home = operator_on_node.storage / "frozen"
    model = write_llama(tmp_path_factory.mktemp("model") / "model", seed=0)
    with faulty_mount(home, others=True) as storage:
        os.chown(storage.path, 0, STORAGE_GID)
        storage.path.chmod(0o2770)
        with operator_on_node.namespace(NAMESPACE) as place:
            try:
                yield _watch(operator_on_node, place, storage, model)
            finally:
                # Before the namespace goes: its pod cannot go while the storage hangs.
                storage.release()


def _watch(installed: Any, place: Any, storage: FaultyMount, model: Path) -> Frozen:
    seen = Frozen()
    pod = EnginePod(installed.cluster, installed.api, NAMESPACE, APP, model)
    place.apply_policy(policy(storage.path, FIRST_CLOCK_SECONDS))
    place.apply(engine_deployment(model, APP))
    pod.wait_ready()
    wait_for("engine and tierd came together", lambda: pod.attached(POLICY), 60)
    client = pod.client()
    for number in range(OTHERS + 2):
        seen.expected[number], _, _ = ask(client, tokens_of(number), NEW_TOKENS)
    wait_for("all lies in the file tier", lambda: _stored(pod, (OTHERS + 2) * CHUNKS), 60)
    client.reset_prefix_cache()
    started = pod.now()["metadata"]["uid"]
    _retune(place, pod, storage, CLOCK_SECONDS)
    storage.hang()

    hit = threading.Thread(target=lambda: _hit(pod, seen))
    hit.start()
    start = time.monotonic()
    while hit.is_alive() and time.monotonic() - start < 60:
        # One that is new, and one that lies in RAM.
        for number in (1000 + len(seen.other_seconds), OTHERS + 1):
            seen.other_seconds.append(
                client.complete(tokens_of(number), NEW_TOKENS).first_token_seconds
            )
    hit.join(60)

    _retune(place, pod, storage, OTHER_CLOCK_SECONDS)
    seen.live_change = pod.now()["metadata"]["uid"] == started
    seen.answers[1], _, seen.hit_seconds_after_change = ask(client, tokens_of(1), NEW_TOKENS)
    _end_container(installed, pod, seen)
    _delete_pod(installed, place, pod, storage, seen)
    print(
        {
            name: value
            for name, value in asdict(seen).items()
            if name not in ("expected", "answers", "conditions")
        }
    )
    return seen


def _retune(place: Any, pod: EnginePod, storage: FaultyMount, clock_seconds: int) -> None:
    """Another time limit for the engine that runs."""
    generation = pod.status(POLICY)["appliedGeneration"]
    place.apply(policy(storage.path, clock_seconds))
    wait_for("tierd follows", lambda: pod.status(POLICY)["appliedGeneration"] > generation, 150)


def _hit(pod: EnginePod, seen: Frozen) -> None:
    answer = pod.client().complete(tokens_of(0), NEW_TOKENS)
    seen.answers[0], seen.hit_seconds = answer.tokens, answer.first_token_seconds


def _stored(pod: EnginePod, objects: int) -> bool:
    status = pod.status(POLICY)
    disk = next(tier for tier in status["tiers"] if tier["name"] == "disk")
    return bool(disk["objects"] >= objects and status["pendingStores"] == 0)


def _end_container(installed: Any, pod: EnginePod, seen: Frozen) -> None:
    """SIGTERM to the engine's first process, as a kubelet that stops the container sends it."""
    identifier = container_status(pod.now(), "vllm")["containerID"].removeprefix("containerd://")
    start = time.monotonic()
    installed.cluster.ctr("task", "kill", "--signal", "SIGTERM", identifier)
    wait_for(
        "the engine's container ends",
        lambda: (
            container_status(pod.now(), "vllm")["restartCount"] == 1
            or "terminated" in container_status(pod.now(), "vllm")["state"]
        ),
        120,
    )
    seen.container_end_seconds = time.monotonic() - start


def _delete_pod(
    installed: Any, place: Any, pod: EnginePod, storage: FaultyMount, seen: Frozen
) -> None:
    # No replacement: it would have no storage that answers either.
    name = pod.now()["metadata"]["name"]
    installed.cluster.kubectl("-n", NAMESPACE, "scale", "deployment", APP, "--replicas=0")
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}"
    found = wait_for(
        "the policy tells of the pod", lambda: place.events("StuckTerminating"), 180, period=1
    )
    seen.event = found[0]["message"]
    seen.conditions = json.dumps(place.policy()["status"]["conditions"])
    seen.still_there_before_thaw = installed.api.request("GET", path)[0] == 200
    ok(installed.api.request("GET", path))
    storage.release()
    start = time.monotonic()
    wait_for("the pod goes", lambda: installed.api.request("GET", path)[0] == 404, 120)
    seen.gone_after_thaw_seconds = time.monotonic() - start


def test_a_request_with_a_hit_in_hanging_storage_waits_at_most_its_deadline(frozen: Frozen) -> None:
    assert frozen.hit_seconds < CLOCK_SECONDS + SLACK_SECONDS
    assert frozen.answers[0] == frozen.expected[0]


def test_the_deadline_that_was_applied_to_the_running_engine_is_used(frozen: Frozen) -> None:
    assert frozen.live_change
    assert frozen.hit_seconds > (FIRST_CLOCK_SECONDS + CLOCK_SECONDS) / 2


def test_a_later_hit_waits_at_most_the_deadline_applied_since(
    frozen: Frozen,
) -> None:
    assert frozen.live_change
    assert frozen.hit_seconds_after_change < OTHER_CLOCK_SECONDS + SLACK_SECONDS
    assert frozen.answers[1] == frozen.expected[1]


def test_no_other_request_is_delayed(frozen: Frozen) -> None:
    assert len(frozen.other_seconds) >= 2
    assert max(frozen.other_seconds) < SLACK_SECONDS


def test_the_engines_container_terminates_normally(frozen: Frozen) -> None:
    assert frozen.container_end_seconds < 30


def test_the_pod_stays_until_the_storage_recovers_and_is_reported_as_overdue(
    frozen: Frozen,
) -> None:
    assert frozen.still_there_before_thaw
    for word in ("node-1", "frozen", "tier disk"):
        assert word in frozen.event
    assert "StuckTerminating" in frozen.conditions
    assert frozen.gone_after_thaw_seconds < POD_GONE_SECONDS
