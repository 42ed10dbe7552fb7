"""Memory of the operator where most pods have no policy, and the time of a take-over.

A real API server holds 500 policies and the 2,000 pods that they govern. Controller and webhook run
as their own processes with default settings, the controller as two replicas. Then 18,000 pods
without a policy are added, most of them in namespaces without policies, and the processes are
started again. The leader is killed with SIGKILL, and the policy that comes last in every list
changes. The ratio is the leader's memory with all pods divided by its memory with the governed
ones; 1 means that memory follows what is governed.
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
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

import operator_scale as scale
from common import options, progress, report
from kvtier_operator.kube.client import ApiClient, connect
from kvtier_operator.kube.resources import NAMESPACES, PODS, POLICIES
from operator_scale import clusters, controllers

SPACES = 20
"""Namespaces with policies, and as many without."""
OPERATOR_NAMESPACE = "kvtier-system"
READY_SECONDS = 240.0
REST_SECONDS = 5.0


@dataclass(frozen=True)
class Measured:
    """One row. Memory in MiB; ``ready_seconds``: until both replicas and the webhook are ready;
    ``leading_seconds``: from the kill until the replica leads; ``take_over_seconds``: until it has
    followed a change that came with the kill.
    """

    pods: int
    leader: float
    replica: float
    webhook: float
    ready_seconds: float
    leading_seconds: float
    take_over_seconds: float


@dataclass
class Running:
    """One process of the operator."""

    process: psutil.Process
    log: Path

    def read(self, path: str) -> str:
        """What it serves; empty if nothing."""
        found = re.search(rb'"port": (\d+)', self.log.read_bytes())
        return "" if found is None else scale.read(int(found[1]), path)

    def memory(self) -> float:
        """Resident, in MiB."""
        return float(self.process.memory_info().rss) / 2**20


def main() -> None:
    """Loads a cluster, twice, and prints the table."""
    arguments = options(
        __doc__.splitlines()[0],
        lambda parser: parser.add_argument("--policies", type=int, default=500),
        lambda parser: parser.add_argument("--governed", type=int, default=2000),
        lambda parser: parser.add_argument("--pods", type=int, default=20000),
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
        f"The operator with {arguments.policies} policies that govern {arguments.governed} pods",
        ("pods", "leader MiB", "replica MiB", "webhook MiB", "ready s", "leads s", "take-over s"),
        [
            (
                row.pods,
                f"{row.leader:.0f}",
                f"{row.replica:.0f}",
                f"{row.webhook:.0f}",
                f"{row.ready_seconds:.1f}",
                f"{row.leading_seconds:.1f}",
                f"{row.take_over_seconds:.1f}",
            )
            for row in rows
        ],
        many.leader / few.leader,
        f"the leader's memory with {many.pods} pods over that with {few.pods}",
    )


async def measure(arguments: argparse.Namespace, cluster: Any, home: Path) -> list[Measured]:
    """A row with the governed pods, a row with all."""
    async with connect(cluster.kubeconfig, cluster.context) as client:
        await controllers.install_definition(client)
        await client.apply(
            NAMESPACES,
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OPERATOR_NAMESPACE}},
        )
        served = [await _namespace(client, "serving") for _ in range(SPACES)]
        others = [await _namespace(client, "web") for _ in range(SPACES)]
        policies = arguments.policies
        bodies = (scale.policy(served[n % SPACES], n) for n in range(policies))
        await scale.make(client, POLICIES, bodies, "policies")
        governed = (
            scale.pod(served[n % policies % SPACES], n, policies) for n in range(arguments.governed)
        )
        await scale.make(client, PODS, governed, "governed pods")
        last = max((served[n % SPACES], f"p{n:04d}") for n in range(policies))
        few = await _row(client, cluster, home / "few", last, arguments)
        rest = _without_policy(served, others, arguments.pods - arguments.governed)
        await scale.make(client, PODS, rest, "pods without a policy")
        many = await _row(client, cluster, home / "many", last, arguments)
        return [few, many]


async def _namespace(client: ApiClient, name: str) -> str:
    made = await controllers.make_namespace(client, name)
    await scale.account(client, made)
    return made


def _without_policy(served: list[str], others: list[str], count: int) -> Iterator[dict[str, Any]]:
    """One in nine is beside governed pods."""
    for number in range(count):
        spaces = served if number % 9 == 0 else others
        body = scale.pod(spaces[number % SPACES], number, count)
        body["metadata"] |= {
            "name": f"web-{number:05d}",
            "labels": {"app": f"web-{number % 97}", "pod-template-hash": f"{number % 97:08x}"},
            "annotations": {"checksum/config": f"{number % 97:064x}"},
        }
        yield body


async def _row(
    client: ApiClient,
    cluster: Any,
    home: Path,
    last: tuple[str, str],
    arguments: argparse.Namespace,
) -> Measured:
    """``last``: namespace and name of the policy that comes last in every list."""
    home.mkdir()  # noqa: ASYNC240  (a benchmark's own directory)
    async with AsyncExitStack() as stack:
        began = time.perf_counter()
        started = [
            await stack.enter_async_context(_process(cluster, home / name, component))
            for name, component in (("a", "controller"), ("b", "controller"), ("c", "webhook"))
        ]
        for each in started:
            await _until("it is ready", lambda each=each: each.read("/readyz").startswith("ok"))
        ready_seconds = time.perf_counter() - began
        leads = [each for each in started[:2] if _leads(each)]
        while len(leads) != 1:
            await asyncio.sleep(0.2)
            leads = [each for each in started[:2] if _leads(each)]
        (leader,) = leads
        replica = next(each for each in started[:2] if each is not leader)
        await _at_rest(leader, arguments.policies)
        progress("measured")
        memory = [each.memory() for each in (leader, replica, started[2])]
        leader.process.send_signal(signal.SIGKILL)
        killed = time.perf_counter()
        change = asyncio.ensure_future(scale.change(client, *last))
        await _until("the replica leads", lambda: _leads(replica))
        leading = time.perf_counter() - killed
        await change
        pods = arguments.governed if home.name == "few" else arguments.pods
        return Measured(pods, *memory, ready_seconds, leading, time.perf_counter() - killed)


def _leads(each: Running) -> bool:
    return "kvtier_operator_leader 1.0" in each.read("/metrics")


async def _at_rest(leader: Running, policies: int) -> None:
    """Waits until every policy is reconciled; some more happen while pods are polled."""
    name = "kvtier_operator_reconcile_duration_seconds_count"
    began = time.perf_counter()
    while (count := scale.value(leader.read("/metrics"), name)) < 1.5 * policies:
        progress(f"{count:.0f} reconciles")
        if time.perf_counter() - began > READY_SECONDS:
            raise RuntimeError("the policies were not reconciled")
        await asyncio.sleep(0.25)
    await asyncio.sleep(REST_SECONDS)


async def _until(what: str, check: Any) -> None:
    deadline = time.perf_counter() + READY_SECONDS
    while not await asyncio.to_thread(check):
        if time.perf_counter() > deadline:
            raise RuntimeError(f"not in {READY_SECONDS:g} s: {what}")
        await asyncio.sleep(0.1)


@asynccontextmanager
async def _process(cluster: Any, home: Path, component: str) -> AsyncIterator[Running]:
    home.mkdir()  # noqa: ASYNC240
    document = controllers.settings().model_dump(mode="json", by_alias=True)
    document["controller"]["leaderElection"]["enabled"] = True
    document["webhook"] |= {"host": "127.0.0.1", "port": 0, "drainSeconds": 0}
    document["webhook"]["certificates"] |= {"mode": "SelfManaged"}
    (home / "settings.yaml").write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "kvtier_operator.main", component]
    command += ["--settings", str(home / "settings.yaml")]
    command += ["--kubeconfig", str(cluster.kubeconfig), "--context", cluster.context]
    path = os.pathsep.join([str(scale.ROOT / "connector"), str(scale.ROOT / "operator")])
    log = home / "log"
    with log.open("wb") as output:
        environment = {**os.environ, "PYTHONPATH": path, "POD_NAME": home.name}
        process = subprocess.Popen(command, stderr=output, env=environment)  # noqa: ASYNC220
    try:
        yield Running(psutil.Process(process.pid), log)
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, 40)


if __name__ == "__main__":
    main()
