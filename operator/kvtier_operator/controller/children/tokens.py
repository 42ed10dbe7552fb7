"""The bearer token of each policy's pods: a Secret that is made once, and its content in the controller's memory.

The controller may not list Secrets. It reads the one of a policy by its name when it first needs it and again at every
resync, so a Secret that was deleted is made anew, with another token, within a resync.
"""

from __future__ import annotations

import base64
import binascii
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvtier_operator.api.names import token_secret
from kvtier_operator.controller.children.apply import REFUSED_FOR_GOOD, existing, is_foreign
from kvtier_operator.controller.children.observe import UID_LABEL, CachedPolicy
from kvtier_operator.controller.children.plan import owner_reference
from kvtier_operator.controller.objects import is_terminating
from kvtier_operator.kube.resources import SECRETS, ApiError, Client, Object
from kvtier_operator.render.volumes import MANAGED_BY, POLICY_LABEL

logger = logging.getLogger(__name__)
KEY = "token"
TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Token:
    """``value`` is None where there is none, and ``problem`` says why. ``read_at``: when the Secret was looked at."""

    value: str | None
    problem: str
    read_at: float


def new_token() -> str:
    """Random, and safe in a header."""
    return secrets.token_urlsafe(TOKEN_BYTES)


class Tokens:
    """Tokens by the uid of the policy. For one event loop."""

    def __init__(
        self,
        client: Client,
        keep_seconds: float,
        clock: Callable[[], float],
        make: Callable[[], str] = new_token,
    ) -> None:
        self._client = client
        self._keep_seconds = keep_seconds
        self._clock = clock
        self._make = make
        self._known: dict[str, Token] = {}

    def forget(self, uid: str) -> None:
        """The policy is gone, or its token was refused and should be read again."""
        self._known.pop(uid, None)

    async def of(self, known: CachedPolicy) -> Token:
        """The token, made if there is none. Raises ``ApiError`` for what may work later."""
        held = self._known.get(known.uid)
        if (
            held is not None
            and held.value is not None
            and self._clock() - held.read_at < self._keep_seconds
        ):
            return held
        body = _body(known, self._make())
        try:
            value, problem = await self._read_or_make(known, body)
        except ApiError as error:
            if error.status not in REFUSED_FOR_GOOD:
                raise
            value, problem = None, f"the API server refused it: {error.message}"
        if problem:
            metadata = body["metadata"]
            problem = f"Secret {metadata['namespace']}/{metadata['name']}: {problem}"
            logger.warning("no token: %s", problem)
        token = Token(value, problem, self._clock())
        self._known[known.uid] = token
        return token

    async def _read_or_make(
        self, known: CachedPolicy, body: dict[str, Any]
    ) -> tuple[str | None, str]:
        for _ in range(3):
            found = await existing(self._client, SECRETS, body)
            if found is not None:
                if is_foreign(found):
                    return (
                        None,
                        "another Secret has this name; rename or delete it, or rename the policy",
                    )
                if is_terminating(found):
                    return None, "it is being deleted"
                value = _value(found)
                owner = (found["metadata"].get("labels") or {}).get(UID_LABEL)
                if value is not None and owner == known.uid:
                    return value, ""
                # A predecessor's, which goes with it, or one that somebody emptied.
                metadata = found["metadata"]
                await self._client.delete(
                    SECRETS, metadata["namespace"], metadata["name"], uid=metadata["uid"]
                )
            try:
                made = await self._client.create(SECRETS, body["metadata"]["namespace"], body)
            except ApiError as error:
                if error.status != 409:
                    raise
                continue  # Somebody was faster: what is there now is read.
            logger.info("made the token's Secret")
            return _value(made), ""
        return None, "it changes while it is looked at"


def _value(found: Object) -> str | None:
    encoded = (found.get("data") or {}).get(KEY)
    if not isinstance(encoded, str):
        return None
    try:
        return base64.b64decode(encoded, validate=True).decode("ascii") or None
    except (binascii.Error, ValueError):
        return None


def _body(known: CachedPolicy, token: str) -> dict[str, Any]:
    metadata = known.raw["metadata"]
    return {
        "apiVersion": "v1",
        "kind": SECRETS.kind,
        "metadata": {
            "name": token_secret(metadata["name"]),
            "namespace": metadata["namespace"],
            "labels": {**MANAGED_BY, POLICY_LABEL: metadata["name"], UID_LABEL: known.uid},
            "ownerReferences": [owner_reference(known)],
        },
        "type": "Opaque",
        "data": {KEY: base64.b64encode(token.encode()).decode()},
    }
