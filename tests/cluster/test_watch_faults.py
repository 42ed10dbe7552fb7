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
from kvtier_operator.kube.lister import Change, Lister, Watch
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


class World:
    """A namespace, a proxy, and a lister that is filled through it."""

    def __init__(self, client: ApiClient, proxy: ApiProxy, namespace: str) -> None:
        self.client = client
        self.proxy = proxy
        self.namespace = namespace
        self.changes: list[tuple[str, Change]] = []
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
        def changed(kind: Kind, found: Any, change: Change) -> None:
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


def told(cluster: Any, home: Path, story: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        async with (
            connect(cluster.kubeconfig, cluster.context) as client,
            ApiProxy(cluster.kubeconfig, cluster.context, home) as proxy,
        ):
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"generateName": "watch-"}}
            namespace = str((await client.create(NAMESPACES, None, body))["metadata"]["name"])
            async with asyncio.timeout(2 * WAIT_SECONDS):
                await story(World(client, proxy, namespace))

    asyncio.run(run())


@pytest.mark.parametrize("left", [("kept",), ()], ids=["one left", "nothing left"])
def test_what_was_deleted_before_a_new_list_is_dropped(
    kubernetes_cluster: Any, tmp_path: Path, left: tuple[str, ...]
) -> None:
    """kopf reports nothing about them, and no event at all if nothing is left."""

    async def story(world: World) -> None:
        for name in (*left, "ghost", "phantom"):
            await world.make(name)
        async with world.running():
            await world.holds(*left, "ghost", "phantom")
            expire = asyncio.Event()
            rule = world.proxy.fail(world.watching, error_event(410, "Expired", expire))
            world.proxy.cut()
            await rule.struck.wait()
            await world.remove("ghost", "phantom")
            world.changes.clear()
            expire.set()
            await world.holds(*left)
            assert sorted(world.changes) == [("ghost", Change.DELETED), ("phantom", Change.DELETED)]
            await world.follows()

    told(kubernetes_cluster, tmp_path, story)


def test_an_object_made_again_under_its_name_is_another_one(
    kubernetes_cluster: Any, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        await world.make("same")
        async with world.running():
            await world.holds("same")
            expire = asyncio.Event()
            rule = world.proxy.fail(world.watching, error_event(410, "Expired", expire))
            world.proxy.cut()
            await rule.struck.wait()
            await world.remove("same")
            made = await world.make("same")
            world.changes.clear()
            expire.set()
            await until(lambda: len(world.changes) == 2, "two changes")
            assert world.changes == [("same", Change.DELETED), ("same", Change.ADDED)]
            held = world.lister.get(CONFIG_MAPS, world.namespace, "same")
            assert held is not None
            assert held["metadata"]["uid"] == made["metadata"]["uid"]

    told(kubernetes_cluster, tmp_path, story)


def test_a_watch_that_is_cut_or_silent_is_resumed_and_loses_nothing(
    kubernetes_cluster: Any, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        await world.make("a")
        pace = Pace(first_pause_seconds=0.05, last_pause_seconds=0.3, inactivity_seconds=1.0)
        async with world.running(pace=pace):
            await world.holds("a")
            lists = world.proxy.asked(world.listing)
            rule = world.proxy.fail(world.watching, silence())
            world.proxy.cut()
            await rule.struck.wait()
            await world.remove("a")
            await world.make("b")
            await world.holds("b")
            assert world.proxy.asked(world.listing) == lists

    told(kubernetes_cluster, tmp_path, story)


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
    """After several of these kopf stops all watches: it is asked again, or started again."""

    async def story(world: World) -> None:
        await world.make("a")
        await world.make("ghost")
        async with world.running():
            await world.holds("a", "ghost")
            held = asyncio.Event()
            # The object is deleted while the watch is down. If the list is to fail, a list comes
            # first.
            away = world.proxy.fail(world.watching, error_event(410, "Expired", held))
            world.proxy.cut()
            await away.struck.wait()
            await world.remove("ghost")
            bad = world.proxy.fail(world.listing if on_list else world.watching, fault)
            held.set()
            await bad.struck.wait()
            await world.holds("a")
            await world.follows()
            assert not world.lister.problems()

    told(kubernetes_cluster, tmp_path, story)


def test_a_page_whose_snapshot_has_expired_is_followed_by_a_new_list(
    kubernetes_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kopf_thread, "CHUNK_OBJECTS", 2)

    async def story(world: World) -> None:
        names = [f"c{number}" for number in range(5)]
        for name in names:
            await world.make(name)

        def next_page(request: Request) -> bool:
            return world.at(request) and "continue" in request.query

        rule = world.proxy.fail(next_page, api_proxy.status(410, "Expired"))
        async with world.running():
            assert rule.struck.is_set()
            await world.holds(*names)
            await world.follows()

    told(kubernetes_cluster, tmp_path, story)


def test_requests_that_are_refused_for_long_are_repeated_and_reported(
    kubernetes_cluster: Any, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        await world.make("a")
        async with world.running():
            refused = world.proxy.fail(world.watching, api_proxy.status(403, "Forbidden"), times=8)
            world.proxy.cut()
            await until(lambda: refused.count == 8, "eight requests")
            await world.follows()
            assert "Forbidden" in world.restarts
            assert "Stopped" not in world.restarts

    told(kubernetes_cluster, tmp_path, story)


def test_kopf_writes_nothing_and_leaves_the_finalizers_of_other_operators(
    kubernetes_cluster: Any, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        finalizer = kopf.OperatorSettings().persistence.finalizer
        made = await world.make("theirs", finalizers=[finalizer])
        async with world.running():
            await world.holds("theirs")
            await world.make("theirs", finalizers=[finalizer], annotations={"changed": "yes"})
            await until(
                lambda: (
                    world.lister.get(CONFIG_MAPS, world.namespace, "theirs")["metadata"].get(
                        "annotations"
                    )  # type: ignore[index]
                    == {"changed": "yes"}
                )
            )
            await asyncio.sleep(1.0)
            found = await world.client.get(CONFIG_MAPS, world.namespace, "theirs")
            assert found["metadata"]["finalizers"] == [finalizer]
            assert found["metadata"]["uid"] == made["metadata"]["uid"]
            managers = {each["manager"] for each in found["metadata"]["managedFields"]}
            assert len(managers) == 1
        assert {each.method for each in world.proxy.requests} == {"GET"}
        await world.client.patch(
            CONFIG_MAPS, world.namespace, "theirs", {"metadata": {"finalizers": None}}
        )

    told(kubernetes_cluster, tmp_path, story)


def test_a_kopf_that_does_not_return_is_left_and_started_again(
    kubernetes_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(tasks: Any, *, ignored: Any) -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    monkeypatch.setattr(kopf, "run_tasks", never)

    async def story(world: World) -> None:
        await world.make("a")
        async with world.running():
            await world.holds("a")
            world.proxy.fail(world.watching, error_event(500))
            world.proxy.cut()
            await until(lambda: "Stopped" in world.restarts, "kopf stopped")
            await world.follows()
            began = time.monotonic()
        assert time.monotonic() - began < 3.0

    told(kubernetes_cluster, tmp_path, story)


def test_an_object_that_matches_the_selector_again_is_held_again(
    kubernetes_cluster: Any, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        await world.make("a")
        async with world.running():
            await world.holds("a")
            await world.make("a", labels={"test": "no"})
            await world.holds()
            await world.make("a")
            await world.holds("a")

    told(kubernetes_cluster, tmp_path, story)


def test_an_answer_of_a_call_is_seen_at_once_and_does_not_outlive_the_object(
    kubernetes_cluster: Any, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        async with world.running():
            made = await world.make("a")
            world.lister.note(CONFIG_MAPS, made)
            assert world.names() == {"a"}
            await until(lambda: any(name == "a" for name, _ in world.changes), "it is told")
            await world.remove("a")
            await world.holds()
            world.lister.note(CONFIG_MAPS, made)
            assert world.names() == set()

    told(kubernetes_cluster, tmp_path, story)


def test_a_kind_is_watched_once_its_definition_is_there_and_no_longer_when_it_goes(
    kubernetes_cluster: Any, tmp_path: Path
) -> None:
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

    async def story(world: World) -> None:
        async def make_set() -> None:
            body = {"apiVersion": kind.api_version, "kind": kind.kind}
            body["metadata"] = {"name": "set", "namespace": world.namespace}  # type: ignore[assignment]
            await world.client.apply(kind, body)

        def held() -> int:
            return len(world.lister.list(kind, world.namespace))

        watches = [world.watch(), Watch(NODES), Watch(kind, (world.namespace,), optional=True)]
        async with world.running(watches):
            assert world.lister.synced()
            for _ in range(2):
                await world.client.apply(DEFINITIONS, definition)
                with contextlib.suppress(Exception):
                    await make_set()
                deadline = time.monotonic() + WAIT_SECONDS
                while not held():
                    assert time.monotonic() < deadline
                    with contextlib.suppress(Exception):
                        await make_set()
                    await asyncio.sleep(0.1)
                found = await world.client.get(DEFINITIONS, None, definition["metadata"]["name"])  # type: ignore[index]
                name, uid = found["metadata"]["name"], found["metadata"]["uid"]
                await world.client.delete(DEFINITIONS, None, name, uid=uid)
                await until(lambda: not held(), "its objects are gone")
                await world.follows()

    told(kubernetes_cluster, tmp_path, story)
