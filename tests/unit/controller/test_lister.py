"""The lister: what it holds after events, lists and answers of calls, in any order."""

from __future__ import annotations

from typing import Any

from kvtier_operator.kube import trim
from kvtier_operator.kube.lister import ChangeType, Lister, Watch
from kvtier_operator.kube.resources import CONFIG_MAPS, LEADER_WORKER_SETS, NODES, SECRETS


def config_map(name: str, version: int, uid: str = "", namespace: str = "n") -> dict[str, Any]:
    about = {"name": name, "namespace": namespace, "uid": uid or f"uid-{name}"}
    return {"metadata": {**about, "resourceVersion": str(version)}, "data": {"v": str(version)}}


class ListerTestbed:
    """A lister, its clock, and the changes that it announced."""

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


def test_objects_are_cached_by_namespace_and_name() -> None:
    testbed = ListerTestbed()
    testbed.lister.put(CONFIG_MAPS, config_map("a", 1))
    testbed.lister.put(CONFIG_MAPS, config_map("b", 2, namespace="other"))
    assert [each["metadata"]["name"] for each in testbed.lister.list(CONFIG_MAPS, "other")] == ["b"]
    assert len(testbed.lister.list(CONFIG_MAPS)) == 2
    assert testbed.lister.get(CONFIG_MAPS, "n", "b") is None
    testbed.lister.drop(CONFIG_MAPS, config_map("a", 3))
    assert testbed.lister.list(CONFIG_MAPS, "n") == []
    assert testbed.changes == [
        ("a", ChangeType.ADDED),
        ("b", ChangeType.ADDED),
        ("a", ChangeType.DELETED),
    ]


def test_cluster_scoped_kinds_are_found_without_a_namespace() -> None:
    testbed = ListerTestbed(Watch(NODES, ("ignored",)))
    testbed.lister.put(NODES, {"metadata": {"name": "node", "uid": "u", "resourceVersion": "1"}})
    assert testbed.lister.get(NODES, None, "node") is not None
    assert [each.namespace for each in testbed.lister.sources] == [None]


def test_a_list_that_brings_the_same_again_changes_nothing() -> None:
    testbed = ListerTestbed()
    for version in (1, 1, 2, 1):
        testbed.lister.put(CONFIG_MAPS, config_map("a", version))
    assert testbed.data("a") == "2"
    assert testbed.changes == [("a", ChangeType.ADDED), ("a", ChangeType.MODIFIED)]


def test_a_write_is_visible_at_once_and_announced_by_the_watch() -> None:
    testbed = ListerTestbed()
    testbed.lister.note(CONFIG_MAPS, config_map("a", 2))
    testbed.lister.note(CONFIG_MAPS, config_map("a", 1))
    assert testbed.data("a") == "2"
    assert testbed.changes == []
    testbed.lister.put(CONFIG_MAPS, config_map("a", 1))
    assert testbed.data("a") == "2"
    testbed.lister.put(CONFIG_MAPS, config_map("a", 2))
    testbed.lister.put(CONFIG_MAPS, config_map("a", 2))
    assert testbed.changes == [("a", ChangeType.MODIFIED)]


def test_deleted_objects_do_not_reappear() -> None:
    testbed = ListerTestbed()
    testbed.lister.put(CONFIG_MAPS, config_map("a", 1))
    testbed.lister.drop(CONFIG_MAPS, config_map("a", 1), deleted_at=5)
    for late in (config_map("a", 2), config_map("a", 5)):
        testbed.lister.put(CONFIG_MAPS, late)
        testbed.lister.note(CONFIG_MAPS, late)
    assert testbed.data("a") is None
    assert testbed.lister.is_gone("uid-a")


def test_an_object_with_a_newer_version_exists_again() -> None:
    """An object that stops matching the selector counts as deleted, and then matches again."""
    testbed = ListerTestbed()
    testbed.lister.put(CONFIG_MAPS, config_map("a", 1))
    testbed.lister.drop(CONFIG_MAPS, config_map("a", 2))
    testbed.lister.put(CONFIG_MAPS, config_map("a", 3))
    assert testbed.data("a") == "3"
    assert not testbed.lister.is_gone("uid-a")


def test_of_two_objects_with_one_name_the_newer_one_counts_in_any_order() -> None:
    testbed = ListerTestbed()
    testbed.lister.put(CONFIG_MAPS, config_map("a", 1, "old"))
    testbed.lister.put(CONFIG_MAPS, config_map("a", 5, "new"))
    testbed.lister.put(CONFIG_MAPS, config_map("a", 3, "old"))
    testbed.lister.drop(CONFIG_MAPS, config_map("a", 4, "old"))
    assert testbed.data("a") == "5"
    assert testbed.changes == [
        ("a", ChangeType.ADDED),
        ("a", ChangeType.DELETED),
        ("a", ChangeType.ADDED),
    ]


def test_deletions_are_forgotten_after_a_while() -> None:
    testbed = ListerTestbed()
    for number in range(10):
        testbed.lister.drop(CONFIG_MAPS, config_map(f"c{number}", number))
    testbed.now = 301.0
    testbed.lister.drop(CONFIG_MAPS, config_map("last", 99))
    assert not testbed.lister.is_gone("uid-c0")
    assert testbed.lister.is_gone("uid-last")


def test_writes_are_cached_only_for_watched_kinds() -> None:
    testbed = ListerTestbed(Watch(CONFIG_MAPS, ("n",)))
    testbed.lister.note(SECRETS, config_map("s", 1))
    testbed.lister.note(CONFIG_MAPS, config_map("b", 1, namespace="other"))
    assert testbed.lister.list(SECRETS) == testbed.lister.list(CONFIG_MAPS) == []


def test_the_lister_is_synced_once_every_source_is_and_names_the_missing_ones() -> None:
    testbed = ListerTestbed(
        Watch(CONFIG_MAPS, ("a", "b")), Watch(LEADER_WORKER_SETS, optional=True)
    )
    first, second, optional = testbed.lister.sources
    testbed.lister.mark_synced(first)
    testbed.lister.report(second, "list: Forbidden")
    assert not testbed.lister.synced()
    assert testbed.lister.problems() == {
        "configmaps in b": "list: Forbidden",
        "leaderworkersets": "not listed yet",
    }
    testbed.lister.mark_synced(second)
    testbed.lister.mark_synced(optional)
    assert testbed.lister.synced()
    assert testbed.lister.problems() == {}


def test_requests_that_fail_are_a_problem_after_a_while() -> None:
    testbed = ListerTestbed()
    (source,) = testbed.lister.sources
    testbed.lister.mark_synced(source)
    testbed.lister.report(source, "watch: Disconnected")
    testbed.now = 200.0
    testbed.lister.report(source, "watch: ServerError")
    assert not testbed.lister.problems()
    testbed.now = 301.0
    assert testbed.lister.problems() == {"configmaps": "watch: ServerError"}
    testbed.lister.report(source)
    assert not testbed.lister.problems()


def test_cached_pods_omit_unused_fields_and_share_equal_strings() -> None:
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
