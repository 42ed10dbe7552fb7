"""Unusual pods and policies with a real API server do not affect admission or the webhook."""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from tests.cluster import admission
from tests.cluster.admission import LABELLED, WebhookProcess, installed, pod, policy

from kvtier_operator.api.names import POLICY_ANNOTATION, SKIPPED_ANNOTATION, STRUCTURAL_ANNOTATION

Change = Callable[[dict[str, Any]], object]
ASKED = 'kvtier_webhook_answers_total{path="/mutate",result="%s"}'
MERGE = "application/merge-patch+json"


@pytest.fixture(scope="module")
def webhook(
    full_cluster: Any, full_api: Any, nodes: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WebhookProcess]:
    process = WebhookProcess(tmp_path_factory.mktemp("odd"), full_cluster)
    with (
        admission.definition(full_cluster, full_api, nodes),
        process,
        installed(full_api, *admission.configurations(process)),
    ):
        yield process


class Space:
    """A labelled namespace."""

    def __init__(self, api: Any, nodes: ModuleType) -> None:
        self.api, self.nodes = api, nodes
        self.name = nodes.make_namespace(api, f"odd-{secrets.token_hex(3)}", LABELLED)
        self.pods = f"/api/v1/namespaces/{self.name}/pods"
        self.policies = f"/apis/kvtier.io/v1alpha1/namespaces/{self.name}/kvtierpolicies"

    def apply(self, document: dict[str, Any], labels: dict[str, str] | None = None) -> Any:
        """Makes a policy and waits until the webhook knows it."""
        made = self.nodes.ok(self.api.request("POST", self.policies, document))
        self.nodes.wait_for(
            "the policy is known", lambda: self.outcome(self.create(pod(labels), dry_run=True))
        )
        return made

    def create(self, document: dict[str, Any], *, dry_run: bool = False) -> dict[str, str]:
        """The annotations of a pod as it was stored."""
        query = "?dryRun=All" if dry_run else ""
        found = self.nodes.ok(self.api.request("POST", self.pods + query, document))
        annotations: dict[str, str] = found["metadata"].get("annotations") or {}
        return annotations

    @staticmethod
    def outcome(annotations: dict[str, str]) -> str:
        """``attached``, the reason for which it was skipped, or nothing."""
        if STRUCTURAL_ANNOTATION in annotations:
            return "attached"
        return str(json.loads(annotations.get(SKIPPED_ANNOTATION, "{}")).get("reason", ""))


@pytest.fixture
def space(full_api: Any, nodes: ModuleType) -> Iterator[Space]:
    found = Space(full_api, nodes)
    yield found
    full_api.request("DELETE", f"/api/v1/namespaces/{found.name}")


def engine(document: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = document["spec"]["containers"][0]
    return container


def many(number: int, **item: Any) -> list[dict[str, Any]]:
    return [dict(item) for _ in range(number)]


def mounts(document: dict[str, Any]) -> None:
    document["spec"]["volumes"] = [{"name": "own", "emptyDir": {}}]
    engine(document)["volumeMounts"] = [
        {"name": "own", "mountPath": f"/srv/{index}"} for index in range(8_000)
    ]


HUGE: dict[str, Change] = {
    "the same variable": lambda found: engine(found).update(env=many(20_000, name="A", value="")),
    "a word that nearly is an option": lambda found: engine(found).update(
        command=["vllm", "/usr/bin/python3", "-" + "IE" * 16_000 + "!"]
    ),
    "defaults that never end": lambda found: engine(found).update(args=["${a:-" * 6_000]),
    "variables that name a long one": lambda found: engine(found).update(
        env=[
            {"name": "A", "value": "x" * 32_000},
            *({"name": f"V{index}", "value": "$(A)y"} for index in range(15_000)),
        ]
    ),
    "the same argument": lambda found: engine(found).update(args=["x"] * 100_000),
    "mounts of one volume": mounts,
    "tolerations": lambda found: found["spec"].update(
        tolerations=many(10_000, key="a", operator="Exists")
    ),
    "containers": lambda found: found["spec"]["containers"].extend(
        {"name": f"c{index}", "image": "x"} for index in range(5_000)
    ),
    "a number without end": lambda found: engine(found).update(
        args=["--tensor-parallel-size", "9" * 5_000]
    ),
}
"""The API server accepts these. Each of the first three once occupied a thread for hours."""


@pytest.mark.parametrize("name", HUGE)
def test_a_pod_of_the_maximum_size_delays_no_other_pod(
    space: Space, webhook: WebhookProcess, name: str
) -> None:
    space.apply(policy())
    document = pod()
    HUGE[name](document)
    failures = [webhook.metric(ASKED % result) for result in ("Failed", "Malformed")]
    # The API server itself may need longer than the second that a decision is given; what counts is
    # that it ends.
    assert space.outcome(space.create(document, dry_run=True)) in (
        "attached",
        "",
        "NoEngineContainer",
    )
    assert [webhook.metric(ASKED % result) for result in ("Failed", "Malformed")] == failures
    space.nodes.wait_for(
        "the next one is attached",
        lambda: space.outcome(space.create(pod(), dry_run=True)) == "attached",
    )
    assert webhook.monitoring("/healthz")[0] == 200


ODD: dict[str, tuple[Change, str]] = {
    "lists that are null": (
        lambda found: (
            engine(found).update(env=None, args=None, volumeMounts=None, ports=None, envFrom=None),
            found["spec"].update(
                volumes=None, initContainers=None, tolerations=None, securityContext=None
            ),
            found["metadata"].update(annotations=None, ownerReferences=None, finalizers=None),
        ),
        "attached",
    ),
    "lists that are empty": (
        lambda found: (
            engine(found).update(env=[], args=[], volumeMounts=[], ports=[], resources={}),
            found["spec"].update(volumes=[], initContainers=[], securityContext={}),
            found["metadata"].update(annotations={}, ownerReferences=[]),
        ),
        "attached",
    ),
    "a variable without a value": (
        lambda found: engine(found).update(
            env=[{"name": "PYTHONPATH"}, {"name": "VLLM_PLUGINS", "value": None}]
        ),
        "attached",
    ),
    "a mark of having been left alone that is no JSON": (
        lambda found: found["metadata"].update(annotations={SKIPPED_ANNOTATION: "{"}),
        "attached",
    ),
    "an init container called as the sidecar": (
        lambda found: found["spec"].update(initContainers=[{"name": "kvtier-tierd", "image": "x"}]),
        "AlreadyConfigured",
    ),
    "a container called as the payload's": (
        lambda found: found["spec"]["containers"].append({"name": "kvtier-payload", "image": "x"}),
        "AlreadyConfigured",
    ),
    "a volume called as ours": (
        lambda found: found["spec"].update(volumes=[{"name": "kvtier-run", "emptyDir": {}}]),
        "AlreadyConfigured",
    ),
    "no command": (lambda found: engine(found).pop("command"), "attached"),
    "an empty command": (
        lambda found: engine(found).update(command=[], args=["", " ", "\n", "--"]),
        "attached",
    ),
    "quotes that do not end": (
        lambda found: engine(found).update(command=["sh", "-c", "vllm serve 'm"]),
        "attached",
    ),
    "variables that name themselves": (
        lambda found: engine(found).update(env=[{"name": "A", "value": "$(A)$(A)"}], args=["$(A)"]),
        "attached",
    ),
    "a name and a generated one": (
        lambda found: found["metadata"].update(name="engine-x"),
        "attached",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_an_unusual_pod_is_decided_like_any_other(
    space: Space, webhook: WebhookProcess, name: str
) -> None:
    space.apply(policy())
    change, expected = ODD[name]
    document = pod()
    change(document)
    failed = webhook.metric(ASKED % "Failed")
    annotations = space.create(document)
    assert space.outcome(annotations) == expected, annotations
    assert webhook.metric(ASKED % "Failed") == failed


def test_the_webhook_is_not_called_for_updates_of_a_pod(
    space: Space, webhook: WebhookProcess
) -> None:
    found = space.nodes.ok(space.api.request("POST", space.pods, pod({"app": "other"})))
    space.apply(policy())
    calls = webhook.metric('kvtier_webhook_request_duration_seconds_count{path="/mutate"}')
    path = f"{space.pods}/{found['metadata']['name']}"
    # From here on the policy selects it; what it was given at its creation is what it has.
    changed = space.nodes.ok(
        space.api.request(
            "PATCH", path, {"metadata": {"labels": {"app": "engine"}}}, content_type=MERGE
        )
    )
    debug = {"spec": {"ephemeralContainers": [{"name": "debug", "image": "x"}]}}
    strategic = "application/strategic-merge-patch+json"
    space.nodes.ok(
        space.api.request("PATCH", f"{path}/ephemeralcontainers", debug, content_type=strategic)
    )
    assert not space.outcome(changed["metadata"].get("annotations") or {})
    assert webhook.metric('kvtier_webhook_request_duration_seconds_count{path="/mutate"}') == calls


LONG = ("a." * 32)[:63].rstrip(".")
POLICIES: dict[str, tuple[dict[str, Any], str]] = {
    "a name of 62 characters with dots": (policy(LONG), "attached"),
    "a selector of everything": (
        {**policy(), "spec": {**policy()["spec"], "podSelector": {}}},
        "attached",
    ),
    "a container that no pod has": (policy(engine={"containerName": "none"}), "NoEngineContainer"),
    "more memory than a node has": (
        policy(tiers=[{"name": "ram", "memory": {"capacity": "7Ei"}}]),
        "attached",
    ),
    "more ranks than a pod has": (policy(engine={"localRanks": 64}), "attached"),
    "a selector of what is not": (
        {
            **policy(),
            "spec": {
                **policy()["spec"],
                "podSelector": {
                    "matchExpressions": [
                        {"key": "app", "operator": "NotIn", "values": ["other", ""]}
                    ]
                },
            },
        },
        "attached",
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_an_unusual_policy_does_not_affect_pods(
    space: Space, webhook: WebhookProcess, name: str
) -> None:
    document, expected = copy.deepcopy(POLICIES[name])
    failed = webhook.metric(ASKED % "Failed")
    space.apply(document)
    annotations = space.create(pod())
    assert space.outcome(annotations) == expected, annotations
    assert (
        annotations.get(POLICY_ANNOTATION, document["metadata"]["name"])
        == document["metadata"]["name"]
    )
    assert webhook.metric(ASKED % "Failed") == failed
