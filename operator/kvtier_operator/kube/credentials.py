"""Credentials for the API server, shared by the Kubernetes client and kopf.

In a pod the kubelet replaces the service account's token, so the token file is read again every
minute and after a 401 response. A kubeconfig is loaded by the Kubernetes client library, which
supports exec plug-ins and all spellings of certificates; it is loaded again after a 401 response.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from kubernetes.aio import config
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from kvtier.errors import ConfigurationError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_SECONDS = 60.0
"""The maximum age of a token that was read from a file; client-go uses the same value."""

UNUSABLE = (
    config.ConfigException,
    ConfigurationError,
    OSError,
    yaml.YAMLError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
"""What the library raises for a kubeconfig that is no YAML, or has another form than it expects."""

Load = Callable[[], Awaitable[Any]]


class Credentials:
    """The server's address, TLS configuration and bearer token.

    ``load`` returns a new ``Configuration``. If it fails later on, the last token stays in use.
    Safe to use from several event loops. ``clock`` is monotonic.
    """

    def __init__(
        self,
        configuration: Any,
        load: Load,
        max_age_seconds: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.configuration = configuration
        self._load = load
        self._max_age_seconds = max_age_seconds
        self._clock = clock
        self._loaded_at = clock()
        configuration.refresh_api_key_hook = self._refresh
        # As kubectl does, a proxy is used only where the kubeconfig names one.
        configuration.client_session_kwargs = {"trust_env": False}

    @property
    def server(self) -> str:
        """Scheme, host, port and, behind some gateways, a path."""
        return str(self.configuration.host).rstrip("/")

    @property
    def server_name(self) -> str | None:
        """The name that the server's certificate is checked for, if not the host's."""
        return self.configuration.tls_server_name or None

    def tls(self) -> ssl.SSLContext:
        """A new TLS context; the CA and client certificate files are read again."""
        context: ssl.SSLContext = RESTClientObject(self.configuration).ssl_context
        return context

    async def authorization(self) -> str | None:
        """The value of the ``Authorization`` header."""
        token = await self.configuration.get_api_key_with_prefix("BearerToken")
        if not token:
            basic = bool(self.configuration.username)
            return str(self.configuration.get_basic_auth_token()) if basic else None
        return str(token) if " " in token else f"Bearer {token}"

    def expire(self) -> None:
        """Loads the token again before the next request, because the server rejected it."""
        self._loaded_at = float("-inf")

    async def _refresh(self, configuration: Any) -> None:
        now = self._clock()
        if now - self._loaded_at < self._max_age_seconds and self._loaded_at > float("-inf"):
            return
        self._loaded_at = now
        try:
            configuration.api_key = (await self._load()).api_key
        except (*UNUSABLE, aiohttp.ClientError):
            return


async def load(kubeconfig: Path | None = None, context: str | None = None) -> Credentials:
    """The credentials of a kubeconfig or of one of its contexts, else of the pod's service account.

    Raises ``ConfigurationError``.
    """
    if kubeconfig is None and context is None:
        return in_cluster()
    return await from_kubeconfig(kubeconfig, context)


def in_cluster(
    directory: Path = SERVICE_ACCOUNT,
    environment: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Credentials:
    """The credentials of the pod's service account. Raises ``ConfigurationError``."""
    given = os.environ if environment is None else environment
    host, port = given.get("KUBERNETES_SERVICE_HOST"), given.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise ConfigurationError(
            "KUBERNETES_SERVICE_HOST",
            host or "",
            "must be set, as it is in a pod; else use --kubeconfig",
        )
    token, authority = directory / "token", directory / "ca.crt"
    for path in (token, authority):
        if not path.is_file():
            raise ConfigurationError(
                str(path), "missing", "must exist; see automountServiceAccountToken"
            )

    def read() -> Any:
        configuration = Configuration()
        configuration.host = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        configuration.ssl_ca_cert = str(authority)
        configuration.api_key["BearerToken"] = f"Bearer {token.read_text(encoding='ascii').strip()}"
        return configuration

    async def reload() -> Any:
        return read()

    try:
        return Credentials(read(), reload, TOKEN_SECONDS, clock)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(str(token), str(error), "must be readable") from error


async def from_kubeconfig(path: Path | None, context: str | None = None) -> Credentials:
    """The credentials of a context of a kubeconfig; without a context, of the current one.

    Without a path, ``KUBECONFIG`` or ``~/.kube/config`` is used. Raises ``ConfigurationError``.
    """
    shown = str(path) if path is not None else "KUBECONFIG"

    async def read() -> Any:
        configuration = Configuration()
        configuration.host = ""
        name = str(path) if path is not None else None
        await config.load_kube_config(name, context, configuration, persist_config=False)
        return configuration

    if path is not None and not await asyncio.to_thread(path.is_file):
        raise ConfigurationError(shown, "no such file", "must be a kubeconfig")
    try:
        found = await read()
    except UNUSABLE as error:
        problem = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(shown, problem, "must be a kubeconfig with the context") from error
    has_credentials = found.api_key or found.cert_file or found.username
    if str(found.host).startswith("https:") and not has_credentials:
        # The library only logs why an exec plug-in fails. It is usually not in the image.
        raise ConfigurationError(
            shown,
            "no credentials",
            "must have a token, a certificate, or an exec plug-in that is installed here and works",
        )
    return Credentials(found, read)
