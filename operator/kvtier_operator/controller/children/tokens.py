"""The bearer token of each policy's pods: created once in a Secret, and cached in the controller's
memory.

The controller has no right to get or list Secrets: admission policies do not see reads, so nothing
would limit them to its own. It creates the Secret of a policy. If there is one already, it reads
that by a dry run of an empty patch, which the chart's ValidatingAdmissionPolicy allows only for
Secrets that KVTier created for a policy. This happens when it first needs the token and again at
every resync, so a deleted Secret is recreated, with another token, within one resync period.
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
from kvtier_operator.controller.cached_policy import CachedPolicy
from kvtier_operator.controller.children.apply import PERMANENT_FAILURES, is_foreign
from kvtier_operator.controller.children.observe import UID_LABEL
from kvtier_operator.controller.children.plan import owner_reference
from kvtier_operator.controller.objects import is_terminating
from kvtier_operator.kube.resources import SECRETS, ApiError, Client, Object
from kvtier_operator.render.volumes import MANAGED_BY, POLICY_LABEL

logger = logging.getLogger(__name__)
KEY = "token"
TOKEN_BYTES = 32
FOREIGN = "another Secret has this name; rename or delete it, or rename the policy"
GUARD = "ValidatingAdmissionPolicy 'kvtier-controller'"
"""In the message of a call that the chart's admission policy denies."""
NOT_OURS: Object = {"metadata": {}}
"""Stands for a Secret that the admission policy keeps from the controller."""
MAX_TRIES = 3
"""Attempts to read or create the Secret while something else changes it."""


@dataclass(frozen=True, slots=True)
class Token:
    """``value`` is None if there is no usable Secret; ``error`` then says why. ``read_at``: by the
    monotonic clock.
    """

    value: str | None
    error: str
    read_at: float


def generate_token() -> str:
    """A random token that is safe in an HTTP header."""
    return secrets.token_urlsafe(TOKEN_BYTES)


class PolicyTokens:
    """Tokens by policy uid. For one event loop. ``clock``: monotonic."""

    def __init__(
        self,
        client: Client,
        max_age_seconds: float,
        clock: Callable[[], float],
        generate: Callable[[], str] = generate_token,
    ) -> None:
        self._client = client
        self._max_age_seconds = max_age_seconds
        self._clock = clock
        self._generate = generate
        self._tokens: dict[str, Token] = {}

    def forget(self, uid: str) -> None:
        """Drops the cached token of a policy, because the policy is gone."""
        self._tokens.pop(uid, None)

    async def get(self, cached: CachedPolicy) -> Token:
        """The policy's token; creates the Secret if there is none. Raises ``ApiError`` if a retry
        may succeed.
        """
        held = self._tokens.get(cached.uid)
        if (
            held is not None
            and held.value is not None
            and self._clock() - held.read_at < self._max_age_seconds
        ):
            return held
        body = _secret(cached, self._generate())
        try:
            value, error = await self._read_or_create(cached, body)
        except ApiError as failure:
            if failure.status not in PERMANENT_FAILURES:
                raise
            value, error = None, f"the API server rejected it: {failure.message}"
        if error:
            metadata = body["metadata"]
            error = f"Secret {metadata['namespace']}/{metadata['name']}: {error}"
            logger.warning("no token for the policy's pods: %s", error)
        token = Token(value, error, self._clock())
        self._tokens[cached.uid] = token
        return token

    async def _read_or_create(
        self, cached: CachedPolicy, body: dict[str, Any]
    ) -> tuple[str | None, str]:
        """The token, or None and the reason."""
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        for _ in range(MAX_TRIES):
            existing = await self._existing(namespace, name)
            if existing is not None:
                if is_foreign(existing):
                    return None, FOREIGN
                if is_terminating(existing):
                    return None, "it is being deleted"
                value = _token(existing)
                owner = (existing["metadata"].get("labels") or {}).get(UID_LABEL)
                if value is not None and owner == cached.uid:
                    return value, ""
                # It belongs to an earlier policy of the same name, or it holds no token.
                metadata = existing["metadata"]
                await self._client.delete(
                    SECRETS, metadata["namespace"], metadata["name"], uid=metadata["uid"]
                )
            try:
                created = await self._client.create(SECRETS, body["metadata"]["namespace"], body)
            except ApiError as error:
                if error.status != 409:
                    raise
                continue  # Another client created it first: read that one.
            logger.info("created the Secret of the policy's token")
            return _token(created), ""
        return None, f"it changed during each of {MAX_TRIES} attempts to read it"

    async def _existing(self, namespace: str, name: str) -> Object | None:
        try:
            return await self._client.read_guarded(SECRETS, namespace, name)
        except ApiError as error:
            if error.status == 404:
                return None
            if GUARD in error.message:
                return NOT_OURS
            raise


def _token(secret: Object) -> str | None:
    encoded = (secret.get("data") or {}).get(KEY)
    if not isinstance(encoded, str):
        return None
    try:
        return base64.b64decode(encoded, validate=True).decode("ascii") or None
    except (binascii.Error, ValueError):
        return None


def _secret(cached: CachedPolicy, token: str) -> dict[str, Any]:
    metadata = cached.raw["metadata"]
    return {
        "apiVersion": "v1",
        "kind": SECRETS.kind,
        "metadata": {
            "name": token_secret(metadata["name"]),
            "namespace": metadata["namespace"],
            "labels": {**MANAGED_BY, POLICY_LABEL: metadata["name"], UID_LABEL: cached.uid},
            "ownerReferences": [owner_reference(cached)],
        },
        "type": "Opaque",
        "data": {KEY: base64.b64encode(token.encode()).decode()},
    }
