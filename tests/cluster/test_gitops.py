"""Policies under kubectl, Flux, Argo CD and Helm, on a real API server with a running controller:
an unchanged file is no change, and waiting for a policy ends.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support import controllers
from tests.support.controllers import condition, file_tier, policy, running, settings, until
from tests.support.gitops import comparable, readiness, three_way_prediction
from tests.support.policies import complete_policy

from kvtier_operator.kube.client import ApiClient, connect
from kvtier_operator.kube.resources import Object

REPOSITORY = Path(__file__).resolve().parents[2]
EVERYTHING_ALLOWED = [
    {"namespaces": ["*"], "hostPath": "/"},
    {"namespaces": ["*"], "nfs": {"server": "nas.example", "exportPrefix": "/"}},
]


@pytest.fixture(scope="session")
def cluster(kubernetes_cluster: Any) -> Any:
    async def prepare() -> None:
        async with connect(kubernetes_cluster.kubeconfig, kubernetes_cluster.context) as client:
            await controllers.install_definition(client)

    asyncio.run(prepare())
    return kubernetes_cluster


@dataclass
class Repository:
    """A directory of one policy's file, and what tools do with it in a namespace."""

    cluster: Any
    client: ApiClient
    namespace: str
    file: Path

    def write(self, document: dict[str, Any]) -> None:
        metadata = {**document["metadata"], "namespace": self.namespace}
        self.file.write_text(yaml.safe_dump({**document, "metadata": metadata}))

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load(self.file.read_text())
        return found

    async def kubectl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [
            str(self.cluster.assets / "kubectl"),
            f"--kubeconfig={self.cluster.kubeconfig}",
            f"--context={self.cluster.context}",
            f"--namespace={self.namespace}",
            *arguments,
        ]
        return await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=120, check=False
        )

    async def apply(self, *flags: str) -> str:
        done = await self.kubectl("apply", *flags, "-f", str(self.file))
        assert done.returncode == 0, done.stderr
        return done.stdout

    async def diff(self, *flags: str) -> str:
        """The output of ``kubectl diff``, which exits with 1 if there is a difference."""
        done = await self.kubectl("diff", *flags, "-f", str(self.file))
        assert done.returncode in (0, 1), done.stderr
        assert (done.returncode == 1) == bool(done.stdout), done.stdout
        return done.stdout

    async def live(self) -> dict[str, Any]:
        name = self.document["metadata"]["name"]
        done = await self.kubectl("get", "kvtp", name, "-o", "json", "--show-managed-fields")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    async def observed(self) -> Object:
        """The policy, once the controller has written its status."""

        async def written() -> Object | None:
            found = await self.live()
            seen = (found.get("status") or {}).get("observedGeneration")
            return found if seen == found["metadata"]["generation"] else None

        found: Object = await until("the status is written", written)
        return found

    async def waits(self) -> subprocess.CompletedProcess[str]:
        name = self.document["metadata"]["name"]
        return await self.kubectl("wait", "--for=condition=Ready", f"kvtp/{name}", "--timeout=60s")


Scenario = Callable[[Repository], Awaitable[None]]


def in_cluster(cluster: Any, file: Path, scenario: Scenario) -> None:
    async def run() -> None:
        async with connect(cluster.kubeconfig, cluster.context) as client:
            namespace = await controllers.make_namespace(client, "gitops")
            chosen = settings(namespace, allowedVolumes=EVERYTHING_ALLOWED)
            async with running(client, chosen):
                await scenario(Repository(cluster, client, namespace, file))
            await controllers.drop_namespace(client, namespace)

    asyncio.run(run())


def _policies() -> list[Any]:
    found = [pytest.param(complete_policy(), id="every-field")]
    for path in sorted((REPOSITORY / "examples").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] == "KVTierPolicy":
                found.append(pytest.param(document, id=path.stem))
    return found


@pytest.mark.parametrize("document", _policies())
def test_an_unchanged_file_is_no_change_to_any_tool(
    cluster: Any, tmp_path: Path, document: dict[str, Any]
) -> None:
    async def scenario(place: Repository) -> None:
        place.write(document)
        assert "created" in await place.apply()
        live = await place.observed()
        assert "unchanged" in await place.apply()
        assert await place.diff() == ""
        # Argo CD with client-side apply and its default difference.
        assert comparable(three_way_prediction(place.document, live)) == comparable(live)
        # Flux, Helm 4 and Argo CD with server-side apply: a dry run returns the object in force.
        for tool in ("kustomize-controller", "helm", "argocd-controller"):
            await place.apply("--server-side", "--force-conflicts", f"--field-manager={tool}")
            before = await place.observed()
            await place.apply("--server-side", f"--field-manager={tool}")
            after = await place.live()
            assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
            assert await place.diff("--server-side", f"--field-manager={tool}") == ""
            done = await place.kubectl(
                "apply", "--server-side", f"--field-manager={tool}", "--dry-run=server",
                "-o", "json", "-f", str(place.file),
            )  # fmt: skip
            assert comparable(json.loads(done.stdout)) == comparable(after), done.stderr
        assert after["metadata"]["generation"] == live["metadata"]["generation"]

    in_cluster(cluster, tmp_path / "policy.yaml", scenario)


@pytest.mark.parametrize("flags", [(), ("--server-side",)], ids=["client-side", "server-side"])
def test_a_field_that_is_taken_out_of_the_file_is_taken_out_of_the_policy(
    cluster: Any, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    async def scenario(place: Repository) -> None:
        disk = file_tier("disk", {"hostPath": {"path": "/mnt/kv"}}, "Node", loadWeight=70)
        place.write(policy(place.namespace, tiers=[disk], minLoadTokens=640))
        await place.apply(*flags)
        disk.pop("loadWeight")
        place.write(policy(place.namespace, tiers=[disk]))
        lines = [line.split() for line in (await place.diff(*flags)).splitlines()]
        assert ["-", "loadWeight:", "70"] in lines
        await place.apply(*flags)
        live = await place.observed()
        assert live["spec"]["tiers"] == place.document["spec"]["tiers"]
        assert live["spec"]["minLoadTokens"] == 512
        assert await place.diff(*flags) == ""

    in_cluster(cluster, tmp_path / "policy.yaml", scenario)


def test_waiting_for_a_policy_ends_without_pods_and_not_before_its_change_is_applied(
    cluster: Any, tmp_path: Path
) -> None:
    async def scenario(place: Repository) -> None:
        place.write(policy(place.namespace))
        await place.apply("--server-side")
        done = await place.waits()
        assert (done.returncode, done.stdout.strip()) == (
            0,
            "kvtierpolicy.kvtier.io/chat condition met",
        )
        before = await place.observed()
        assert condition(before, "Attached")["status"] == "Unknown"
        assert readiness(before) == "Current"
        place.write(policy(place.namespace, minLoadTokens=640))
        await place.apply("--server-side")
        # A status that is about an older generation counts as in progress.
        stale = {**await place.live(), "status": before["status"]}
        assert stale["metadata"]["generation"] == before["metadata"]["generation"] + 1
        assert readiness(stale) == "InProgress"
        assert (await place.waits()).returncode == 0
        after = await place.observed()
        assert readiness(after) == "Current"
        assert after["status"]["liveGeneration"] == before["status"]["liveGeneration"] + 1

    in_cluster(cluster, tmp_path / "policy.yaml", scenario)


def test_a_policy_that_is_not_accepted_is_not_ready(cluster: Any, tmp_path: Path) -> None:
    async def scenario(place: Repository) -> None:
        export = {"nfs": {"server": "not.allowed.example", "path": "/kv"}}
        place.write(policy(place.namespace, tiers=[file_tier("shared", export)]))
        await place.apply("--server-side")
        found = await place.observed()
        assert condition(found, "Ready")["status"] == "False"
        assert readiness(found) == "InProgress"

    in_cluster(cluster, tmp_path / "policy.yaml", scenario)


def test_a_policy_whose_claim_binds_on_first_use_is_ready(cluster: Any, tmp_path: Path) -> None:
    """A tool that installs policy and engine in this order would otherwise wait for a pod that it
    has not created.
    """

    async def scenario(place: Repository) -> None:
        classes = "/apis/storage.k8s.io/v1/storageclasses"
        for mode in ("WaitForFirstConsumer", "Immediate"):
            name = f"{place.namespace}-{mode.lower()}"
            body = {
                "apiVersion": "storage.k8s.io/v1",
                "kind": "StorageClass",
                "metadata": {"name": name},
                "provisioner": "example.com/none",
                "volumeBindingMode": mode,
            }
            place.file.write_text(json.dumps(body))
            await place.apply()
            claim = {"claimTemplate": {"storageClassName": name, "accessModes": ["ReadWriteMany"]}}
            place.write(policy(place.namespace, tiers=[file_tier("disk", claim)]))
            await place.apply()
            found = await place.observed()
            storage = condition(found, "StorageReady")
            if mode == "Immediate":
                assert (storage["status"], storage["reason"]) == ("Unknown", "ClaimPending")
                assert condition(found, "Ready")["status"] == "Unknown"
            else:
                assert (storage["status"], storage["reason"]) == ("True", "BindsOnFirstUse")
                assert (await place.waits()).returncode == 0
                assert readiness(found) == "Current"
            await place.kubectl("delete", "kvtp", "chat")
            await place.kubectl("delete", "--raw", f"{classes}/{name}")

    in_cluster(cluster, tmp_path / "policy.yaml", scenario)


def test_a_definition_of_an_earlier_release_is_served_without_repeated_writes(
    cluster: Any, tmp_path: Path
) -> None:
    """The API server drops what an earlier definition lacks, of the status too. The status in force
    then differs from the computed one at each reconcile, which must not become a loop of writes.
    """

    async def scenario(place: Repository) -> None:
        found = await place.client.get(controllers.DEFINITIONS, None, "kvtierpolicies.kvtier.io")
        schema = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
        del schema["spec"]["properties"]["minLoadTokens"]
        del schema["status"]["properties"]["liveGeneration"]
        versions = found["spec"]["versions"]
        versions[0]["additionalPrinterColumns"] = []
        patch = {"spec": {"versions": versions}}
        try:
            await place.client.patch(
                controllers.DEFINITIONS, None, "kvtierpolicies.kvtier.io", patch
            )
            place.write(policy(place.namespace, selection="Weighted"))

            async def dropped() -> bool:
                await place.apply("--server-side")
                return "minLoadTokens" not in (await place.live())["spec"]

            await until("the earlier definition is served", dropped)
            await place.waits()
            before = await place.observed()
            assert condition(before, "Ready")["status"] == "True"
            await asyncio.sleep(3)
            after = await place.live()
            assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
        finally:
            await controllers.install_definition(place.client)

    in_cluster(cluster, tmp_path / "policy.yaml", scenario)
