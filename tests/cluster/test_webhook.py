"""The webhook process with a real API server: injected pods, skipped pods, failures."""

from __future__ import annotations

import json
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from tests.cluster import admission
from tests.cluster.admission import LABELLED, WebhookProcess, installed, pod, policy
from tests.support.webhook_configurations import TIMEOUT_SECONDS

from kvtier_operator.api import crd
from kvtier_operator.api.names import (
    INJECT_LABEL,
    POLICY_ANNOTATION,
    SKIPPED_ANNOTATION,
    STRUCTURAL_ANNOTATION,
)
from kvtier_operator.injection.existing_config import GROUP_LABEL

ALLOWED = [{"namespaces": ["*"], "hostPath": "/mnt/kv"}]


@pytest.fixture(scope="module")
def webhook(
    full_cluster: Any, full_api: Any, nodes: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WebhookProcess]:
    """One process for the module, and both configurations."""
    home = tmp_path_factory.mktemp("webhook")
    with admission.definition(full_cluster, full_api, nodes):
        process = WebhookProcess(home, full_cluster, {"allowedVolumes": ALLOWED})
        with process, installed(full_api, *admission.configurations(process)):
            yield process


class Space:
    """A labelled namespace with what tests do in one."""

    def __init__(self, api: Any, nodes: ModuleType, name: str) -> None:
        self.api, self.nodes, self.name = api, nodes, name
        self.pods = f"/api/v1/namespaces/{name}/pods"
        self.policies = f"/apis/{crd.GROUP}/{crd.VERSION}/namespaces/{name}/{crd.PLURAL}"

    def apply_policy(self, document: dict[str, Any]) -> Any:
        """Creates it and waits until the webhook knows it."""
        created = self.nodes.ok(self.api.request("POST", self.policies, document))
        labels = document["spec"]["podSelector"]["matchLabels"]
        self.nodes.wait_for(
            "the policy is known", lambda: self.seen(self.create(pod(labels), dry_run=True))
        )
        return created

    def seen(self, answer: Any) -> bool:
        """Whether the webhook did something with a pod."""
        annotations = answer["metadata"].get("annotations") or {}
        return POLICY_ANNOTATION in annotations or SKIPPED_ANNOTATION in annotations

    def create(self, document: dict[str, Any], *, dry_run: bool = False) -> Any:
        """The pod as it was stored."""
        query = "?dryRun=All" if dry_run else ""
        return self.nodes.ok(self.api.request("POST", self.pods + query, document))

    def first_pod(self, matches: Callable[[Any], bool] = lambda pod: True) -> Any:
        """A pod that some controller made."""

        def found() -> Any:
            return next(filter(matches, self.api.request("GET", self.pods)[1]["items"]), None)

        return self.nodes.wait_for("a pod", found)


@pytest.fixture
def space(full_api: Any, nodes: ModuleType) -> Iterator[Space]:
    name = nodes.make_namespace(full_api, f"webhook-{secrets.token_hex(3)}", LABELLED)
    yield Space(full_api, nodes, name)
    full_api.request("DELETE", f"/api/v1/namespaces/{name}")


def attached(document: Any) -> bool:
    return STRUCTURAL_ANNOTATION in (document["metadata"].get("annotations") or {})


TEMPLATE = {"metadata": {"labels": {"app": "engine"}}, "spec": pod()["spec"]}
SELECTOR = {"matchLabels": {"app": "engine"}}
WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "Deployment": ("/apis/apps/v1", {"selector": SELECTOR, "template": TEMPLATE}),
    "StatefulSet": (
        "/apis/apps/v1",
        {"selector": SELECTOR, "serviceName": "none", "template": TEMPLATE},
    ),
    "Job": (
        "/apis/batch/v1",
        {"template": {**TEMPLATE, "spec": {**TEMPLATE["spec"], "restartPolicy": "Never"}}},  # type: ignore[dict-item]
    ),
}


@pytest.mark.parametrize("kind", WORKLOADS)
def test_pods_of_a_workload_are_injected(space: Space, webhook: WebhookProcess, kind: str) -> None:
    space.apply_policy(policy())
    group, spec = WORKLOADS[kind]
    path = f"{group}/namespaces/{space.name}/{kind.lower()}s"
    space.nodes.ok(space.api.request("POST", path, {"metadata": {"name": "engine"}, "spec": spec}))
    assert attached(space.first_pod())


def test_a_bare_pod_is_injected_and_its_own_fields_are_unchanged(
    space: Space, webhook: WebhookProcess
) -> None:
    space.apply_policy(policy())
    before = pod()["spec"]["containers"][0]
    stored = space.create(pod())
    assert attached(stored)
    assert stored["metadata"]["annotations"][POLICY_ANNOTATION] == "chat"
    engine = stored["spec"]["containers"][0]
    assert (engine["name"], engine["image"], engine["command"], engine["resources"]["limits"]) == (
        before["name"],
        before["image"],
        before["command"],
        before["resources"]["limits"],
    )


LEADER_WORKER_SETS = "leaderworkersets.leaderworkerset.x-k8s.io"


@pytest.fixture(scope="module")
def leader_worker_sets(full_api: Any, nodes: ModuleType, full_cluster: Any) -> Iterator[str]:
    """A kind of the name, for owners that no controller of Kubernetes knows."""
    group = LEADER_WORKER_SETS.split(".", 1)[1]
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    definition = {
        "metadata": {"name": LEADER_WORKER_SETS},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {
                "plural": "leaderworkersets",
                "singular": "leaderworkerset",
                "kind": "LeaderWorkerSet",
            },
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }
    status, body = full_api.request("POST", admission.DEFINITIONS, definition)
    assert status in (201, 409), body
    listed = f"/apis/{group}/v1/leaderworkersets"
    nodes.wait_for("the kind is served", lambda: full_api.request("GET", listed)[0] == 200)
    yield listed
    if status == 201 and not full_cluster.own:
        full_api.request("DELETE", f"{admission.DEFINITIONS}/{LEADER_WORKER_SETS}")


def test_members_of_a_custom_owners_group_get_the_same_structure(
    space: Space, webhook: WebhookProcess, leader_worker_sets: str
) -> None:
    space.apply_policy(policy())
    path = leader_worker_sets.replace("/v1/", f"/v1/namespaces/{space.name}/")
    owner = space.nodes.ok(
        space.api.request(
            "POST",
            path,
            {
                "apiVersion": "leaderworkerset.x-k8s.io/v1",
                "kind": "LeaderWorkerSet",
                "metadata": {"name": "engine"},
            },
        )
    )
    reference = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "name": "engine",
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }

    def member(group: str) -> dict[str, Any]:
        return pod({"app": "engine", GROUP_LABEL: group}, ownerReferences=[reference])

    leader = space.create(member("group-0"))
    assert attached(leader)
    document = leader["metadata"]["annotations"][STRUCTURAL_ANNOTATION]
    # The document holds the live values of its time: a member that comes later would get others.
    lower = {"spec": {"minLoadTokens": 1}}
    space.nodes.ok(
        space.api.request(
            "PATCH", f"{space.policies}/chat", lower, content_type="application/merge-patch+json"
        )
    )

    def written(group: str) -> Any:
        stored = space.create(member(group), dry_run=True)
        return stored["metadata"]["annotations"].get(STRUCTURAL_ANNOTATION)

    space.nodes.wait_for("the change is known", lambda: written("group-1") != document)
    assert written("group-0") == document


def test_the_webhook_is_not_called_for_pods_of_a_daemon_set(
    space: Space, webhook: WebhookProcess
) -> None:
    space.apply_policy(policy())
    calls = webhook.metric('kvtier_webhook_request_duration_seconds_count{path="/mutate"}')
    owner = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "name": "d",
        "uid": "1",
        "controller": True,
    }
    stored = space.create(pod(ownerReferences=[owner]), dry_run=True)
    assert not space.seen(stored)
    assert webhook.metric('kvtier_webhook_request_duration_seconds_count{path="/mutate"}') == calls


def test_the_webhook_is_not_called_for_injected_pods(space: Space, webhook: WebhookProcess) -> None:
    space.apply_policy(policy())
    calls = webhook.metric('kvtier_webhook_request_duration_seconds_count{path="/mutate"}')
    stored = space.create(pod(annotations={STRUCTURAL_ANNOTATION: "{}"}), dry_run=True)
    assert POLICY_ANNOTATION not in stored["metadata"]["annotations"]
    assert webhook.metric('kvtier_webhook_request_duration_seconds_count{path="/mutate"}') == calls


def test_a_pod_that_no_policy_selects_is_unchanged(space: Space, webhook: WebhookProcess) -> None:
    space.apply_policy(policy())
    assert not space.seen(space.create(pod({"app": "other"})))


def test_the_webhook_is_not_called_in_namespaces_without_the_label(
    full_api: Any, nodes: ModuleType, webhook: WebhookProcess
) -> None:
    name = nodes.make_namespace(full_api, f"webhook-{secrets.token_hex(3)}")
    space = Space(full_api, nodes, name)
    nodes.ok(full_api.request("POST", space.policies, policy()))
    calls = webhook.metric('kvtier_webhook_request_duration_seconds_count{path="/mutate"}')
    assert not space.seen(space.create(pod()))
    assert webhook.metric('kvtier_webhook_request_duration_seconds_count{path="/mutate"}') == calls
    # The label is the administrator's switch, at once.
    nodes.ok(
        full_api.request(
            "PATCH",
            f"/api/v1/namespaces/{name}",
            {"metadata": {"labels": LABELLED}},
            content_type="application/merge-patch+json",
        )
    )
    nodes.wait_for("pods are attached", lambda: attached(space.create(pod(), dry_run=True)))
    full_api.request("DELETE", f"/api/v1/namespaces/{name}")


def test_a_pod_with_its_own_configuration_is_skipped_with_the_reason(
    space: Space, webhook: WebhookProcess
) -> None:
    space.apply_policy(policy())
    own = pod()
    own["spec"]["containers"][0]["args"] = ["--kv-transfer-config", "{}"]
    stored = space.create(own)
    assert not attached(stored)
    found = json.loads(stored["metadata"]["annotations"][SKIPPED_ANNOTATION])
    assert (found["policy"], found["reason"]) == ("chat", "AlreadyConfigured")
    assert found["message"]
    assert stored["spec"]["containers"][0]["args"] == ["--kv-transfer-config", "{}"]


def test_a_pod_that_opts_out_is_skipped(space: Space, webhook: WebhookProcess) -> None:
    space.apply_policy(policy())
    stored = space.create(pod({"app": "engine", INJECT_LABEL: "disabled"}))
    assert not attached(stored)
    assert json.loads(stored["metadata"]["annotations"][SKIPPED_ANNOTATION])["reason"] == "Disabled"


def test_the_older_of_two_policies_governs(space: Space, webhook: WebhookProcess) -> None:
    space.apply_policy(policy("first"))
    time.sleep(1.1)  # creationTimestamp has seconds
    space.nodes.ok(space.api.request("POST", space.policies, policy("second")))
    time.sleep(0.5)
    assert space.create(pod())["metadata"]["annotations"][POLICY_ANNOTATION] == "first"


def test_a_recreated_policy_governs_new_pods(space: Space, webhook: WebhookProcess) -> None:
    space.apply_policy(policy())
    space.nodes.ok(space.api.request("DELETE", f"{space.policies}/chat"))
    space.nodes.wait_for(
        "no policy governs the pod", lambda: not space.seen(space.create(pod(), dry_run=True))
    )
    again = space.apply_policy(policy())
    stored = space.create(pod())
    assert stored["metadata"]["annotations"]["kvtier.io/policy-uid"] == again["metadata"]["uid"]


def test_pods_of_a_suspended_owner_are_unchanged_until_the_suspension_ends(
    space: Space, webhook: WebhookProcess
) -> None:
    space.apply_policy(policy())
    owner = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": "own",
        "uid": "u-1",
        "controller": True,
    }

    def suspend(until: str) -> None:
        entry = {
            "kind": "ConfigMap",
            "name": "own",
            "uid": "u-1",
            "reason": "WouldBeRefused",
            "until": until,
        }
        space.nodes.ok(
            space.api.request(
                "PATCH",
                f"{space.policies}/chat/status",
                {"status": {"suspendedOwners": [entry]}},
                content_type="application/merge-patch+json",
            )
        )

    suspend("2999-01-01T00:00:00Z")
    ours = pod(ownerReferences=[owner])
    space.nodes.wait_for("suspended", lambda: not attached(space.create(ours, dry_run=True)))
    assert (
        "Suspended"
        in space.create(ours, dry_run=True)["metadata"]["annotations"][SKIPPED_ANNOTATION]
    )
    assert attached(space.create(pod(), dry_run=True))
    suspend("2020-01-01T00:00:00Z")
    space.nodes.wait_for("tried again", lambda: attached(space.create(ours, dry_run=True)))


def test_a_policy_with_a_volume_that_is_not_allowed_is_denied_with_field_value_and_allowed_paths(
    space: Space, webhook: WebhookProcess
) -> None:
    disk = {
        "name": "disk",
        "fileSystem": {
            "capacity": "1Gi",
            "sharing": "Node",
            "volume": {"hostPath": {"path": "/etc/kv"}},
        },
    }
    document = policy()
    document["spec"]["tiers"].append(disk)
    status, body = space.api.request("POST", space.policies, document)
    assert status == 422, body
    assert "denied the request" in body["message"]
    for words in (
        "spec.tiers[1].fileSystem.volume.hostPath.path",
        '"/etc/kv"',
        "is not allowed: allowedVolumes has only",
        "/mnt/kv and below",
    ):
        assert words in body["message"]
    disk["fileSystem"]["volume"]["hostPath"]["path"] = "/mnt/kv/a"  # type: ignore[index]
    assert space.api.request("POST", space.policies, document)[0] == 201


def test_without_a_webhook_pods_start_unchanged(space: Space, webhook: WebhookProcess) -> None:
    space.apply_policy(policy())
    assert webhook.stop() == 0
    try:
        started = time.monotonic()
        assert not space.seen(space.create(pod()))
        # Less than what a webhook that hangs costs.
        assert time.monotonic() - started < TIMEOUT_SECONDS
    finally:
        webhook.start()
    space.nodes.wait_for("attached again", lambda: attached(space.create(pod(), dry_run=True)))


def test_a_hung_webhook_delays_a_pod_by_its_timeout_only(
    space: Space, webhook: WebhookProcess
) -> None:
    space.apply_policy(policy())
    assert webhook.process is not None
    webhook.process.send_signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        assert not space.seen(space.create(pod()))
        # The webhook's configuration says 2 s; the rest is this machine's.
        assert TIMEOUT_SECONDS - 0.5 < time.monotonic() - started < TIMEOUT_SECONDS + 8
    finally:
        webhook.process.send_signal(signal.SIGCONT)
    space.nodes.wait_for("attached again", lambda: attached(space.create(pod(), dry_run=True)))
