"""Deleting a policy on a real API server: its orphaned directory is reported."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from tests.support import controllers
from tests.support.controllers import file_tier, policy, running, settings, settled, until

from kvtier_operator.kube.client import connect
from kvtier_operator.kube.resources import EVENTS, POLICIES

EXPORT = {"nfs": {"server": "nas.example", "path": "/kv/chat"}}
ALLOWED = [{"namespaces": ["*"], "nfs": {"server": "nas.example", "exportPrefix": "/kv"}}]


def test_the_directory_of_a_deleted_policy_is_reported_in_an_event_and_in_the_log(
    kubernetes_cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with connect(kubernetes_cluster.kubeconfig, kubernetes_cluster.context) as client:
            await controllers.install_definition(client)
            namespace = await controllers.make_namespace(client, "leavings")
            for name, tiers in (("chat", [file_tier("shared", EXPORT)]), ("memory", [])):
                await client.apply(POLICIES, policy(namespace, name, tiers=tiers))
            async with running(client, settings(namespace, allowedVolumes=ALLOWED)) as controller:
                uids = {}
                for name in ("memory", "chat"):
                    found = await settled(controller, client, namespace, name)
                    uids[name] = found["metadata"]["uid"]
                    await client.delete(POLICIES, namespace, name, uid=uids[name])

                async def posted() -> list[Any]:
                    events = await client.list(EVENTS, namespace)
                    return [each for each in events if each["reason"] == "DataLeft"]

                (event,) = await until("an Event says what stays", posted)
            words = (
                f"tier shared: directory {namespace}/{uids['chat']} stays in nas.example:/kv/chat"
            )
            assert event["message"].startswith(words)
            assert event["involvedObject"]["uid"] == uids["chat"]
            messages = [
                record.getMessage()
                for record in caplog.records
                if "policy deleted" in record.getMessage()
            ]
            assert [each.partition(": ")[2].startswith(words) for each in messages] == [True]
            await controllers.drop_namespace(client, namespace)

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
