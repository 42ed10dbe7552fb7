"""Of pods without a policy the controller keeps outlines, and it reads them once they have one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from tests.support import controllers
from tests.support.memory_cluster import MemoryCluster, MemoryWatcher
from tests.support.pods import injected_pod
from tests.unit.controller.test_quota_messages import engine, node

from kvtier_operator.api.pods import decode_pod
from kvtier_operator.controller.children.observe import mounted_claims
from kvtier_operator.controller.controller import Controller, ControllerOptions
from kvtier_operator.controller.injection_breaker.insufficient_resources import (
    insufficient_resources,
)
from kvtier_operator.kube.resources import NAMESPACES, PODS, POLICIES, Kind, Object
from kvtier_operator.kube.trim import Outline, Outliner

LABELLED = {"metadata": {"name": "serving", "labels": {"kvtier.io/inject": "enabled"}}}


class CountingCluster(MemoryCluster):
    """Counts lists of pods."""

    pod_lists = 0

    async def list(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> Sequence[Object]:
        # The watcher lists without labels.
        self.pod_lists += kind is PODS and bool(labels)
        return await super().list(kind, namespace, labels=labels, fields=fields)


def pod(name: str, app: str, namespace: str = "serving") -> dict[str, Any]:
    container = {"name": "main", "image": "x", "args": ["--flag"]}
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": app}},
        "spec": {"nodeName": "n", "containers": [container]},
        "status": {"phase": "Running", "podIP": "10.0.0.1"},
    }


@contextlib.asynccontextmanager
async def running(cluster: MemoryCluster) -> AsyncIterator[Controller]:
    stop = asyncio.Event()
    controller = Controller(
        controllers.settings(),
        cluster,
        CollectorRegistry(),
        options=ControllerOptions(make_watcher=MemoryWatcher, pauses=controllers.QUICK_PAUSES),
    )
    task = asyncio.ensure_future(controller.run(stop))
    try:
        yield controller
    finally:
        stop.set()
        await task


async def until(what: str, check: Callable[[], bool]) -> None:
    async def checked() -> bool:
        return check()

    await controllers.until(what, checked, 60)


def whole(controller: Controller) -> set[str]:
    held = controller.cache.list(PODS)
    return {each["metadata"]["name"] for each in held if not isinstance(each, Outline)}


def selected(cluster: MemoryCluster) -> int:
    found = cluster.get_now(POLICIES, "serving", "chat") or {}
    return int(((found.get("status") or {}).get("pods") or {}).get("selected", -1))


def make(policy: bool) -> CountingCluster:
    cluster = CountingCluster([(NAMESPACES, LABELLED)])
    for number in range(3):
        cluster.put(PODS, pod(f"chat-{number}", "chat"))
        cluster.put(PODS, pod(f"web-{number}", "web"))
        cluster.put(PODS, pod(f"chat-{number}", "chat", "elsewhere"))
    if policy:
        cluster.put(POLICIES, controllers.policy("serving"))
    return cluster


def test_pods_become_whole_when_a_policy_selects_them_and_outlines_when_it_goes() -> None:
    async def scenario() -> None:
        cluster = make(policy=False)
        async with running(cluster) as controller:
            await controller.cache.wait_synced()
            assert whole(controller) == set()
            assert len(controller.cache.list(PODS)) == 9

            cluster.put(POLICIES, controllers.policy("serving"))
            await until("the status has the pods", lambda: selected(cluster) == 3)
            assert whole(controller) == {"chat-0", "chat-1", "chat-2"}
            held = controller.cache.get(PODS, "serving", "chat-0")
            assert held is not None
            assert held["spec"]["containers"][0]["args"] == ["--flag"]
            assert isinstance(controller.cache.get(PODS, "elsewhere", "chat-0"), Outline)
            assert cluster.pod_lists == 1

            cluster.put(PODS, pod("web-1", "chat"))
            await until("a pod with new labels counts", lambda: selected(cluster) == 4)
            assert cluster.pod_lists == 1

            cluster.remove(POLICIES, "serving", "chat")
            await until("all are outlines", lambda: whole(controller) == set())

    asyncio.run(scenario())


def test_after_a_start_the_pods_of_policies_are_whole_without_a_list_for_each() -> None:
    async def scenario() -> None:
        cluster = make(policy=True)
        async with running(cluster) as controller:
            await until("the status has the pods", lambda: selected(cluster) == 3)
            assert whole(controller) == {"chat-0", "chat-1", "chat-2"}
            assert cluster.pod_lists == 0

    asyncio.run(scenario())


def test_a_pod_that_is_gone_before_it_is_read_is_not_counted() -> None:
    async def scenario() -> None:
        cluster = make(policy=False)
        async with running(cluster) as controller:
            await controller.cache.wait_synced()
            lists = cluster.list

            async def without_one(kind: Kind, *given: Any, labels: str = "", **more: Any) -> Any:
                found = await lists(kind, *given, labels=labels, **more)
                hidden = kind is PODS and bool(labels)
                return [e for e in found if not hidden or e["metadata"]["name"] != "chat-0"]

            cluster.list = without_one  # type: ignore[method-assign]
            cluster.put(POLICIES, controllers.policy("serving"))
            await until("the status has the others", lambda: selected(cluster) == 2)

    asyncio.run(scenario())


def test_an_outline_says_what_its_pod_takes_of_nodes_and_claims() -> None:
    outliner = Outliner()
    other = engine("other", tiers="1Gi", overhead={"memory": "1Gi"})
    other["spec"] |= {"nodeName": "a", "resources": {"requests": {"cpu": "3"}}}
    other["spec"].setdefault("volumes", []).append(
        {"name": "kv", "persistentVolumeClaim": {"claimName": "kv"}}
    )
    waiting, nodes = decode_pod(engine(memory="20Gi", tiers="10Gi")), [node("a", "48Gi")]
    expected = insufficient_resources(waiting, nodes, [other])
    assert insufficient_resources(waiting, nodes, [outliner.outline(other)]) == expected
    assert mounted_claims([outliner.outline(other)]) == mounted_claims([other])
    ended = {**other, "status": {"phase": "Failed"}}
    assert mounted_claims([outliner.outline(ended)]) == frozenset()


def test_outlines_of_a_workload_share_what_is_equal_and_the_table_of_it_is_bounded() -> None:
    outliner = Outliner(max_shared=10)
    first, second = (outliner.outline(injected_pod(name)) for name in ("a", "b"))
    for key in ("spec", "status"):
        assert first[key] is second[key]
    assert first["metadata"]["labels"] is second["metadata"]["labels"]
    assert first["metadata"]["name"] == "a"
    for number in range(100):
        outliner.outline(pod("x", f"app-{number}"))
    assert len(outliner._shared) <= 10


def test_a_pod_without_labels_spec_or_status_has_an_outline() -> None:
    about = {"name": "a", "namespace": "n", "uid": "u", "resourceVersion": "1"}
    found = Outliner().outline({"metadata": about})
    assert found["metadata"] == {**about, "labels": {}}
