"""Two replicas of the controller: one works, the other takes over, and nothing is done twice."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from api_proxy import ApiProxy, Request, silence
from prometheus_client import CollectorRegistry
from tests.cluster.controller_process import Process
from tests.support import controllers
from tests.support.controllers import policy, settings, until

from kvtier_operator.controller.controller import Controller, ControllerOptions
from kvtier_operator.kube import credentials
from kvtier_operator.kube.client import ApiClient, connect, open_api
from kvtier_operator.kube.election import Elector, Lock, Timing
from kvtier_operator.kube.resources import CONFIG_MAPS, POLICIES, ApiError, Kind

LEASES = Kind("coordination.k8s.io", "v1", "leases", "Lease")
NAMESPACE = "kvtier-system"
TAKE_OVER_SECONDS = 15.0


async def own_namespace(client: ApiClient) -> None:
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    await client.apply(controllers.NAMESPACES, body)


async def follows(client: ApiClient, namespace: str, value: int) -> None:
    """A change of a policy is applied."""
    await client.patch(POLICIES, namespace, "chat", {"spec": {"minLoadTokens": value}})

    async def applied() -> bool:
        try:
            found = await client.get(CONFIG_MAPS, namespace, "chat-live")
        except ApiError:
            return False
        return f'"minLoadTokens": {value}' in found["data"]["live.json"].replace(":", ": ").replace(
            ":  ", ": "
        )

    await until(f"{value} is applied", applied)


def leader(metrics: str) -> bool:
    return "kvtier_operator_leader 1.0" in metrics


def writes(metrics: str) -> float:
    lines = [
        line for line in metrics.splitlines() if line.startswith("kvtier_operator_api_calls_total")
    ]
    written = [
        line
        for line in lines
        if any(f'verb="{verb}"' in line for verb in ("apply", "create", "patch", "delete"))
    ]
    return sum(float(line.rpartition(" ")[2]) for line in written)


def test_a_killed_leader_is_replaced_within_the_lease_and_nothing_is_applied_twice(
    kubernetes_cluster: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with connect(kubernetes_cluster.kubeconfig, kubernetes_cluster.context) as client:
            await controllers.install_definition(client)
            await own_namespace(client)
            namespace = await controllers.make_namespace(client, "leader")
            replicas = []
            for name in ("a", "b"):
                (tmp_path / name).mkdir()
                replicas.append(
                    Process(
                        kubernetes_cluster,
                        tmp_path / name,
                        namespace,
                        leaderElection={"enabled": True},
                    )
                )
            first, second = replicas
            try:
                await client.apply(POLICIES, policy(namespace))
                first.start()

                async def leads(replica: Process) -> bool:
                    return leader((await asyncio.to_thread(replica.ask, "/metrics"))[1])

                await until("the first one leads", lambda: leads(first))
                second.start()
                await follows(client, namespace, 71)

                async def ready() -> bool:
                    return (await asyncio.to_thread(second.ask, "/readyz"))[0] == 200

                await until("the second one is ready", ready)
                assert not await leads(second)
                live = await client.get(CONFIG_MAPS, namespace, "chat-live")
                await asyncio.sleep(1.0)
                assert writes(second.ask("/metrics")[1]) == 0

                killed_at = time.monotonic()
                first.end(signal.SIGKILL)
                await until("the second one leads", lambda: leads(second))
                seconds = time.monotonic() - killed_at
                print(f"take-over after SIGKILL: {seconds:.1f} s")
                assert seconds < TAKE_OVER_SECONDS
                await asyncio.sleep(1.0)
                # It looked at everything and found nothing to do.
                assert writes(second.ask("/metrics")[1]) == 0
                again = await client.get(CONFIG_MAPS, namespace, "chat-live")
                assert again["metadata"]["resourceVersion"] == live["metadata"]["resourceVersion"]
                await follows(client, namespace, 72)

                first.start()
                await until("the first one is back", ready)
                await asyncio.sleep(1.0)
                stopped_at = time.monotonic()
                assert second.end(signal.SIGTERM) == 0
                await until("the first one leads again", lambda: leads(first))
                seconds = time.monotonic() - stopped_at
                print(f"take-over after SIGTERM: {seconds:.1f} s")
                assert seconds < TAKE_OVER_SECONDS
                await follows(client, namespace, 73)
            finally:
                for each in replicas:
                    if each.process is not None and each.process.poll() is None:
                        each.end()
                await controllers.drop_namespace(client, namespace)

    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def elector(
    access: credentials.Credentials, name: str, identity: str, timing: Timing
) -> AsyncIterator[tuple[Elector, list[str]]]:
    """A candidate that works until it is cancelled, and the events that it recorded."""
    events: list[str] = []

    async def work() -> None:
        events.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            events.append("ended")

    async with open_api(access) as api:
        candidate = Elector(Lock(api, "default", name, identity), timing)
        running = asyncio.ensure_future(candidate.run(work))
        try:
            yield candidate, events
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def soon(check: Callable[[], Any], what: str) -> None:
    async def checked() -> Any:
        return check()

    await until(what, checked)


def test_a_disconnected_leader_stops_writing_before_the_next_one_starts(
    kubernetes_cluster: Any, tmp_path: Path
) -> None:
    timing = Timing(lease_seconds=5, deadline_seconds=2.5, retry_seconds=1.0)

    async def scenario() -> None:
        given = kubernetes_cluster.kubeconfig, kubernetes_cluster.context
        async with ApiProxy(*given, tmp_path) as proxy:
            near = await credentials.from_kubeconfig(proxy.kubeconfig)
            far = await credentials.from_kubeconfig(*given)
            async with elector(near, "cut-off", "a", timing) as (first, events):
                await soon(lambda: first.remaining_seconds() > 0, "the first one leads")
                async with elector(far, "cut-off", "b", timing) as (second, _):
                    await asyncio.sleep(2.0)
                    assert second.remaining_seconds() == 0

                    def leases(request: Request) -> bool:
                        return LEASES.plural in request.path

                    proxy.fail(leases, silence(), times=1000)
                    deadline = time.monotonic() + 30
                    while not second.remaining_seconds():
                        assert time.monotonic() < deadline
                        await asyncio.sleep(0.01)
                    assert first.remaining_seconds() == 0
                    await soon(lambda: events == ["began", "ended"], "its work has ended")

    asyncio.run(scenario())


def test_the_lease_is_created_renewed_and_released(kubernetes_cluster: Any) -> None:
    async def scenario() -> None:
        given = kubernetes_cluster.kubeconfig, kubernetes_cluster.context
        access = await credentials.from_kubeconfig(*given)
        async with connect(*given) as client:
            async with elector(access, "plain", "a", Timing()) as (candidate, events):
                await soon(lambda: candidate.remaining_seconds() > 0, "it leads")
                lease = await client.get(LEASES, "default", "plain")
                assert lease["spec"]["holderIdentity"] == "a"
                assert lease["spec"]["leaseDurationSeconds"] == Timing().lease_seconds
                renewed = time.strptime(lease["spec"]["renewTime"][:19], "%Y-%m-%dT%H:%M:%S")
                assert abs(time.mktime(renewed) - time.mktime(time.gmtime())) < 10
            assert events == ["began", "ended"]
            lease = await client.get(LEASES, "default", "plain")
            assert not lease["spec"].get("holderIdentity")
            began = time.monotonic()
            async with elector(access, "plain", "b", Timing()) as (candidate, _):
                await soon(lambda: candidate.remaining_seconds() > 0, "another one leads at once")
                assert time.monotonic() - began < Timing().lease_seconds / 2

    asyncio.run(scenario())


def test_a_controller_that_lost_the_lease_continues_after_reacquiring_it(
    kubernetes_cluster: Any,
) -> None:
    timing = Timing(lease_seconds=5, deadline_seconds=2.5, retry_seconds=1.0)

    async def scenario() -> None:
        given = kubernetes_cluster.kubeconfig, kubernetes_cluster.context
        access = await credentials.from_kubeconfig(*given)
        async with connect(*given) as client, open_api(access) as api:
            await controllers.install_definition(client)
            namespace = await controllers.make_namespace(client, "again")
            await client.apply(POLICIES, policy(namespace))
            candidate = Elector(Lock(api, "default", "again", "a"), timing)
            guarded = ApiClient(api, access, write_seconds=candidate.remaining_seconds)
            controller = Controller(
                settings(namespace),
                guarded,
                CollectorRegistry(),
                elector=candidate,
                options=ControllerOptions(pace=controllers.QUICK, pauses=controllers.QUICK_PAUSES),
            )
            stop = asyncio.Event()
            running = asyncio.ensure_future(controller.run(stop))
            await follows(client, namespace, 71)
            # Another holder takes the Lease away; it expires after a while.
            taken = {"spec": {"holderIdentity": "another", "leaseTransitions": 9}}
            await client.patch(LEASES, "default", "again", taken)
            await soon(lambda: candidate.remaining_seconds() == 0, "it no longer leads")
            await client.patch(POLICIES, namespace, "chat", {"spec": {"minLoadTokens": 72}})
            await follows(client, namespace, 73)
            stop.set()
            await running
            await controllers.drop_namespace(client, namespace)

    asyncio.run(scenario())
