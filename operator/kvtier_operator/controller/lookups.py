"""What is read from the API server only where something is wrong, and remembered for a while: Events of a pod that does not
start, nodes, a namespace's label. An answer that does not come is "not known".
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvtier_operator.api.names import INJECT_LABEL
from kvtier_operator.controller import objects
from kvtier_operator.controller.objects import Owner
from kvtier_operator.kube.resources import (
    EVENTS,
    NAMESPACES,
    NODES,
    PODS,
    REPLICA_SETS,
    SECRETS,
    STATEFUL_SETS,
    ApiError,
    Client,
    Object,
)

logger = logging.getLogger(__name__)
FRESH_SECONDS = 30.0
MAX_REMEMBERED = 1024


class Lookups:
    """For one event loop. ``clock``: monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: OrderedDict[tuple[str, ...], tuple[float, Any]] = OrderedDict()

    async def namespace_asks(self, client: Client, namespace: str) -> bool | None:
        """Whether the namespace has the label without which the webhook is not asked."""
        found = await self._remembered(
            ("namespace", namespace), lambda: client.get(NAMESPACES, None, namespace)
        )
        return None if found is None else objects.labels(found).get(INJECT_LABEL) == "enabled"

    async def nodes(self, client: Client) -> Sequence[Object]:
        """All nodes."""
        return await self._remembered(("nodes",), lambda: client.list(NODES)) or ()

    async def pod(self, client: Client, pod: Object) -> Object | None:
        """The whole pod: the cache's has no tolerations."""
        namespace, name = objects.namespace(pod), objects.name(pod)
        key = ("pod", objects.uid(pod))
        found: Object | None = await self._remembered(
            key, lambda: client.get(PODS, namespace, name)
        )
        return found

    async def events(self, client: Client, pod: Object) -> Sequence[Object]:
        """Events about a pod."""
        uid, namespace = objects.uid(pod), objects.namespace(pod)
        fields = f"involvedObject.uid={uid}"
        found = (
            await self._remembered(
                ("events", uid), lambda: client.list(EVENTS, namespace, fields=fields)
            )
            or ()
        )
        return [event for event in found if (event.get("involvedObject") or {}).get("uid") == uid]

    async def lacks_secret(self, client: Client, namespace: str, name: str) -> bool:
        """Whether a Secret is known not to be there. Nothing of its content is kept."""

        async def ask() -> bool:
            try:
                await client.get(SECRETS, namespace, name)
            except ApiError as error:
                if error.status == 404:
                    return True
                raise
            return False

        return await self._remembered(("secret", namespace, name), ask) is True

    async def template(self, client: Client, namespace: str, owner: Owner) -> Object | None:
        """The pod template of an owner whose pod was refused; None where its kind is not one that may be read."""
        kind = {"ReplicaSet": REPLICA_SETS, "StatefulSet": STATEFUL_SETS}.get(owner.kind)
        if kind is None:
            return None
        found = await self._remembered(
            ("owner", owner.uid), lambda: client.get(kind, namespace, owner.name)
        )
        return None if found is None else objects.spec(found).get("template")

    async def _remembered(self, key: tuple[str, ...], ask: Callable[[], Awaitable[Any]]) -> Any:
        now = self._clock()
        known = self._known.get(key)
        if known is not None and now - known[0] < FRESH_SECONDS:
            return known[1]
        try:
            answer = await ask()
        except ApiError as error:
            logger.info("%s could not be read: %s", key[0], error)
            answer = None
        self._known[key] = (now, answer)
        self._known.move_to_end(key)
        while len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        return answer
