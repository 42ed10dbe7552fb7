"""Caches: what they hold after lists, changes, failures and answers of calls. Against an API server
in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.support.memory_cluster import MemoryCluster

from kvtier_operator.kube import trim
from kvtier_operator.kube.cache import Change, Pace, Watch, WatchedCache
from kvtier_operator.kube.client import Page
from kvtier_operator.kube.resources import (
    CONFIG_MAPS,
    LEADER_WORKER_SETS,
    NODES,
    SECRETS,
    ApiError,
    Kind,
)

QUICK = Pace(first_pause_seconds=0.001, last_pause_seconds=0.01, absent_seconds=0.01)


def config_map(name: str, namespace: str = "n", **data: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace}, "data": data}


def told(
    watches: list[Watch],
    story: Callable[[MemoryCluster, WatchedCache, list[tuple[str, Change]]], Awaitable[None]],
    cluster: MemoryCluster | None = None,
    source: Any = None,
) -> None:
    async def run() -> None:
        server = cluster or MemoryCluster()
        changes: list[tuple[str, Change]] = []
        cache = WatchedCache(
            source or server,
            watches,
            lambda kind, found, change: changes.append((found["metadata"]["name"], change)),
            pace=QUICK,
        )
        following = asyncio.ensure_future(cache.run())
        try:
            await asyncio.wait_for(cache.wait_synced(), 10)
            await story(server, cache, changes)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    asyncio.run(run())


async def until(check: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not check():  # noqa: ASYNC110  (what is waited for has no event)
            await asyncio.sleep(0.002)


def test_changes_are_followed_by_namespace_and_name() -> None:
    async def story(
        server: MemoryCluster, cache: WatchedCache, changes: list[tuple[str, Change]]
    ) -> None:
        server.put(CONFIG_MAPS, config_map("a"))
        server.put(CONFIG_MAPS, config_map("b", "other"))
        await until(lambda: len(cache.list(CONFIG_MAPS)) == 2)
        assert [each["metadata"]["name"] for each in cache.list(CONFIG_MAPS, "other")] == ["b"]
        assert cache.get(CONFIG_MAPS, "n", "b") is None
        server.remove(CONFIG_MAPS, "n", "a")
        await until(lambda: cache.get(CONFIG_MAPS, "n", "a") is None)
        assert cache.list(CONFIG_MAPS, "n") == []
        assert changes == [("a", Change.ADDED), ("b", Change.ADDED), ("a", Change.DELETED)]

    told([Watch(CONFIG_MAPS)], story)


def test_only_namespaces_that_are_watched_are_held() -> None:
    cluster = MemoryCluster(
        [(CONFIG_MAPS, config_map("a")), (CONFIG_MAPS, config_map("b", "other"))]
    )

    async def story(
        server: MemoryCluster, cache: WatchedCache, changes: list[tuple[str, Change]]
    ) -> None:
        assert [each["metadata"]["name"] for each in cache.list(CONFIG_MAPS)] == ["b"]

    told([Watch(CONFIG_MAPS, ("other", "third"))], story, cluster)


def test_cluster_wide_kinds_are_found_without_a_namespace() -> None:
    cluster = MemoryCluster([(NODES, {"metadata": {"name": "node"}})])

    async def story(
        server: MemoryCluster, cache: WatchedCache, changes: list[tuple[str, Change]]
    ) -> None:
        assert cache.get(NODES, None, "node") is not None
        assert len(cache.list(NODES)) == 1

    told([Watch(NODES)], story, cluster)


def test_what_a_call_answered_is_seen_at_once_and_never_outlives_its_deletion() -> None:
    async def story(
        server: MemoryCluster, cache: WatchedCache, changes: list[tuple[str, Change]]
    ) -> None:
        old = await server.apply(CONFIG_MAPS, config_map("a", x="1"))
        new = await server.apply(CONFIG_MAPS, config_map("a", x="2"))
        cache.note(CONFIG_MAPS, new)
        held = cache.get(CONFIG_MAPS, "n", "a")
        assert held is not None
        assert held["data"] == {"x": "2"}
        cache.note(CONFIG_MAPS, old)
        assert cache.get(CONFIG_MAPS, "n", "a") == held, "an older answer changes nothing"
        await until(lambda: ("a", Change.MODIFIED) in changes)
        server.remove(CONFIG_MAPS, "n", "a")
        await until(lambda: cache.get(CONFIG_MAPS, "n", "a") is None)
        cache.note(CONFIG_MAPS, new)
        assert cache.get(CONFIG_MAPS, "n", "a") is None, (
            "an answer that is older than the deletion brings nothing back"
        )

    told([Watch(CONFIG_MAPS)], story)


def test_of_a_kind_that_is_not_watched_the_last_answer_is_kept_until_it_is_forgotten() -> None:
    async def story(
        server: MemoryCluster, cache: WatchedCache, changes: list[tuple[str, Change]]
    ) -> None:
        cache.note(SECRETS, {"metadata": {"name": "s", "namespace": "n", "resourceVersion": "1"}})
        assert cache.get(SECRETS, "n", "s") is not None
        cache.forget(SECRETS, "n", "s")
        assert cache.get(SECRETS, "n", "s") is None

    told([Watch(CONFIG_MAPS)], story)


def test_a_kind_that_the_cluster_does_not_know_is_waited_for_without_holding_up_the_rest() -> None:
    class Unknown:
        """As a cluster whose definition comes later."""

        def __init__(self, cluster: MemoryCluster) -> None:
            self.cluster = cluster
            self.known = False

        async def page(self, kind: Kind, namespace: str | None = None, **options: Any) -> Page:
            if kind == LEADER_WORKER_SETS and not self.known:
                raise ApiError(404, "NotFound", "404 page not found")
            return await self.cluster.page(kind, namespace, **options)

        def watch(self, *arguments: Any, **options: Any) -> Any:
            return self.cluster.watch(*arguments, **options)

    cluster = MemoryCluster([(LEADER_WORKER_SETS, {"metadata": {"name": "set", "namespace": "n"}})])
    source = Unknown(cluster)

    async def story(
        server: MemoryCluster, cache: WatchedCache, changes: list[tuple[str, Change]]
    ) -> None:
        assert cache.synced()
        assert cache.list(LEADER_WORKER_SETS) == []
        source.known = True
        await until(lambda: cache.get(LEADER_WORKER_SETS, "n", "set") is not None)

    told([Watch(CONFIG_MAPS), Watch(LEADER_WORKER_SETS, optional=True)], story, cluster, source)


def test_a_kind_that_is_not_known_is_asked_for_soon_and_then_less_and_less() -> None:
    """A definition that is being installed is there a moment later, and its objects must not wait
    for a minute.
    """

    class Without:
        async def page(self, kind: Kind, namespace: str | None = None, **options: Any) -> Page:
            raise ApiError(404, "NotFound", "404 page not found")

        def watch(self, *arguments: Any, **options: Any) -> Any:
            raise AssertionError("nothing was listed")

    async def run() -> None:
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            await asyncio.sleep(0)

        watches = [Watch(LEADER_WORKER_SETS, optional=True)]
        cache = WatchedCache(Without(), watches, sleep=sleep, jitter=lambda: 0.5)
        following = asyncio.ensure_future(cache.run())
        await until(lambda: len(slept) >= 10)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        assert slept[:10] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]

    asyncio.run(run())


def test_a_cache_that_cannot_list_is_not_complete_and_says_why() -> None:
    class Refusing:
        async def page(self, kind: Kind, namespace: str | None = None, **options: Any) -> Page:
            raise ApiError(403, "Forbidden", "no right to list")

        def watch(self, *arguments: Any, **options: Any) -> Any:
            raise AssertionError("nothing was listed")

    async def run() -> None:
        restarts: list[str] = []
        cache = WatchedCache(
            Refusing(),
            [Watch(CONFIG_MAPS)],
            pace=QUICK,
            on_restart=lambda kind, reason: restarts.append(reason),
        )
        following = asyncio.ensure_future(cache.run())
        await until(lambda: len(restarts) >= 3)
        assert not cache.synced()
        assert "no right to list" in cache.problems()["configmaps"]
        assert restarts[:2] == ["Start", "Forbidden"]
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(run())


def test_pods_are_held_without_what_nobody_reads_and_equal_texts_once() -> None:
    def pod(name: str) -> dict[str, Any]:
        return {
            "metadata": {
                "name": name,
                "managedFields": [1],
                "annotations": {trim.LAST_APPLIED: "{}", "a": "long " * 9},
            },
            "spec": {
                "tolerations": [1],
                "containers": [
                    {
                        "name": "c",
                        "image": "i",
                        "env": [1],
                        "livenessProbe": {},
                        "volumeMounts": [2],
                    }
                ],
            },
            "status": {"phase": "Running", "podIPs": [1]},
        }

    first, second = trim.pod(pod("a")), trim.pod(pod("b"))
    assert first == {
        "metadata": {"name": "a", "annotations": {"a": "long " * 9}},
        "spec": {"containers": [{"name": "c", "image": "i", "volumeMounts": [2]}]},
        "status": {"phase": "Running"},
    }
    assert first["metadata"]["annotations"]["a"] is second["metadata"]["annotations"]["a"]
