"""End-to-end run on a real cluster, from `helm install` to a reloaded cache after failures.

1. The chart is installed; the operator runs as pods with the chart's own rights.
2. A policy with a RAM tier and a file tier on a directory of the node is applied.
3. A Deployment of the real vLLM server, its command unchanged, starts with tiers. The same
   Deployment in a namespace without the label has none; all answers are compared with its answers.
4. Prompts A, B and C, which share a prefix, are computed; once the engine's own cache is emptied
   they come from RAM.
5. The engine's container is killed and started again inside its pod: from RAM again.
6. The pod is deleted and replaced: from the file tier.
7. `kubectl apply` of another weight and time limit: the running engine decides
   differently and its pod does not change.
8. `kubectl get kvtp` and `kubectl describe kvtp` show the result, and every panel of the dashboards
   has data in a Prometheus that scraped engine, tierd and operator.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import operators
import yaml
from charts import Release, without_definition
from demo_dashboard import DashboardData
from nodes import make_namespace, ok, wait_for
from rest import Api
from serving import EnginePod, ask, container_status, engine_deployment
from stub_engine_pods import STORAGE_GID

from kvtier.cli.demo_display import Display
from kvtier.harness.tiny_model import TinyLlama, prompt, write_llama

CHUNK_TOKENS = 128
SHARED_CHUNKS, OWN_CHUNKS = 4, 2
REST_TOKENS = 17
"""Shorter than a block, so that a reload and a hit in the GPU cache cover the same tokens."""
NEW_TOKENS = 16
PROMPT_TOKENS = (SHARED_CHUNKS + OWN_CHUNKS) * CHUNK_TOKENS
SHARED_TOKENS = SHARED_CHUNKS * CHUNK_TOKENS
OBJECTS = SHARED_CHUNKS + 3 * OWN_CHUNKS
RAM, FILE = "ram", "disk"
POLICY, APP, WITH_TIERS, WITHOUT = "chat", "chat", "serving", "plain"


@dataclass(frozen=True, slots=True)
class Row:
    """One answered prompt."""

    stage: str
    prompt: str
    ram: int
    file: int
    first_token_seconds: float
    equal: bool


@dataclass(slots=True)
class KubectlOutput:
    """What `kubectl` says at the end."""

    get: str = ""
    describe: str = ""


@dataclass(slots=True)
class EndToEndRun:
    """The run on ``cluster``, whose node is this machine. ``home`` has the model, images and
    the file tier. ``images_loaded``: the images are on the node already.
    """

    cluster: Any
    home: Path
    display: Display
    images_loaded: bool = False
    rows: list[Row] = field(default_factory=list)
    output: KubectlOutput = field(default_factory=KubectlOutput)
    expected: dict[str, tuple[int, ...]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    panels: list[tuple[str, str, str, str]] = field(default_factory=list)
    dashboards: DashboardData | None = None

    def run(self) -> dict[str, object]:
        """Runs every step in order. A failed check raises ``AssertionError`` with what was seen."""
        start = time.monotonic()
        model = write_llama(self.home / "model", seed=0)
        api = Api(self.cluster.kubeconfig, self.cluster.context, WITH_TIERS)
        (directory,) = operators.storage(self.home, "tier")
        pod = EnginePod(self.cluster, api, WITH_TIERS, APP, model)
        without_definition(self.cluster)
        self.dashboards = DashboardData(self.home / "prometheus", api, pod, POLICY)
        with Release(self.cluster.kubeconfig, self.cluster.context) as release:
            try:
                self._install(release, directory)
                self._start(api, pod, model, directory)
                self.dashboards.follow()
                self._compute_and_reload(pod)
                self._restart_container(pod)
                self._replace_pod(pod)
                self._tune(pod, directory)
                self._tell(api)
                self.panels = self.dashboards.rows()
            finally:
                self.dashboards.close()
                self._remove(release, api)
        self.facts["seconds"] = round(time.monotonic() - start, 1)
        return self._result()

    def _install(self, release: Release, directory: Path) -> None:
        with self.display.step(
            "Making the operator's and the sidecar's image, and putting them on the node"
        ):
            if not self.images_loaded:
                operators.load_images(self.cluster)
        allowed = [{"namespaces": ["*"], "hostPath": str(directory)}]
        with self.display.step(
            "helm install: operator and webhook run as pods, with the chart's own rights"
        ):
            operators.install(self.cluster, release, {**operators.QUICK, "allowedVolumes": allowed})
        version = json.loads(self.cluster.kubectl("version", "-o", "json"))["serverVersion"][
            "gitVersion"
        ]
        self.facts["kubernetes_version"] = version

    def _start(self, api: Api, pod: EnginePod, model: Path, directory: Path) -> None:
        make_namespace(api, WITH_TIERS, {"kvtier.io/inject": "enabled"})
        make_namespace(api, WITHOUT)
        with self.display.step("kubectl apply of a policy: RAM, and a directory of the node"):
            self._apply(policy(directory))
            wait_for(
                "the policy is accepted", lambda: self._condition(api, "Accepted") == "True", 30
            )
        with self.display.step(
            "A Deployment of vLLM, and beside it one without KVTier for reference"
        ):
            for namespace in (WITH_TIERS, WITHOUT):
                self.cluster.kubectl(
                    "-n",
                    namespace,
                    "apply",
                    "-f",
                    "-",
                    stdin=json.dumps(engine_deployment(model, APP)),
                )
            plain = EnginePod(self.cluster, api, WITHOUT, APP, model)
            found = pod.wait_ready()
            reference = plain.wait_ready()
            self._wait_attached(pod)
        self.facts["command_untouched"] = _command(found) == _command(reference)
        self.facts["engine_memory_limit_unchanged"] = (
            pod.memory_limit() == plain.memory_limit() == 4 << 30
        )
        with self.display.step("Asking the engine without KVTier"):
            for name, tokens in prompts().items():
                self.expected[name], loaded, _ = ask(plain.client(), tokens, NEW_TOKENS)
                if loaded:
                    raise AssertionError(f"the reference loaded {loaded}")
        self.cluster.kubectl("-n", WITHOUT, "delete", "deployment", APP, "--wait=false")

    def _compute_and_reload(self, pod: EnginePod) -> None:
        with self.display.step(
            "Computing three prompts, then asking again with the engine's own cache emptied"
        ):
            self._ask(pod, "computed", "A", "B", "C")
            self._wait_stored(pod)
            self._ask(pod, "cache emptied", "A", "B")

    def _restart_container(self, pod: EnginePod) -> None:
        before = pod.now()["metadata"]["uid"]
        with self.display.step(
            "Killing the engine's container; the kubelet starts it again inside its pod"
        ):
            pod.kill_container()
            after = pod.wait_ready(restarts=1)
            self._wait_attached(pod)
        if after["metadata"]["uid"] != before:
            raise AssertionError("the pod was replaced, not its container")
        self._ask(pod, "container restarted", "A", "B")

    def _replace_pod(self, pod: EnginePod) -> None:
        before = pod.now()["metadata"]
        with self.display.step("Deleting the pod; the Deployment replaces it"):
            self.cluster.kubectl("-n", WITH_TIERS, "delete", "pod", before["name"], "--wait=false")
            pod.wait_ready(other_than=before["uid"])
            self._wait_attached(pod)
        if self.dashboards is not None:
            # Before its loads, so that rates see them.
            self.dashboards.follow()
        self._ask(pod, "pod replaced", "A", "B")

    def _tune(self, pod: EnginePod, directory: Path) -> None:
        before, status = pod.now(), pod.status(POLICY)
        with self.display.step("kubectl apply of another weight and time limit"):
            start = time.monotonic()
            self._apply(policy(directory, weight=10, seconds=2))
            generation = status["appliedGeneration"]
            wait_for(
                "tierd follows",
                lambda: pod.status(POLICY)["appliedGeneration"] > generation,
                150,
                period=0.1,
            )
            self.facts["live_change_seconds"] = round(time.monotonic() - start, 2)
        # A hit of 512 tokens in RAM now outweighs one of 768 that needs the file tier.
        self._ask(pod, "weight 100 -> 10", "C")
        after = pod.now()
        self.facts["pod_untouched"] = after["metadata"]["uid"] == before["metadata"]["uid"] and all(
            container_status(after, name)["restartCount"]
            == container_status(before, name)["restartCount"]
            for name in ("vllm", "kvtier-tierd")
        )

    def _tell(self, api: Api) -> None:
        with self.display.step("kubectl get kvtp, kubectl describe kvtp"):
            wait_for(
                "the policy is Ready, its pod attached and its tiers healthy",
                lambda: all(
                    self._condition(api, kind) == "True"
                    for kind in ("Ready", "Attached", "TiersHealthy")
                ),
                60,
            )
            wait_for(
                "the pod counts as tuned",
                lambda: self._policy(api)["status"]["pods"].get("tuned") == 1,
                60,
            )
            options = ("-n", WITH_TIERS)
            self.output.get = self.cluster.kubectl(*options, "get", "kvtp", "-o", "wide")
            self.output.describe = self.cluster.kubectl(*options, "describe", "kvtp", POLICY)
            self.facts["attached_pods"] = self._policy(api)["status"]["pods"]["attached"]

    def _remove(self, release: Release, api: Api) -> None:
        release.uninstall()
        for namespace in (WITH_TIERS, WITHOUT):
            api.request("DELETE", f"/api/v1/namespaces/{namespace}")
        for namespace in (WITH_TIERS, WITHOUT):
            wait_for(
                "namespaces go",
                lambda path=f"/api/v1/namespaces/{namespace}": api.request("GET", path)[0] == 404,
                120,
            )

    def _ask(self, pod: EnginePod, stage: str, *names: str) -> None:
        """Sends the prompts one by one, each with an empty GPU cache."""
        client = pod.client()
        for name in names:
            client.reset_prefix_cache()
            tokens, loaded, seconds = ask(client, prompts()[name], NEW_TOKENS)
            equal = tokens == self.expected[name]
            self.rows.append(
                Row(stage, name, loaded.get(RAM, 0), loaded.get(FILE, 0), seconds, equal)
            )

    def _wait_attached(self, pod: EnginePod) -> None:
        """Waits for the tiers. An engine serves before they are attached."""
        try:
            wait_for("engine and tierd came together", lambda: pod.attached(POLICY), 60)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{pod.explain()}") from None

    def _wait_stored(self, pod: EnginePod) -> None:
        def stored() -> bool:
            status = pod.status(POLICY)
            disk = next(tier for tier in status["tiers"] if tier["name"] == FILE)
            return bool(disk["objects"] >= OBJECTS and status["pendingStores"] == 0)

        wait_for(f"{OBJECTS} objects lie in the file tier", stored, 60)

    def _apply(self, body: dict[str, Any]) -> None:
        self.cluster.kubectl("-n", WITH_TIERS, "apply", "-f", "-", stdin=yaml.safe_dump(body))

    def _policy(self, api: Api) -> dict[str, Any]:
        path = f"/apis/kvtier.io/v1alpha1/namespaces/{WITH_TIERS}/kvtierpolicies/{POLICY}"
        return dict(ok(api.request("GET", path)))

    def _condition(self, api: Api, kind: str) -> str:
        conditions = self._policy(api).get("status", {}).get("conditions", ())
        return next((str(each["status"]) for each in conditions if each["type"] == kind), "")

    def _result(self) -> dict[str, object]:
        def sums(stage: str, tier: str) -> int:
            return sum(int(getattr(row, tier)) for row in self.rows if row.stage == stage)

        return {
            "identical_tokens": all(row.equal for row in self.rows),
            "loaded_tokens_ram": sums("cache emptied", "ram"),
            "loaded_tokens_ram_after_container_restart": sums("container restarted", "ram"),
            "loaded_tokens_file_after_replacement": sums("pod replaced", "file"),
            "loaded_tokens_file_after_live_change": sums("weight 100 -> 10", "file"),
            "loaded_tokens_ram_after_live_change": sums("weight 100 -> 10", "ram"),
            **self.facts,
        }


def prompts() -> dict[str, list[int]]:
    """A, B and C: a shared prefix, then tokens of their own, then less than a block."""
    vocabulary = TinyLlama().vocabulary
    prefix = prompt(SHARED_TOKENS, 1, vocabulary)
    return {
        name: prefix + prompt(PROMPT_TOKENS - SHARED_TOKENS + REST_TOKENS, seed, vocabulary)
        for seed, name in enumerate("ABC", start=2)
    }


def policy(directory: Path, weight: int = 100, seconds: int = 5) -> dict[str, Any]:
    """RAM and a directory. ``Weighted``, because a tiny model recomputes faster than it loads."""
    return {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierPolicy",
        "metadata": {"name": POLICY},
        "spec": {
            "podSelector": {"matchLabels": {"app": APP}},
            "chunkTokens": CHUNK_TOKENS,
            "minLoadTokens": CHUNK_TOKENS,
            "selection": "Weighted",
            "security": {"storageGid": STORAGE_GID},
            "resources": {"daemon": {"requests": {"cpu": "100m"}, "limits": {"cpu": "2"}}},
            "tiers": [
                {"name": RAM, "memory": {"capacity": "64Mi"}},
                {
                    "name": FILE,
                    "loadWeight": weight,
                    "loadTimeoutSeconds": seconds,
                    "fileSystem": {
                        "capacity": "1Gi",
                        "minFree": "0",  # however full this machine's disk is
                        "sharing": "Node",
                        "volume": {"hostPath": {"path": str(directory)}},
                    },
                },
            ],
        },
    }


def _command(pod: dict[str, Any]) -> list[str]:
    container = next(each for each in pod["spec"]["containers"] if each["name"] == "vllm")
    return [*container["command"], *container["args"]]
