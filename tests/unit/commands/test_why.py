"""``kvtier why``: the webhook's decision, the controller's state, and missing rights by name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.support import pod_objects, pods
from tests.support.memory_cluster import MemoryCluster

from kvtier.cli.cluster.access import ClusterReader
from kvtier.cli.cluster.reports import failed, parsed
from kvtier.cli.cluster.snapshot import read_snapshot, recreated
from kvtier.cli.cluster.why import PodExplanation, explain_pod, show, to_json
from kvtier.cli.inputs import CommandError
from kvtier_operator.api.conditions import SkipReason
from kvtier_operator.api.pods import Pod
from kvtier_operator.controller.pods.reports import NO_REPORT, LastReport
from kvtier_operator.kube.resources import (
    CONFIG_MAPS,
    MUTATING_WEBHOOKS,
    NAMESPACES,
    NODES,
    PODS,
    POLICIES,
    SECRETS,
    ApiError,
    Kind,
    Object,
)
from kvtier_operator.render.documents import content_hash

Documents = Sequence[tuple[Kind, Mapping[str, Any]]]
REPORT = b"""{"version": "0.1.0", "started": true, "promptTokens": 100, "contentHash": "%s",
 "sessions": [{"role": "scheduler", "ready": true}, {"role": "worker", "ready": true}],
 "tiers": [{"name": "ram", "state": "Healthy", "usedBytes": 536870912,
            "capacityBytes": 1073741824, "hitTokens": 40}]}"""


class Answers:
    """Answers instead of tierds."""

    def __init__(self, answer: LastReport = NO_REPORT) -> None:
        self.answer = answer
        self.tokens: list[str | None] = []

    async def read(self, pod: Pod, token: str | None) -> LastReport:
        self.tokens.append(token)
        return self.answer


class Forbidding(MemoryCluster):
    """Forbids to read some kinds, in the API server's words."""

    forbidden: frozenset[Kind] = frozenset()

    def _check(self, verb: str, kind: Kind, namespace: str | None) -> None:
        if kind in self.forbidden:
            text = f'{kind.plural} is forbidden: User "ann" cannot {verb} resource "{kind.plural}"'
            raise ApiError(403, "Forbidden", text)

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        self._check("get", kind, namespace)
        return await super().get(kind, namespace, name)

    async def list(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> Sequence[Object]:
        self._check("list", kind, namespace)
        return await super().list(kind, namespace, labels=labels, fields=fields)


def policy_document(**spec: Any) -> dict[str, Any]:
    return pods.policy(**spec).model_dump(mode="json", by_alias=True, exclude_unset=True)


def installed(*documents: tuple[Kind, Mapping[str, Any]], **options: Any) -> Forbidding:
    """A cluster with KVTier in it, and a policy unless ``policy`` is None."""
    labels = options.get("labels", {"kvtier.io/inject": "enabled"})
    settings = options.get("settings", "images: {payload: p:1, tierd: t:1}\n")
    found = Forbidding(
        [
            (NAMESPACES, {"metadata": {"name": "serving", "labels": labels}}),
            (MUTATING_WEBHOOKS, {"metadata": {"name": "kvtier"}}),
            (
                CONFIG_MAPS,
                {
                    "metadata": {"name": "kvtier-settings", "namespace": "kvtier-system"},
                    "data": {"settings.yaml": settings},
                },
            ),
            *documents,
        ]
    )
    policy = options.get("policy", policy_document())
    if policy is not None:
        found.put(POLICIES, policy)
    return found


def why(
    cluster: MemoryCluster, name: str = "chat-1", answer: LastReport = NO_REPORT
) -> PodExplanation:
    reader = ClusterReader(cluster, "serving")
    return asyncio.run(explain_pod(reader, name, Answers(answer), pods.NOON))


def test_the_decision_for_every_kind_of_pod_is_the_webhooks() -> None:
    """Whatever the pod: the answer is that of the webhook's own functions on the same objects."""
    from kvtier_operator.injection.inject import inject
    from kvtier_operator.settings import Settings
    from kvtier_operator.webhook.mutate import mutate, mutation_request
    from kvtier_operator.webhook.review import AdmissionRequest

    found = {
        "plain": pod_objects.pod(),
        "configured": pod_objects.pod(
            pod_objects.engine(args=["--kv-transfer-config", '{"kv_connector": "X"}'])
        ),
        "no engine": pod_objects.pod(pod_objects.engine(command=["sleep"], image="busybox")),
        "several hosts": pod_objects.pod(pod_objects.engine(args=["--nnodes", "2"])),
        "switched off": pod_objects.pod(
            metadata={"labels": {"app": "chat", "kvtier.io/inject": "disabled"}}
        ),
        "windows": pod_objects.pod(os={"name": "windows"}),
    }
    results = set()
    for name, pod in found.items():
        running = {**pod, "metadata": {**pod["metadata"], "name": "chat-1", "uid": "u"}}
        cluster = installed((PODS, running), (NODES, _node("v1.34.0")))
        answer = why(cluster)
        snapshot = asyncio.run(read_snapshot(ClusterReader(cluster, "serving")))
        request = AdmissionRequest("1", "CREATE", "", "Pod", "", "serving", "", pod, None, False)
        asked = mutation_request(request, snapshot.lister, Settings())
        assert asked is not None
        expected = mutate(asked, Settings(), inject)
        assert answer.now is not None
        assert (answer.now.result, answer.now.reason) == (expected.result, expected.reason), name
        results.add(answer.now.reason)
    assert results >= {"", "AlreadyConfigured", "MultiHost", "Disabled", "UnsupportedEngine"}


def _node(version: str) -> dict[str, Any]:
    return {"metadata": {"name": "a"}, "status": {"nodeInfo": {"kubeletVersion": version}}}


def test_an_old_kubelet_counts_as_it_does_for_the_webhook() -> None:
    running = pods.running(pods.bare_pod(), node="a")
    running["spec"]["containers"] = [pod_objects.engine()]
    found = why(installed((PODS, running), (NODES, _node("v1.28.3"))))
    assert found.now is not None
    assert found.now.reason == SkipReason.NO_NATIVE_SIDECARS.value
    assert "1.28" in found.now.message


def test_the_webhooks_annotation_says_why_a_pod_was_skipped() -> None:
    pod = pods.running(pods.bare_pod())
    pod["metadata"]["annotations"] = {
        "kvtier.io/skipped": '{"policy": "chat", "reason": "MultiHost", "message": "two hosts"}'
    }
    found = why(installed((PODS, pod)))
    assert (found.policy, found.state, found.reason) == ("chat", "Skipped", "MultiHost")
    assert found.message == "two hosts"


def test_a_namespace_without_the_label_is_said_with_the_command() -> None:
    found = why(installed((PODS, pods.running(pods.bare_pod())), labels={}))
    assert found.reason == "Missed"
    assert found.now is not None
    assert found.now.reason == "NotEnabled"
    assert "kubectl label namespace serving kvtier.io/inject=enabled" in found.now.message


def test_a_selector_of_the_chart_counts_instead_of_the_label() -> None:
    settings = "webhook: {namespaceSelector: {matchLabels: {team: llm}}}\n"
    pod = pods.running(pods.bare_pod())
    found = why(installed((PODS, pod), settings=settings)).now
    assert found is not None
    assert "do not match team=llm" in found.message
    found = why(installed((PODS, pod), settings=settings, labels={"team": "llm"})).now
    assert found is not None
    assert found.reason != "NotEnabled"


def test_a_cluster_without_the_webhook_is_said() -> None:
    cluster = installed((PODS, pods.running(pods.bare_pod())))
    cluster.remove(MUTATING_WEBHOOKS, None, "kvtier")
    found = why(cluster)
    assert found.now is not None
    assert found.now.reason == "NoWebhook"


def test_a_pod_that_no_policy_selects_says_which_label_is_missing() -> None:
    pod = pods.running(pods.bare_pod())
    pod["metadata"]["labels"] = {"app": "web"}
    found = why(installed((PODS, pod)))
    assert (found.policy, found.reason) == ("", "NotGoverned")
    assert "chat needs the label app=chat, and the pod has app=web" in found.message
    without = why(installed((PODS, pod), policy=None))
    assert without.message == "namespace serving has no KVTierPolicy"


def test_a_requirement_that_is_no_label_is_named() -> None:
    expression = {"key": "tier", "operator": "In", "values": ["gold"]}
    policy = policy_document(podSelector={"matchExpressions": [expression]})
    found = why(installed((PODS, pods.running(pods.bare_pod())), policy=policy))
    assert "chat needs tier In (gold)" in found.message


def test_an_attached_pod_and_the_token_that_was_used() -> None:
    structure = content_hash(pods.policy().spec)
    pod = pods.running(pods.injected_pod(structural_hash=structure))
    secret = {"metadata": {"name": "chat-token", "namespace": "serving"}, "data": {"token": "dDE="}}
    cluster = installed((PODS, pod), (SECRETS, secret))
    source = Answers(parsed(REPORT % structure.encode()))
    reader = ClusterReader(cluster, "serving")
    found = asyncio.run(explain_pod(reader, "chat-1", source, pods.NOON))
    assert (found.state, found.now, source.tokens) == ("Attached", None, ["t1"])
    assert to_json(found)["notChecked"] == []


def test_an_older_structure_is_said_and_what_a_new_pod_would_get() -> None:
    found = why(
        installed((PODS, pods.running(pods.injected_pod(structural_hash="00000000")))),
        answer=failed("HTTP 503"),
    )
    assert found.state == "Unreachable"
    assert "its structure is an earlier one" in found.message
    assert found.now is not None


def test_without_rights_the_missing_ones_are_named_and_the_rest_is_answered() -> None:
    cluster = installed((PODS, pods.running(pods.bare_pod())))
    cluster.forbidden = frozenset({NAMESPACES, NODES, CONFIG_MAPS, MUTATING_WEBHOOKS})
    found = why(cluster)
    assert found.state == "Skipped"
    text = "\n".join(found.not_checked)
    assert "the right to get namespaces in the cluster is missing" in text
    assert "the right to list nodes in the cluster is missing" in text
    assert "the right to get configmaps in namespace kvtier-system is missing" in text


def test_unknown_settings_do_not_contradict_the_controller() -> None:
    """With default settings no volume is allowed. Only the controller knows the real ones."""
    policy = policy_document(tiers=[*policy_document()["spec"]["tiers"], _host_tier()])
    pod = pods.running(pods.bare_pod())
    pod["spec"]["containers"] = [pod_objects.engine()]
    cluster = installed((PODS, pod), policy=policy)
    allowed = why(cluster).now
    assert allowed is not None
    assert allowed.reason == SkipReason.NOT_ACCEPTED.value, "the settings allow no volume"
    cluster.forbidden = frozenset({CONFIG_MAPS})
    unknown = why(cluster).now
    assert unknown is not None
    assert unknown.result == "Attached"


def _host_tier() -> dict[str, Any]:
    return pods.file_tier("disk", "Node")


def test_a_required_right_and_a_missing_pod_end_the_command() -> None:
    cluster = installed((PODS, pods.running(pods.bare_pod())))
    with pytest.raises(CommandError, match="Pod nope does not exist in namespace serving"):
        why(cluster, "nope")
    cluster.forbidden = frozenset({POLICIES})
    expected = r"the right to list kvtierpolicies\.kvtier\.io in namespace serving is missing"
    with pytest.raises(CommandError, match=expected):
        why(cluster)


def test_a_pod_that_ended_is_no_puzzle() -> None:
    pod = pods.running(pods.bare_pod())
    pod["status"]["phase"] = "Succeeded"
    assert why(installed((PODS, pod))).state == "Finished"


def test_annotations_that_others_wrote_cannot_break_the_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pod = pods.running(pods.injected_pod())
    pod["metadata"]["annotations"]["kvtier.io/notes"] = '["[red]x[/red]", 7, null]'
    found = why(installed((PODS, pod)))
    show(found)
    assert "note: [red]x[/red]" in capsys.readouterr().out
    pod["metadata"]["annotations"]["kvtier.io/notes"] = "[" * 5000
    assert why(installed((PODS, pod))).notes == ()


def test_what_was_injected_is_taken_out_before_the_webhook_is_asked() -> None:
    pod = pods.running(pods.injected_pod())
    again = recreated(pod)
    names = [each["name"] for each in again["spec"].get("initContainers", ())]
    assert names == []
    assert again["spec"]["volumes"] == []
    assert "nodeName" not in again["spec"]
    assert "uid" not in again["metadata"]
    assert again["metadata"]["annotations"] == {}
    assert pod["metadata"]["annotations"], "the pod itself stays as it is"


def test_a_name_of_the_pods_own_that_kvtier_uses_is_a_reason() -> None:
    """Such a volume was not injected, so it is there when the pod is created again."""
    pod = pods.running(pods.bare_pod())
    pod["spec"]["containers"] = [pod_objects.engine()]
    pod["spec"]["volumes"] = [{"name": "kvtier-run", "emptyDir": {}}]
    found = why(installed((PODS, pod))).now
    assert found is not None
    assert found.result == "Skipped"
    assert "kvtier-run" in found.message
