"""The injection breaker end to end: the real webhook injects a pod that cannot start, the
controller suspends its owner and deletes the pod, and the webhook does not inject the replacement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.cluster import admission
from tests.cluster.admission import WebhookProcess
from tests.cluster.status_fixtures import StatusNamespace, run_story, running_controller
from tests.support.controllers import condition, until
from tests.support.pods import bare_pod

from kvtier_operator.api.names import SKIPPED_ANNOTATION, STRUCTURAL_ANNOTATION
from kvtier_operator.kube.resources import PODS, POLICIES, Object

SHORT = {"attach": {"startTimeoutSeconds": 10, "retrySeconds": 15}}


@pytest.fixture(scope="module")
def webhook(
    full_cluster: Any, full_api: Any, nodes: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """The webhook process, which the API server calls."""
    home: Path = tmp_path_factory.mktemp("webhook")
    with admission.definition(full_cluster, full_api, nodes):
        process = WebhookProcess(home, full_cluster)
        with process, admission.installed(full_api, *admission.configurations(process)):
            yield process


async def known(where: StatusNamespace) -> None:
    """Waits until the webhook knows the policy and injects a pod."""
    pod = bare_pod("probe", owner="")
    body = {"metadata": {"name": "probe", "labels": pod["metadata"]["labels"]}, "spec": pod["spec"]}
    path = f"/api/v1/namespaces/{where.namespace}/pods?dryRun=All"

    async def attached() -> bool:
        status, found = await asyncio.to_thread(where.api.request, "POST", path, body)
        return status == 201 and STRUCTURAL_ANNOTATION in (
            found["metadata"].get("annotations") or {}
        )

    await until("the webhook injects", attached)


def test_the_replacement_of_a_blocked_pod_is_not_injected(
    full_cluster: Any, full_api: Any, nodes: ModuleType, webhook: WebhookProcess
) -> None:
    async def scenario(where: StatusNamespace) -> None:
        async with running_controller(where):
            await where.policy(**SHORT)
            await where.until("Attached", "Unknown", "NoPods")
            await known(where)
            await where.deployment(bare_pod())
            (stuck,) = await where.pods()
            assert STRUCTURAL_ANNOTATION in stuck["metadata"]["annotations"]
            name, (owner,) = stuck["metadata"]["name"], stuck["metadata"]["ownerReferences"]
            await where.hold(
                name,
                "kvtier-tierd",
                "ImagePullBackOff",
                'Back-off pulling image "kvtier/payload:dev"',
            )
            found = await where.until("Attached", "False", "ImageNotPulled")
            assert [each["uid"] for each in found["status"]["suspendedOwners"]] == [owner["uid"]]
            assert (await where.columns())["Reason"] == "ImageNotPulled"

            async def leaving() -> bool:
                pods = await where.client.list(PODS, where.namespace)
                old = next(
                    (each for each in pods if each["metadata"]["uid"] == stuck["metadata"]["uid"]),
                    None,
                )
                return old is None or "deletionTimestamp" in old["metadata"]

            await until("the stuck pod is deleted", leaving)
            await where.finish(name)
            (following,) = await where.pods()
            assert following["metadata"]["ownerReferences"][0]["uid"] == owner["uid"]
            assert STRUCTURAL_ANNOTATION not in following["metadata"]["annotations"]
            assert (
                '"reason": "Suspended"' in following["metadata"]["annotations"][SKIPPED_ANNOTATION]
            )
            assert "initContainers" not in following["spec"]
            await where.run(following["metadata"]["name"])

            async def listed() -> Object | None:
                policy = await where.client.get(POLICIES, where.namespace, "chat")
                pods = policy["status"].get("skippedPods") or []
                return policy if [pod["reason"] for pod in pods] == ["Suspended"] else None

            status = await until("the pod is listed with its reason", listed)
            assert "get no tiers" in condition(status, "Attached")["message"]
            told_of = {
                each["involvedObject"]["name"] for each in await where.events("StuckPodDeleted")
            }
            assert told_of == {name}
            await where.events("Suspended")

            # After the retry time the suspension ends. The running pod stays and the next one
            # gets tiers.
            await where.until("Attached", "False", "Suspended")
            await where.client.delete(
                PODS,
                where.namespace,
                following["metadata"]["name"],
                uid=following["metadata"]["uid"],
            )
            await where.finish(following["metadata"]["name"])
            (third,) = await where.pods()
            assert STRUCTURAL_ANNOTATION in third["metadata"]["annotations"]

    run_story(scenario, full_cluster, full_api, nodes)


def admission_policy(namespace: str, expression: str) -> list[Object]:
    """A rule about pods of a namespace, as platform teams write it: it names no container."""
    group = {"apiVersion": "admissionregistration.k8s.io/v1"}
    name = {"metadata": {"name": namespace}}
    rules = [
        {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    ]
    space = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    return [
        {
            **group,
            **name,
            "kind": "ValidatingAdmissionPolicy",
            "spec": {
                "matchConstraints": {"resourceRules": rules},
                "validations": [{"expression": expression, "message": "ask the platform team"}],
            },
        },
        {
            **group,
            **name,
            "kind": "ValidatingAdmissionPolicyBinding",
            "spec": {
                "policyName": namespace,
                "validationActions": ["Deny"],
                "matchResources": {"namespaceSelector": space},
            },
        },
    ]


@contextmanager
def enforced(where: StatusNamespace, expression: str) -> Iterator[None]:
    """The rule is in force: a pod is denied by it."""
    made = []
    resources = ("validatingadmissionpolicies", "validatingadmissionpolicybindings")
    try:
        for body, plural in zip(
            admission_policy(where.namespace, expression), resources, strict=True
        ):
            path = f"/apis/admissionregistration.k8s.io/v1/{plural}"
            where.nodes.ok(where.api.request("POST", path, body))
            made.append(f"{path}/{where.namespace}")
        probe = bare_pod("probe", owner="")
        probe["metadata"] = {"name": "probe", "labels": {"app": "chat"}}
        pods = f"/api/v1/namespaces/{where.namespace}/pods?dryRun=All"
        where.nodes.wait_for(
            "the rule is in force", lambda: where.api.request("POST", pods, probe)[0] >= 400, 60
        )
        yield
    finally:
        for path in made:
            where.api.request("DELETE", path)


def test_a_rule_that_names_no_container_costs_the_pod_its_tiers_and_not_its_existence(
    full_cluster: Any, full_api: Any, nodes: ModuleType, webhook: WebhookProcess
) -> None:
    async def scenario(where: StatusNamespace) -> None:
        async with running_controller(where):
            await where.policy(attach={"retrySeconds": 600})
            await known(where)
            with enforced(where, "!has(object.spec.initContainers)"):
                await where.deployment(bare_pod())
                found = await where.until("Attached", "False", "Refused", seconds=120)
                message = condition(found, "Attached")["message"]
                assert "ask the platform team" in message
                assert message.startswith("Injection may prevent a pod from starting")
                (pod,) = await where.pods()
                assert STRUCTURAL_ANNOTATION not in pod["metadata"]["annotations"]
                assert '"reason": "Suspended"' in pod["metadata"]["annotations"][SKIPPED_ANNOTATION]

    run_story(scenario, full_cluster, full_api, nodes)


def test_a_rule_that_denies_pods_without_tiers_too_ends_the_suspension(
    full_cluster: Any, full_api: Any, nodes: ModuleType, webhook: WebhookProcess
) -> None:
    async def scenario(where: StatusNamespace) -> None:
        async with running_controller(where):
            await where.policy(attach={"retrySeconds": 600})
            await known(where)
            with enforced(where, "has(object.spec.priorityClassName)"):
                await where.deployment(bare_pod())
                await where.until("Attached", "False", "Refused", seconds=120)
                found = await where.until("Attached", "Unknown", "NoPods", seconds=180)
                assert "without tiers too" in condition(found, "Attached")["message"]
                assert "suspendedOwners" not in found["status"]
                await where.events("Resumed")

    run_story(scenario, full_cluster, full_api, nodes)
