"""Access to the API server for commands: credentials as kubectl finds them, and errors that say
which right is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kubernetes.aio import config

from kvtier.cli.inputs import CommandError
from kvtier.errors import ConfigurationError
from kvtier_operator.kube import credentials
from kvtier_operator.kube.client import ApiClient, Limits, open_client
from kvtier_operator.kube.credentials import UNUSABLE, Credentials
from kvtier_operator.kube.resources import POLICIES, ApiError, Client, Kind, Object

LIMITS = Limits(deadline_seconds=15.0, attempt_seconds=6.0, attempts=2)
"""A person waits."""
DEFAULT_NAMESPACE = "default"
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """How to reach the cluster. What is None is found as kubectl finds it."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None
    operator_namespace: str = "kvtier-system"


@dataclass(slots=True)
class ClusterReader:
    """Reads objects for a command. ``not_checked``: what was left out for want of a right."""

    client: Client
    namespace: str
    operator_namespace: str = "kvtier-system"
    not_checked: list[str] = field(default_factory=list)

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        """One object. Raises ``CommandError``."""
        try:
            return await self.client.get(kind, namespace, name)
        except ApiError as error:
            raise self._error(error, "get", kind, namespace, name) from error

    async def list(self, kind: Kind, namespace: str | None = None, labels: str = "") -> Objects:
        """The objects of a kind. Raises ``CommandError``."""
        try:
            return await self.client.list(kind, namespace, labels=labels)
        except ApiError as error:
            raise self._error(error, "list", kind, namespace) from error

    async def try_get(
        self, kind: Kind, namespace: str | None, name: str, purpose: str
    ) -> Object | None:
        """One object; None if it does not exist or may not be read. The second is noted with
        ``purpose``: what could not be checked.
        """
        try:
            return await self.client.get(kind, namespace, name)
        except ApiError as error:
            self._note(error, "get", kind, namespace, purpose)
            return None

    async def try_list(
        self, kind: Kind, namespace: str | None, purpose: str, labels: str = ""
    ) -> Objects:
        """The objects of a kind; none if they may not be read, which is noted with ``purpose``."""
        try:
            return await self.client.list(kind, namespace, labels=labels)
        except ApiError as error:
            self._note(error, "list", kind, namespace, purpose)
            return []

    def _note(
        self, error: ApiError, verb: str, kind: Kind, namespace: str | None, purpose: str
    ) -> None:
        if error.status == 404:
            return
        if error.status != 403:
            raise self._error(error, verb, kind, namespace) from error
        self.not_checked.append(
            f"{purpose}: the right to {right(verb, kind, namespace)} is missing"
        )

    def _error(
        self,
        error: ApiError,
        verb: str,
        kind: Kind,
        namespace: str | None,
        name: str = "",
    ) -> CommandError:
        return CommandError(describe(error, verb, kind, namespace, name))


Objects = Sequence[Object]


def right(verb: str, kind: Kind, namespace: str | None, subresource: str = "") -> str:
    """A right in the words of RBAC, such as ``list pods in namespace serving``."""
    resource = f"{kind.plural}.{kind.group}" if kind.group else kind.plural
    resource += f"/{subresource}" if subresource else ""
    scope = f"in namespace {namespace}" if kind.namespaced and namespace else "in the cluster"
    return f"{verb} {resource} {scope}"


def describe(error: ApiError, verb: str, kind: Kind, namespace: str | None, name: str = "") -> str:
    """What a failed call means, in one sentence."""
    if error.status == 401:
        return "the API server does not accept the credentials (401); log in again"
    if error.status == 403:
        return f"the right to {right(verb, kind, namespace)} is missing: {error.message}"
    if error.status == 404 and kind is POLICIES and not name:
        return "KVTier is not installed: the cluster does not serve kvtierpolicies.kvtier.io"
    if error.status == 404 and name:
        place = f" in namespace {namespace}" if namespace else ""
        return f"{kind.kind} {name} does not exist{place}"
    if error.status == 0:
        return f"the API server does not answer: {error.message}"
    return f"could not {verb} {kind.plural}: {error}"


def run(options: ClusterOptions, command: Callable[[ClusterReader], Awaitable[Result]]) -> Result:
    """Runs a command against the cluster. Raises ``CommandError`` and ``ConfigurationError``."""

    async def connected() -> Result:
        async with open_reader(options) as reader:
            return await command(reader)

    return asyncio.run(connected())


@contextlib.asynccontextmanager
async def open_reader(options: ClusterOptions) -> AsyncIterator[ClusterReader]:
    """A reader; its connections are closed at the end of the block."""
    access = await _credentials(options)
    async with open_client(access, LIMITS) as client:
        namespace = options.namespace or _default_namespace(options)
        yield ClusterReader(client, namespace, options.operator_namespace)


def api_client(reader: ClusterReader) -> ApiClient | None:
    """The client, if it is a real one, which can proxy to pods."""
    return reader.client if isinstance(reader.client, ApiClient) else None


async def _credentials(options: ClusterOptions) -> Credentials:
    path = _kubeconfig(options)
    if path is not None or options.context is not None or os.environ.get("KUBECONFIG"):
        return await credentials.from_kubeconfig(path, options.context)
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return credentials.in_cluster()
    raise ConfigurationError(
        "--kubeconfig",
        "",
        "must name a kubeconfig: KUBECONFIG is not set, there is no ~/.kube/config, and this is "
        "no pod",
    )


def _kubeconfig(options: ClusterOptions) -> Path | None:
    """The kubeconfig; None if there is none, or if KUBECONFIG lists several, which the client
    library merges.
    """
    if options.kubeconfig is not None:
        return options.kubeconfig
    named = os.environ.get("KUBECONFIG")
    if named:
        return None if os.pathsep in named else Path(named)
    home = Path("~/.kube/config").expanduser()
    return home if home.is_file() else None


def _default_namespace(options: ClusterOptions) -> str:
    """The namespace of the context, or of the pod's service account."""
    path = _kubeconfig(options)
    try:
        file = str(path) if path is not None else os.environ.get("KUBECONFIG")
        contexts, current = config.list_kube_config_contexts(file)
    except UNUSABLE:
        return _account_namespace()
    found = current
    if options.context is not None:
        found = next((each for each in contexts if each["name"] == options.context), None)
    return str(((found or {}).get("context") or {}).get("namespace") or DEFAULT_NAMESPACE)


def _account_namespace() -> str:
    try:
        text = (credentials.SERVICE_ACCOUNT / "namespace").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return DEFAULT_NAMESPACE
    return text or DEFAULT_NAMESPACE
