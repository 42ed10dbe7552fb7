"""Status writes: to the right policy, and despite concurrent changes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.support import controllers
from tests.support.api_faults import Call, Fault, FaultyClient
from tests.support.controllers import condition, policy, running, settings, settled, until

from kvtier_operator.kube.client import ApiClient, connect
from kvtier_operator.kube.resources import POLICIES, ApiError, Kind, Object

Scenario = Callable[[ApiClient, str], Awaitable[None]]


@pytest.fixture
def run(kubernetes_cluster: Any) -> Callable[[Scenario], None]:
    """Runs a scenario with a client and a namespace of its own."""

    async def whole(scenario: Scenario) -> None:
        async with connect(kubernetes_cluster.kubeconfig, kubernetes_cluster.context) as client:
            await controllers.install_definition(client)
            namespace = await controllers.make_namespace(client, "writes")
            try:
                await scenario(client, namespace)
            finally:
                await controllers.drop_namespace(client, namespace)

    return lambda scenario: asyncio.run(whole(scenario))


class Meanwhile(FaultyClient):
    """Does something just before the first status is applied; ``seen``: the policy just after."""

    def __init__(self, client: ApiClient, happens: Callable[[], Awaitable[object]]) -> None:
        super().__init__(client)
        self.happens: Callable[[], Awaitable[object]] | None = happens
        self.seen: Object | None = None

    async def apply(
        self, kind: Kind, body: Object, *, subresource: str | None = None, force: bool = True
    ) -> Object:
        happens, self.happens = (self.happens, None) if subresource else (None, self.happens)
        if happens is None:
            return await super().apply(kind, body, subresource=subresource, force=force)
        await happens()
        try:
            return await super().apply(kind, body, subresource=subresource, force=force)
        finally:
            metadata = body["metadata"]
            self.seen = await self.client.get(kind, metadata["namespace"], metadata["name"])


def test_a_recreated_policy_does_not_get_the_status_of_its_predecessor(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(client: ApiClient, namespace: str) -> None:
        first = await client.apply(POLICIES, policy(namespace))

        async def made_again() -> None:
            await client.delete(POLICIES, namespace, "chat", uid=first["metadata"]["uid"])
            await client.apply(POLICIES, policy(namespace, minLoadTokens=77))

        faulty = Meanwhile(client, made_again)
        async with running(faulty, settings(namespace)) as controller:

            async def reported() -> Object | None:
                try:
                    found = await settled(controller, client, namespace)
                except ApiError as error:
                    # Between the two there is none.
                    if error.status != 404:
                        raise
                    return None
                return found if condition(found, "Ready") else None

            found = await until("the second has a status", reported)
        assert faulty.seen is not None
        assert (
            faulty.seen["metadata"]["uid"] == found["metadata"]["uid"] != first["metadata"]["uid"]
        )
        assert "status" not in faulty.seen

    run(scenario)


def test_a_policy_that_changes_during_its_reconcile_still_gets_a_status(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(client: ApiClient, namespace: str) -> None:
        await client.apply(POLICIES, policy(namespace))
        labels = {"metadata": {"labels": {"team": "search"}}}
        faulty = Meanwhile(client, lambda: client.patch(POLICIES, namespace, "chat", labels))
        async with running(faulty, settings(namespace)) as controller:
            found = await settled(controller, client, namespace)
        assert condition(found, "Ready")["reason"] == "NoPods"
        assert faulty.seen is not None

    run(scenario)


def test_a_conflict_does_not_delay_the_status_until_the_resync(
    run: Callable[[Scenario], None],
) -> None:
    """Nothing else happens to the policy, so nothing else would bring it about."""

    async def scenario(client: ApiClient, namespace: str) -> None:
        await client.apply(POLICIES, policy(namespace))
        refused: list[Call] = []

        def once(call: Call) -> Fault | None:
            if not armed or call.subresource != "status" or len(refused) == 2:
                return None
            refused.append(call)
            return Fault.CONFLICT

        armed: list[bool] = []
        async with running(FaultyClient(client, every=once), settings(namespace)) as controller:
            await settled(controller, client, namespace)
            armed.append(True)
            await client.patch(POLICIES, namespace, "chat", {"status": None}, subresource="status")

            async def again() -> bool:
                found = await client.get(POLICIES, namespace, "chat")
                return condition(found, "Ready") != {}

            await until("the status is there again", again)
        assert len(refused) == 2

    run(scenario)
