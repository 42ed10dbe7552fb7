"""The lister: what it holds after events, lists and answers of calls, in any order."""

from __future__ import annotations

from typing import Any

from kvtier_operator.kube import trim
from kvtier_operator.kube.lister import ChangeType, Lister, Watch
from kvtier_operator.kube.resources import CONFIG_MAPS, LEADER_WORKER_SETS, NODES, SECRETS


def config_map(name: str, version: int, uid: str = "", namespace: str = "n") -> dict[str, Any]:
    about = {"name": name, "namespace": namespace, "uid": uid or f"uid-{name}"}
    return {"metadata": {**about, "resourceVersion": str(version)}, "data": {"v": str(version)}}


class World:
    """A lister, its clock, and what it told."""

    def __init__(self, *watches: Watch) -> None:
        self.now = 0.0
        self.changes: list[tuple[str, ChangeType]] = []
        self.lister = Lister(
            watches or (Watch(CONFIG_MAPS),),
            lambda kind, found, change: self.changes.append((found["metadata"]["name"], change)),
            lambda: self.now,
        )

    def data(self, name: str, namespace: str = "n") -> str | None:
        found = self.lister.get(CONFIG_MAPS, namespace, name)
        return None if found is None else found["data"]["v"]


def test_objects_are_held_by_namespace_and_name() -> None:
    world = World()
    world.lister.put(CONFIG_MAPS, config_map("a", 1))
    world.lister.put(CONFIG_MAPS, config_map("b", 2, namespace="other"))
    assert [each["metadata"]["name"] for each in world.lister.list(CONFIG_MAPS, "other")] == ["b"]
    assert len(world.lister.list(CONFIG_MAPS)) == 2
    assert world.lister.get(CONFIG_MAPS, "n", "b") is None
    world.lister.drop(CONFIG_MAPS, config_map("a", 3))
    assert world.lister.list(CONFIG_MAPS, "n") == []
    assert world.changes == [
        ("a", ChangeType.ADDED),
        ("b", ChangeType.ADDED),
        ("a", ChangeType.DELETED),
    ]


def test_cluster_scoped_kinds_are_found_without_a_namespace() -> None:
    world = World(Watch(NODES, ("ignored",)))
    world.lister.put(NODES, {"metadata": {"name": "node", "uid": "u", "resourceVersion": "1"}})
    assert world.lister.get(NODES, None, "node") is not None
    assert [each.namespace for each in world.lister.sources] == [None]


def test_a_list_that_brings_the_same_again_changes_nothing() -> None:
    world = World()
    for version in (1, 1, 2, 1):
        world.lister.put(CONFIG_MAPS, config_map("a", version))
    assert world.data("a") == "2"
    assert world.changes == [("a", ChangeType.ADDED), ("a", ChangeType.MODIFIED)]


def test_the_answer_of_a_call_is_seen_at_once_and_told_when_the_watch_brings_it() -> None:
    world = World()
    world.lister.note(CONFIG_MAPS, config_map("a", 2))
    world.lister.note(CONFIG_MAPS, config_map("a", 1))
    assert world.data("a") == "2"
    assert world.changes == []
    world.lister.put(CONFIG_MAPS, config_map("a", 1))
    assert world.data("a") == "2"
    world.lister.put(CONFIG_MAPS, config_map("a", 2))
    world.lister.put(CONFIG_MAPS, config_map("a", 2))
    assert world.changes == [("a", ChangeType.MODIFIED)]


def test_nothing_brings_back_what_was_deleted() -> None:
    world = World()
    world.lister.put(CONFIG_MAPS, config_map("a", 1))
    world.lister.drop(CONFIG_MAPS, config_map("a", 1), deleted_at=5)
    for late in (config_map("a", 2), config_map("a", 5)):
        world.lister.put(CONFIG_MAPS, late)
        world.lister.note(CONFIG_MAPS, late)
    assert world.data("a") is None
    assert world.lister.is_gone("uid-a")


def test_an_object_with_a_newer_version_exists_again() -> None:
    """It stopped to match the selector, which is told as a deletion, and matches it again."""
    world = World()
    world.lister.put(CONFIG_MAPS, config_map("a", 1))
    world.lister.drop(CONFIG_MAPS, config_map("a", 2))
    world.lister.put(CONFIG_MAPS, config_map("a", 3))
    assert world.data("a") == "3"
    assert not world.lister.is_gone("uid-a")


def test_of_two_objects_with_one_name_the_newer_one_counts_in_any_order() -> None:
    world = World()
    world.lister.put(CONFIG_MAPS, config_map("a", 1, "old"))
    world.lister.put(CONFIG_MAPS, config_map("a", 5, "new"))
    world.lister.put(CONFIG_MAPS, config_map("a", 3, "old"))
    world.lister.drop(CONFIG_MAPS, config_map("a", 4, "old"))
    assert world.data("a") == "5"
    assert world.changes == [
        ("a", ChangeType.ADDED),
        ("a", ChangeType.DELETED),
        ("a", ChangeType.ADDED),
    ]


def test_deletions_are_forgotten_after_a_while() -> None:
    world = World()
    for number in range(10):
        world.lister.drop(CONFIG_MAPS, config_map(f"c{number}", number))
    world.now = 301.0
    world.lister.drop(CONFIG_MAPS, config_map("last", 99))
    assert not world.lister.is_gone("uid-c0")
    assert world.lister.is_gone("uid-last")


def test_answers_are_held_only_of_what_is_watched() -> None:
    world = World(Watch(CONFIG_MAPS, ("n",)))
    world.lister.note(SECRETS, config_map("s", 1))
    world.lister.note(CONFIG_MAPS, config_map("b", 1, namespace="other"))
    assert world.lister.list(SECRETS) == world.lister.list(CONFIG_MAPS) == []


def test_it_is_synced_once_every_source_is_and_says_what_is_missing() -> None:
    world = World(Watch(CONFIG_MAPS, ("a", "b")), Watch(LEADER_WORKER_SETS, optional=True))
    first, second, optional = world.lister.sources
    world.lister.mark_synced(first)
    world.lister.report(second, "list: Forbidden")
    assert not world.lister.synced()
    assert world.lister.problems() == {
        "configmaps in b": "list: Forbidden",
        "leaderworkersets": "not listed yet",
    }
    world.lister.mark_synced(second)
    world.lister.mark_synced(optional)
    assert world.lister.synced()
    assert world.lister.problems() == {}


def test_requests_that_fail_are_a_problem_after_a_while() -> None:
    world = World()
    (source,) = world.lister.sources
    world.lister.mark_synced(source)
    world.lister.report(source, "watch: Disconnected")
    world.now = 200.0
    world.lister.report(source, "watch: ServerError")
    assert not world.lister.problems()
    world.now = 301.0
    assert world.lister.problems() == {"configmaps": "watch: ServerError"}
    world.lister.report(source)
    assert not world.lister.problems()


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
