"""Keys of file tiers with a real kubelet: a Secret that is missing, appears, changes and vanishes
under a pod that serves all the while.
"""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip(
    "helm_python", reason="charts are installed by Helm's own code: helm-python-sdk"
)

DIRECTORY = "/var/lib/kvtier/tiers/disk"
KEYS = "/etc/kvtier/isolation"
SECONDS = 120
"""How long the kubelet may take to change a mounted Secret, and the controller to poll."""


def secret(**entries: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "kv-keys"},
        "stringData": entries,
    }


def test_a_secret_is_followed_under_a_serving_pod(operator_on_node: Any, nodes: ModuleType) -> None:
    import stub_engine_pods as engines

    with operator_on_node.namespace("keys") as place:

        def command(*words: str) -> Any:
            """A command of the sidecar's image in the sidecar."""
            (pod,) = place.pods()
            options = ("-n", place.namespace, "exec", pod["metadata"]["name"], "-c", "kvtier-tierd")
            text = operator_on_node.cluster.kubectl(*options, "--", "kvtier", *words, "--json")
            return json.loads(text)

        def seals() -> dict[str, int]:
            found: dict[str, int] = {}
            for namespace in command("inspect", DIRECTORY)["namespaces"]:
                for seal, number in namespace["sampledSeals"].items():
                    found[seal] = found.get(seal, 0) + number
            return found

        def healthy(status: str, reason: str) -> None:
            nodes.wait_for(
                f"TiersHealthy is {status}, {reason}",
                lambda: (
                    (found := place.condition("TiersHealthy")).get("status") == status
                    and found.get("reason") == reason
                ),
                SECONDS,
            )

        # In memory: the node offers no ephemeral storage.
        volume = {"emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}}
        files = engines.files(volume, sharing="Pod")
        isolation = {"keySecretRef": {"name": "kv-keys"}, "encryption": "AES256GCM"}
        place.apply_policy(engines.policy(engines.memory(), files, isolation=isolation))
        place.apply(engines.deployment())

        # Without the Secret the pod starts, and RAM is served.
        pod = place.ready()
        assert engines.injected(pod)
        place.attached(pod)
        assert engines.do(pod, "store", n=4)["done"] == 4
        assert engines.do(pod, "load", n=4)["done"] == 4
        healthy("False", "KeyMissing")
        assert "does not exist, or is empty" in place.condition("TiersHealthy")["message"]

        # It appears: what RAM holds is written, encrypted.
        place.apply(secret(first="1" * 64))
        healthy("True", "Healthy")
        nodes.wait_for("objects are written", lambda: seals().get("AES256GCM, key first"), 60)

        # Rotation, in two steps.
        place.apply(secret(first="1" * 64, second="2" * 64, current="first"))
        place.apply(secret(first="1" * 64, second="2" * 64, current="second"))
        number = 100

        def written_with_the_new_key() -> bool:
            nonlocal number
            engines.do(pod, "store", n=1, from_=number)
            number += 1
            return "AES256GCM, key second" in seals()

        nodes.wait_for("the new key is used", written_with_the_new_key, SECONDS, 2)
        assert "AES256GCM, key first" in seals()
        verified = command("verify", DIRECTORY, "--keys", KEYS)
        assert verified["verified"] == sum(seals().values())
        assert (verified["untrusted"], verified["corrupt"]) == (0, 0)

        # It is deleted: the tier is suspended, nothing is removed, the pod is the same.
        held = sum(seals().values())
        operator_on_node.cluster.kubectl("-n", place.namespace, "delete", "secret", "kv-keys")
        healthy("False", "KeyMissing")
        assert sum(seals().values()) >= held
        assert place.ready()["metadata"]["uid"] == pod["metadata"]["uid"]
        assert engines.seen(pod)["wrong"] == 0
