"""The watcher and lister with a faulty API server: no object is lost, no deleted one stays."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import api_proxy
import kopf
import pytest
from api_proxy import ApiProxy, Request, error_event, silence

from kvtier_operator.kube import kopf_thread
from kvtier_operator.kube.client import ApiClient, connect
from kvtier_operator.kube.kopf_thread import Pace
from kvtier_operator.kube.lister import ChangeType, Lister, Watch
from kvtier_operator.kube.resources import CONFIG_MAPS, LEADER_WORKER_SETS, NODES, Kind
from kvtier_operator.kube.watcher import Watcher

QUICK = Pace(
    first_pause_seconds=0.05, last_pause_seconds=0.3, restart_seconds=0.3, absent_seconds=0.5
)
DEFINITIONS = Kind(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False
)
NAMESPACES = Kind("", "v1", "namespaces", "Namespace", False)
WAIT_SECONDS = 30.0


class WatchTestbed:
    """A namespace, a proxy, and a lister that is filled through it."""

    def __init__(self, client: ApiClient, proxy: ApiProxy, namespace: str) -> None:
        self.client = client
        self.proxy = proxy
        self.namespace = namespace
        self.changes: list[tuple[str, ChangeType]] = []
        self.restarts: list[str] = []
        self.lister = Lister([])
        self.watcher: Watcher | None = None

    def watch(self, **options: Any) -> Watch:
        return Watch(CONFIG_MAPS, (self.namespace,), labels="test=yes", **options)

    def at(self, request: Request) -> bool:
        return request.path == CONFIG_MAPS.path(self.namespace)

    def watching(self, request: Request) -> bool:
        return self.at(request) and request.watches

    def listing(self, request: Request) -> bool:
        """A list of kopf; the lists of identities ask for more objects at a time."""
        return self.at(request) and not request.watches and request.query.get("limit") != "500"

    async def make(self, name: str, labels: dict[str, str] | None = None, **metadata: Any) -> Any:
        about = {
            "name": name,
            "namespace": self.namespace,
            "labels": labels or {"test": "yes"},
            **metadata,
        }
        return await self.client.apply(
            CONFIG_MAPS, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about}
        )

    async def remove(self, *names: str) -> None:
        for name in names:
            found = await self.client.get(CONFIG_MAPS, self.namespace, name)
            await self.client.delete(
                CONFIG_MAPS, self.namespace, name, uid=found["metadata"]["uid"]
            )

    def names(self) -> set[str]:
        return {each["metadata"]["name"] for each in self.lister.list(CONFIG_MAPS, self.namespace)}

    async def holds(self, *names: str) -> None:
        await until(lambda: self.names() == set(names), f"{names}, not {self.names()}")

    async def follows(self) -> None:
        """The watch delivers again."""
        before = self.names()
        await self.make("later")
        await self.holds(*before, "later")
        await self.remove("later")
        await self.holds(*before)

    @contextlib.asynccontextmanager
    async def running(
        self, watches: Iterable[Watch] | None = None, pace: Pace = QUICK
    ) -> AsyncIterator[Watcher]:
        def changed(kind: Kind, found: Any, change: ChangeType) -> None:
            self.changes.append((found["metadata"]["name"], change))

        self.lister = Lister([self.watch()] if watches is None else watches, changed)
        async with connect(self.proxy.kubeconfig) as reader:
            watcher = Watcher(
                reader,
                self.lister,
                pace=pace,
                on_restart=lambda kind, reason: self.restarts.append(reason),
            )
            following = asyncio.ensure_future(watcher.run())
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    await self.lister.wait_synced()
                yield watcher
                if following.done():
                    following.result()
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)


async def until(check: Callable[[], Any], what: str = "", seconds: float = WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, f"not in {seconds} s: {what}"
        await asyncio.sleep(0.01)


def run_scenario(
    cluster: Any, home: Path, scenario: Callable[[WatchTestbed], Awaitable[None]]
) -> None:
    async def run() -> None:
        async with (
            connect(cluster.kubeconfig, cluster.context) as client,
            ApiProxy(cluster.kubeconfig, cluster.context, home) as proxy,
        ):
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"generateName": "watch-"}}
            namespace = str((await client.create(NAMESPACES, None, body))["metadata"]["name"])
            async with asyncio.timeout(2 * WAIT_SECONDS):
                await scenario(WatchTestbed(client, proxy, namespace))

    asyncio.run(run())


@pytest.mark.parametrize("left", [("kept",), ()], ids=["one left", "nothing left"])
def test_objects_deleted_before_a_relist_are_dropped(
    kubernetes_cluster: Any, tmp_path: Path, left: tuple[str, ...]
) -> None:
    """kopf reports nothing about them, and no event at all if nothing is left."""

    async def scenario(testbed: WatchTestbed) -> None:
        for name in (*left, "ghost", "phantom"):
            await testbed.make(name)
        async with testbed.running():
            await testbed.holds(*left, "ghost", "phantom")
            expire = asyncio.Event()
            rule = testbed.proxy.fail(testbed.watching, error_event(410, "Expired", expire))
            testbed.proxy.cut()
            await rule.struck.wait()
            await testbed.remove("ghost", "phantom")
            testbed.changes.clear()
            expire.set()
            await testbed.holds(*left)
            assert sorted(testbed.changes) == [
                ("ghost", ChangeType.DELETED),
                ("phantom", ChangeType.DELETED),
            ]
            await testbed.follows()

    run_scenario(kubernetes_cluster, tmp_path, scenario)


def test_a_recreated_object_of_the_same_name_is_a_different_object(
    kubernetes_cluster: Any, tmp_path: Path
) -> None:
    async def scenario(testbed: WatchTestbed) -> None:
        await testbed.make("same")
        async with testbed.running():
            await testbed.holds("same")
            expire = asyncio.Event()
            rule = testbed.proxy.fail(testbed.watching, error_event(410, "Expired", expire))
            testbed.proxy.cut()
            await rule.struck.wait()
            await testbed.remove("same")
            made = await testbed.make("same")
            testbed.changes.clear()
            expire.set()
            await until(lambda: len(testbed.changes) == 2, "two changes")
            assert testbed.changes == [("same", ChangeType.DELETED), ("same", ChangeType.ADDED)]
            held = testbed.lister.get(CONFIG_MAPS, testbed.namespace, "same")
            assert held is not None
            assert held["metadata"]["uid"] == made["metadata"]["uid"]

    run_scenario(kubernetes_cluster, tmp_path, scenario)


def test_a_disconnected_or_silent_watch_is_resumed_without_loss(
    kubernetes_cluster: Any, tmp_path: Path
) -> None:
    async def scenario(testbed: WatchTestbed) -> None:
        await testbed.make("a")
        pace = Pace(first_pause_seconds=0.05, last_pause_seconds=0.3, inactivity_seconds=1.0)
        async with testbed.running(pace=pace):
            await testbed.holds("a")
            lists = testbed.proxy.request_count(testbed.listing)
            rule = testbed.proxy.fail(testbed.watching, silence())
            testbed.proxy.cut()
            await rule.struck.wait()
            await testbed.remove("a")
            await testbed.make("b")
            await testbed.holds("b")
            assert testbed.proxy.request_count(testbed.listing) == lists

    run_scenario(kubernetes_cluster, tmp_path, scenario)


@pytest.mark.parametrize(
    ("fault", "on_list"),
    [
        (error_event(500, "InternalError"), False),
        (api_proxy.status(410, "Expired"), False),
        (api_proxy.status(400, "BadRequest"), False),
        (api_proxy.status(401, "Unauthorized"), False),
        (api_proxy.status(401, "Unauthorized"), True),
        (api_proxy.status(403, "Forbidden"), False),
        (api_proxy.status(404, "NotFound"), False),
        (api_proxy.status(404, "NotFound"), True),
        (api_proxy.status(429, "TooManyRequests", **{"Retry-After": "1"}), False),
        (api_proxy.status(503, "ServiceUnavailable"), True),
    ],
    ids=lambda value: "" if callable(value) else "list" if value else "watch",
)
def test_no_single_bad_response_ends_the_watch(
    kubernetes_cluster: Any, tmp_path: Path, fault: api_proxy.Fault, on_list: bool
) -> None:
    """After several of these kopf stops all watches: it is called again or restarted."""

    async def scenario(testbed: WatchTestbed) -> None:
        await testbed.make("a")
        await testbed.make("ghost")
        async with testbed.running():
            await testbed.holds("a", "ghost")
            held = asyncio.Event()
            # The object is deleted while the watch is down. If the list is to fail, a list comes
            # first.
            away = testbed.proxy.fail(testbed.watching, error_event(410, "Expired", held))
            testbed.proxy.cut()
            await away.struck.wait()
            await testbed.remove("ghost")
            bad = testbed.proxy.fail(testbed.listing if on_list else testbed.watching, fault)
            held.set()
            await bad.struck.wait()
            await testbed.holds("a")
            await testbed.follows()
            assert not testbed.lister.problems()

    run_scenario(kubernetes_cluster, tmp_path, scenario)


def test_an_expired_page_token_restarts_the_list(
    kubernetes_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kopf_thread, "CHUNK_OBJECTS", 2)

    async def scenario(testbed: WatchTestbed) -> None:
        names = [f"c{number}" for number in range(5)]
        for name in names:
            await testbed.make(name)

        def next_page(request: Request) -> bool:
            return testbed.at(request) and "continue" in request.query

        rule = testbed.proxy.fail(next_page, api_proxy.status(410, "Expired"))
        async with testbed.running():
            assert rule.struck.is_set()
            await testbed.holds(*names)
            await testbed.follows()

    run_scenario(kubernetes_cluster, tmp_path, scenario)


def test_requests_that_are_rejected_for_long_are_retried_and_reported(
    kubernetes_cluster: Any, tmp_path: Path
) -> None:
    async def scenario(testbed: WatchTestbed) -> None:
        await testbed.make("a")
        async with testbed.running():
            refused = testbed.proxy.fail(
                testbed.watching, api_proxy.status(403, "Forbidden"), times=8
            )
            testbed.proxy.cut()
            await until(lambda: refused.count == 8, "eight requests")
            await testbed.follows()
            assert "Forbidden" in testbed.restarts
            assert "Stopped" not in testbed.restarts

    run_scenario(kubernetes_cluster, tmp_path, scenario)


def test_kopf_writes_nothing_and_leaves_the_finalizers_of_other_operators(
    kubernetes_cluster: Any, tmp_path: Path
) -> None:
    async def scenario(testbed: WatchTestbed) -> None:
        finalizer = kopf.OperatorSettings().persistence.finalizer
        made = await testbed.make("theirs", finalizers=[finalizer])
        async with testbed.running():
            await testbed.holds("theirs")
            await testbed.make("theirs", finalizers=[finalizer], annotations={"changed": "yes"})
            await until(
                lambda: (
                    testbed.lister.get(CONFIG_MAPS, testbed.namespace, "theirs")["metadata"].get(
                        "annotations"
                    )  # type: ignore[index]
                    == {"changed": "yes"}
                )
            )
            await asyncio.sleep(1.0)
            found = await testbed.client.get(CONFIG_MAPS, testbed.namespace, "theirs")
            assert found["metadata"]["finalizers"] == [finalizer]
            assert found["metadata"]["uid"] == made["metadata"]["uid"]
            managers = {each["manager"] for each in found["metadata"]["managedFields"]}
            assert len(managers) == 1
        assert {each.method for each in testbed.proxy.requests} == {"GET"}
        await testbed.client.patch(
            CONFIG_MAPS, testbed.namespace, "theirs", {"metadata": {"finalizers": None}}
        )

    run_scenario(kubernetes_cluster, tmp_path, scenario)


def test_a_kopf_thread_that_does_not_return_is_abandoned_and_restarted(
    kubernetes_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(tasks: Any, *, ignored: Any) -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    monkeypatch.setattr(kopf, "run_tasks", never)

    async def scenario(testbed: WatchTestbed) -> None:
        await testbed.make("a")
        async with testbed.running():
            await testbed.holds("a")
            testbed.proxy.fail(testbed.watching, error_event(500))
            testbed.proxy.cut()
            await until(lambda: "Stopped" in testbed.restarts, "kopf stopped")
            await testbed.follows()
            began = time.monotonic()
        assert time.monotonic() - began < 3.0

    run_scenario(kubernetes_cluster, tmp_path, scenario)


def test_an_object_that_matches_the_selector_again_is_cached_again(
    kubernetes_cluster: Any, tmp_path: Path
) -> None:
    async def scenario(testbed: WatchTestbed) -> None:
        await testbed.make("a")
        async with testbed.running():
            await testbed.holds("a")
            await testbed.make("a", labels={"test": "no"})
            await testbed.holds()
            await testbed.make("a")
            await testbed.holds("a")

    run_scenario(kubernetes_cluster, tmp_path, scenario)


def test_a_write_is_visible_at_once_and_does_not_outlive_the_object(
    kubernetes_cluster: Any, tmp_path: Path
) -> None:
    async def scenario(testbed: WatchTestbed) -> None:
        async with testbed.running():
            made = await testbed.make("a")
            testbed.lister.note(CONFIG_MAPS, made)
            assert testbed.names() == {"a"}
            await until(
                lambda: any(name == "a" for name, _ in testbed.changes), "the change is announced"
            )
            await testbed.remove("a")
            await testbed.holds()
            testbed.lister.note(CONFIG_MAPS, made)
            assert testbed.names() == set()

    run_scenario(kubernetes_cluster, tmp_path, scenario)


def test_a_kind_is_watched_while_its_crd_exists(kubernetes_cluster: Any, tmp_path: Path) -> None:
    kind = LEADER_WORKER_SETS
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{kind.group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": kind.group,
            "scope": "Namespaced",
            "names": {"plural": kind.plural, "kind": kind.kind, "singular": "leaderworkerset"},
            "versions": [
                {
                    "name": kind.version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }

    async def scenario(testbed: WatchTestbed) -> None:
        async def make_set() -> None:
            body = {"apiVersion": kind.api_version, "kind": kind.kind}
            body["metadata"] = {"name": "set", "namespace": testbed.namespace}  # type: ignore[assignment]
            await testbed.client.apply(kind, body)

        def held() -> int:
            return len(testbed.lister.list(kind, testbed.namespace))

        watches = [testbed.watch(), Watch(NODES), Watch(kind, (testbed.namespace,), optional=True)]
        async with testbed.running(watches):
            assert testbed.lister.synced()
            for _ in range(2):
                await testbed.client.apply(DEFINITIONS, definition)
                with contextlib.suppress(Exception):
                    await make_set()
                deadline = time.monotonic() + WAIT_SECONDS
                while not held():
                    assert time.monotonic() < deadline
                    with contextlib.suppress(Exception):
                        await make_set()
                    await asyncio.sleep(0.1)
                found = await testbed.client.get(DEFINITIONS, None, definition["metadata"]["name"])  # type: ignore[index]
                name, uid = found["metadata"]["name"], found["metadata"]["uid"]
                await testbed.client.delete(DEFINITIONS, None, name, uid=uid)
                await until(lambda: not held(), "its objects are gone")
                await testbed.follows()

    run_scenario(kubernetes_cluster, tmp_path, scenario)
