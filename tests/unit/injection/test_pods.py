"""Pods are decoded once, from JSON or from parsed documents, into the fields that are read."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from tests.support import pod_objects

from kvtier_operator.api.pods import (
    ContainerState,
    InvalidObjectError,
    Pod,
    PodSpec,
    decode,
    decode_pod,
)

DOCUMENT: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "chat-0",
        "namespace": "serving",
        "uid": "u",
        "labels": {"app": "chat"},
        "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "A", "name": "a", "uid": "1"},
            {"apiVersion": "apps/v1", "kind": "B", "name": "b", "uid": "2", "controller": True},
        ],
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "managedFields": [{"manager": "kubectl"}],
    },
    "spec": {
        "initContainers": [{"name": "mesh", "restartPolicy": "Always"}],
        "containers": [
            {
                "name": "vllm",
                "env": [
                    {"name": "A", "value": "1"},
                    {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                ],
                "resources": {"limits": {"memory": "8Gi", "nvidia.com/gpu": 1}},
                "securityContext": {"runAsUser": 0, "seLinuxOptions": {"level": "s0"}},
                "livenessProbe": {"httpGet": {"port": "http"}},
            }
        ],
        "volumes": [
            {"name": "token", "projected": {"sources": [{"configMap": {"name": "ca"}}]}},
            {"name": "labels", "downwardAPI": {"items": []}},
            {"name": "disk", "persistentVolumeClaim": {"claimName": "kv"}},
        ],
        "overhead": {"cpu": "250m"},
        "hostIPC": True,
        "hostUsers": False,
    },
    "status": {
        "podIP": "10.0.0.1",
        "hostIP": "10.1.0.1",
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True", "lastProbeTime": None}],
        "containerStatuses": [
            {
                "name": "vllm",
                "imageID": "sha256:1",
                "restartCount": 2,
                "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
            }
        ],
    },
}


def as_json(document: Any) -> bytes:
    return json.dumps(document).encode()


def test_fields_have_the_names_of_the_kubernetes_api() -> None:
    pod = decode_pod(as_json(DOCUMENT))
    (vllm,) = pod.spec.containers
    assert (pod.metadata.name, pod.metadata.labels) == ("chat-0", {"app": "chat"})
    assert pod.is_terminating
    assert pod.controller is not None
    assert pod.controller.name == "b"
    assert [each.name for each in pod.spec.all_containers] == ["mesh", "vllm"]
    assert pod.spec.init_containers[0].is_sidecar
    assert [each.value_from is None for each in vllm.env] == [True, False]
    assert vllm.resources.limits == {"memory": "8Gi", "nvidia.com/gpu": 1}
    assert (vllm.security_context.run_as_user, vllm.security_context.run_as_group) == (0, None)
    assert (pod.spec.host_ipc, pod.spec.host_users, pod.spec.host_network) == (True, False, False)
    projected, labels, disk = pod.spec.volumes
    assert projected.projected is not None
    assert projected.projected.sources[0].config_map is not None
    assert projected.projected.sources[0].config_map.name == "ca"
    assert [each.is_read_only for each in pod.spec.volumes] == [True, True, False]
    assert labels.downward_api is not None
    assert disk.persistent_volume_claim is not None
    assert disk.persistent_volume_claim.claim_name == "kv"


def test_status_has_the_names_of_the_kubernetes_api() -> None:
    status = decode_pod(DOCUMENT).status
    assert (status.pod_ip, status.host_ip, status.phase) == ("10.0.0.1", "10.1.0.1", "Running")
    ready, vllm = status.condition("Ready"), status.container("vllm")
    assert ready is not None
    assert ready.status == "True"
    assert vllm is not None
    assert (vllm.image_id, vllm.restart_count, vllm.has_run) == ("sha256:1", 2, True)
    assert vllm.state == ContainerState()
    assert vllm.last_state.terminated is not None
    assert vllm.last_state.terminated.exit_code == 137
    assert status.condition("Initialized") is None
    assert status.container("tierd") is None


def test_json_and_parsed_documents_give_the_same_pod() -> None:
    before = copy.deepcopy(DOCUMENT)
    assert decode_pod(as_json(DOCUMENT)) == decode_pod(DOCUMENT)
    assert before == DOCUMENT


@pytest.mark.parametrize("document", [{}, {"metadata": {}, "spec": {}, "status": {}}])
def test_fields_that_are_missing_have_their_defaults(document: dict[str, Any]) -> None:
    assert decode_pod(document) == decode_pod(as_json(document)) == Pod()


def test_null_is_the_default() -> None:
    nulls = {
        "metadata": {"creationTimestamp": None, "labels": None},
        "spec": {"containers": None, "resources": None},
        "status": None,
    }
    assert decode_pod(nulls) == decode_pod(as_json(nulls)) == Pod()
    assert nulls["status"] is None


def test_a_part_of_a_pod_can_be_decoded_alone() -> None:
    assert decode(DOCUMENT["spec"], PodSpec) == decode_pod(DOCUMENT).spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metadata": 1}, "metadata: Invalid value: expected `object`, got `int`"),
        (
            {"spec": {"containers": [{"name": "x", "command": [1]}]}},
            "spec.containers[0].command[0]: Invalid value: expected `str`, got `int`",
        ),
        (
            {"spec": {"hostNetwork": "yes"}},
            "spec.hostNetwork: Invalid value: expected `bool`, got `str`",
        ),
    ],
)
def test_a_wrong_type_is_an_error_that_names_the_field(
    changes: dict[str, Any], message: str
) -> None:
    for document in ({**DOCUMENT, **changes}, as_json({**DOCUMENT, **changes})):
        with pytest.raises(InvalidObjectError) as raised:
            decode_pod(document)
        assert str(raised.value) == message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_malformed_documents_raise_the_same_error(content: bytes) -> None:
    with pytest.raises(InvalidObjectError):
        decode_pod(content)


def test_pods_of_other_tests_can_be_decoded() -> None:
    pod = decode_pod(pod_objects.pod(hostNetwork=True))
    assert (pod.metadata.generate_name, pod.spec.host_network) == ("chat-", True)
