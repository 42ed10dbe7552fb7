"""Cost of the controller with 500 policies and 5,000 pods, compared with 50 pods.

A real API server holds the objects, and the controller runs as its own process with default
settings. The pods are injected and do not report, because no kubelet runs them. All policies are
in one namespace. Measured are the calls for one change of a policy, the memory, and the start.
The ratio is the calls per change with many pods divided by those with few; 1 means that the cost
does not depend on the size of the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cluster"))
import clusters

# The repository's tests, and not a package of that name that another distribution has installed.
sys.modules["tests"] = ModuleType("tests")
sys.modules["tests"].__path__ = [str(Path(__file__).resolve().parents[1] / "tests")]
from tests.support import controllers  # noqa: E402

from common import options, progress, report  # noqa: E402
from kvtier_operator.api import names  # noqa: E402
from kvtier_operator.kube.client import ApiClient, connect  # noqa: E402
from kvtier_operator.kube.resources import PODS, POLICIES, ApiError, Kind  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
FEW_PODS = 50
CHANGES = 40
LOADERS = 8
CONVERGENCE_SECONDS = 240.0
READS = ("get", "list", "watch")


@dataclass(frozen=True)
class Measured:
    """One row. ``calls`` per change; ``lists`` of all changes; ``seconds`` until the status."""

    pods: int
    first_seconds: float
    restart_seconds: float
    restart_writes: float
    calls: float
    lists: float
    change_milliseconds: float
    cpu_milliseconds: float
    memory: float


def main() -> None:
    """Loads a cluster, twice, and prints the table."""
    arguments = options(
        __doc__.splitlines()[0],
        lambda parser: parser.add_argument("--policies", type=int, default=500),
        lambda parser: parser.add_argument("--pods", type=int, default=5000),
    )
    with tempfile.TemporaryDirectory(prefix="kvtier-benchmark-") as home:
        try:
            with clusters.cluster(Path(home) / "cluster") as cluster:
                rows = asyncio.run(measure(arguments, cluster, Path(home)))
        except clusters.NoClusterError as error:
            print(f"skipped: {error}")
            return
    progress("")
    few, many = rows
    report(
        arguments.json,
        f"The controller with {arguments.policies} policies, settings as they are by default",
        (
            "pods",
            "converged s",
            "restart s",
            "restart writes",
            "calls/change",
            "lists",
            "change ms",
            "CPU ms/change",
            "MiB",
        ),
        [
            (
                row.pods,
                f"{row.first_seconds:.1f}",
                f"{row.restart_seconds:.1f}",
                f"{row.restart_writes:.0f}",
                f"{row.calls:.2f}",
                f"{row.lists:.0f}",
                f"{row.change_milliseconds:.0f}",
                f"{row.cpu_milliseconds:.1f}",
                f"{row.memory:.0f}",
            )
            for row in rows
        ],
        many.calls / few.calls,
        f"calls per change with {many.pods} pods over those with {few.pods}; 1 is constant",
    )


async def measure(arguments: argparse.Namespace, cluster: Any, home: Path) -> list[Measured]:
    """A row with few pods, a row with many."""
    async with connect(cluster.kubeconfig, cluster.context) as client:
        await controllers.install_definition(client)
        namespace = await controllers.make_namespace(client, "scale")
        await account(client, namespace)
        bodies = [policy(namespace, number) for number in range(arguments.policies)]
        await make(client, POLICIES, bodies, "policies")
        await make(
            client, PODS, (pod(namespace, n, arguments.policies) for n in range(FEW_PODS)), "pods"
        )
        few = await _row(client, cluster, home / "few", namespace, arguments.policies, FEW_PODS)
        rest = (pod(namespace, n, arguments.policies) for n in range(FEW_PODS, arguments.pods))
        await make(client, PODS, rest, "pods")
        many = await _row(
            client, cluster, home / "many", namespace, arguments.policies, arguments.pods
        )
        return [few, many]


async def _row(
    client: ApiClient, cluster: Any, home: Path, namespace: str, policies: int, pods: int
) -> Measured:
    first = 0.0
    async with _process(cluster, home) as (controller, metrics):
        first = await _converged(client, namespace, policies, metrics, controller)
    async with _process(cluster, home) as (controller, metrics):
        restart = await _converged(client, namespace, policies, metrics, controller)
        writes = _calls(await metrics(), lambda verb: verb not in READS)
        progress(f"{pods} pods: policies change")
        before, cpu, began = await metrics(), controller.cpu_times(), time.perf_counter()
        for number in range(CHANGES):
            await change(client, namespace, f"p{number * policies // CHANGES:04d}")
        seconds = time.perf_counter() - began
        await _at_rest(metrics)
        after, spent = await metrics(), controller.cpu_times()
        return Measured(
            pods=pods,
            first_seconds=first,
            restart_seconds=restart,
            restart_writes=writes,
            calls=(_calls(after) - _calls(before)) / CHANGES,
            lists=_calls(after, lambda verb: verb == "list")
            - _calls(before, lambda verb: verb == "list"),
            change_milliseconds=1e3 * seconds / CHANGES,
            cpu_milliseconds=1e3 * (spent.user + spent.system - cpu.user - cpu.system) / CHANGES,
            memory=controller.memory_info().rss / 2**20,
        )


async def change(client: ApiClient, namespace: str, name: str) -> None:
    """One live value of one policy, until its status says that the controller has followed."""
    held = await client.get(POLICIES, namespace, name)
    body = {"spec": {"minLoadTokens": held["spec"]["minLoadTokens"] + 1}}
    generation = (await client.patch(POLICIES, namespace, name, body))["metadata"]["generation"]

    async def followed() -> bool:
        found = await client.get(POLICIES, namespace, name)
        return bool(found["status"]["observedGeneration"] == generation)

    await controllers.until(f"{name} is followed", followed)


Metrics = Callable[[], Awaitable[str]]


@asynccontextmanager
async def _process(cluster: Any, home: Path) -> AsyncIterator[tuple[psutil.Process, Metrics]]:
    """The controller's process, and its metrics."""
    home.mkdir(exist_ok=True)  # noqa: ASYNC240  (a benchmark's own directory)
    document = controllers.settings().model_dump(mode="json", by_alias=True)
    (home / "settings.yaml").write_text(yaml.safe_dump(document))
    log = home / "log"
    command = [
        sys.executable,
        "-m",
        "kvtier_operator.main",
        "controller",
        "--settings",
        str(home / "settings.yaml"),
    ]
    command += ["--kubeconfig", str(cluster.kubeconfig), "--context", cluster.context]
    path = os.pathsep.join([str(ROOT / "connector"), str(ROOT / "operator")])
    with log.open("wb") as output:
        process = subprocess.Popen(command, stderr=output, env={**os.environ, "PYTHONPATH": path})  # noqa: ASYNC220
    try:

        async def metrics() -> str:
            found = re.search(rb'"port": (\d+)', log.read_bytes())
            if found is None:
                return ""
            return await asyncio.to_thread(read, int(found[1]))

        yield psutil.Process(process.pid), metrics
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, 20)


def read(port: int, path: str = "/metrics") -> str:
    """What a process serves; empty if nothing."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            text: str = answer.read().decode()
            return text
    except OSError:
        return ""


def value(metrics: str, name: str) -> float:
    """A sample without labels; 0 if it is absent."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0


def _calls(metrics: str, counts: Callable[[str], bool] = lambda verb: verb != "watch") -> float:
    """Calls to the API server that were answered or not, of the verbs that count."""
    pattern = r'^kvtier_operator_api_calls_total\{.*verb="(\w+)"\} (\S+)$'
    return sum(
        float(number) for verb, number in re.findall(pattern, metrics, re.MULTILINE) if counts(verb)
    )


async def _converged(
    client: ApiClient, namespace: str, policies: int, metrics: Metrics, process: psutil.Process
) -> float:
    """Seconds from the start of the process until every policy is reconciled and reported."""
    while time.time() - process.create_time() < CONVERGENCE_SECONDS:
        text = await metrics()
        count = value(text, "kvtier_operator_reconcile_duration_seconds_count")
        progress(f"{count:.0f} looks at policies")
        if count >= policies:
            found = await client.list(POLICIES, namespace)
            generations = [(each.get("status") or {}).get("observedGeneration") for each in found]
            if generations == [each["metadata"]["generation"] for each in found]:
                seconds = time.time() - process.create_time()
                await _at_rest(metrics)
                return seconds
        await asyncio.sleep(0.2)
    raise RuntimeError(f"not converged in {CONVERGENCE_SECONDS:g} s")


async def _at_rest(metrics: Metrics, quiet_seconds: float = 2.0, seconds: float = 10.0) -> None:
    """Waits until no reconcile happens; bounded, because silent pods are polled again."""
    began = since = time.perf_counter()
    looked = -1.0
    while time.perf_counter() - since < quiet_seconds and time.perf_counter() - began < seconds:
        count = value(await metrics(), "kvtier_operator_reconcile_duration_seconds_count")
        if count != looked:
            looked, since = count, time.perf_counter()
        await asyncio.sleep(0.25)


def policy(namespace: str, number: int) -> dict[str, Any]:
    """Policy ``pNNNN``, which selects ``app: engine-NNNN``."""
    disk = controllers.file_tier("disk", {"emptyDir": {}}, "Pod")
    labels = {"podSelector": {"matchLabels": {"app": f"engine-{number:04d}"}}}
    return controllers.policy(
        namespace, f"p{number:04d}", tiers=[disk], minLoadTokens=512, **labels
    )


def pod(namespace: str, number: int, policies: int) -> dict[str, Any]:
    """As large as an engine's pod with tiers is."""
    environment = [{"name": f"VARIABLE_{index}", "value": "x" * 40} for index in range(20)]
    container = {
        "image": "registry.example/engine:1",
        "env": environment,
        "resources": {
            "requests": {"cpu": "1", "memory": "1Gi"},
            "limits": {"cpu": "2", "memory": "1Gi"},
        },
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}},
        "volumeMounts": [
            {"name": f"v{index}", "mountPath": f"/mnt/v{index}"} for index in range(5)
        ],
    }
    policy = f"p{number % policies:04d}"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"pod-{number:05d}",
            "namespace": namespace,
            "labels": {"app": f"engine-{number % policies:04d}", names.ATTACHED_LABEL: "true"},
            "annotations": {
                names.STRUCTURAL_ANNOTATION: "{" + " " * 2000 + "}",
                names.HASH_ANNOTATION: "00000000",
                names.POLICY_ANNOTATION: policy,
                names.VERSION_ANNOTATION: "0",
            },
        },
        "spec": {
            "containers": [
                {"name": "engine", **container},
                {"name": names.TIERD_CONTAINER, **container},
            ],
            "initContainers": [
                {"name": names.PAYLOAD_CONTAINER, **container, "readinessProbe": None}
            ],
            "volumes": [{"name": f"v{index}", "emptyDir": {}} for index in range(5)],
        },
    }


async def make(client: ApiClient, kind: Kind, bodies: Iterable[dict[str, Any]], what: str) -> None:
    """Creates the objects with several requests at a time."""
    waiting = iter(bodies)
    made = 0

    async def loader() -> None:
        nonlocal made
        for body in waiting:
            await client.create(kind, body["metadata"]["namespace"], body)
            made += 1
            if made % 100 == 0:
                progress(f"{made} {what} made")

    await asyncio.gather(*(loader() for _ in range(LOADERS)))


async def account(client: ApiClient, namespace: str) -> None:
    """The account that pods have; a controller would make it, where one runs."""
    accounts = Kind("", "v1", "serviceaccounts", "ServiceAccount")
    try:
        await client.create(accounts, namespace, {"metadata": {"name": "default"}})
    except ApiError as error:
        if error.status != 409:
            raise


if __name__ == "__main__":
    main()
