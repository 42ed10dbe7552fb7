"""How the API server is reached: address, TLS and bearer token, from inside a pod or from a kubeconfig.

In a pod the service account's token and CA are files that the kubelet replaces: the token is read again every minute
and after a 401. A kubeconfig is loaded by Kubernetes' own library (exec plug-ins, all spellings of certificates), which
is imported only then: a pod does not pay for it.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigurationError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_SECONDS = 60.0
"""As client-go does: a bound token is replaced long before it ends."""


@dataclass(slots=True)
class Access:
    """Where the API server is and how to be let in.

    ``server``: scheme, host and port. ``make_tls`` is called for each new set of connections, so that a replaced CA is
    followed; None: plain HTTP. ``read_token`` returns the token (without ``Bearer``) or None. Use from one thread.
    """

    server: str
    make_tls: Callable[[], ssl.SSLContext] | None = None
    read_token: Callable[[], str | None] = lambda: None
    server_name: str | None = None
    clock: Callable[[], float] = time.monotonic
    _token: str | None = field(default=None, init=False)
    _read_at: float = field(default=float("-inf"), init=False)

    def token(self) -> str | None:
        """The token, at most a minute old. One that cannot be read for a moment stays the last one."""
        now = self.clock()
        if now - self._read_at >= TOKEN_SECONDS:
            try:
                self._token = self.read_token()
            except OSError:
                if self._token is None:
                    raise
            self._read_at = now
        return self._token

    def refused(self) -> None:
        """The server answered 401: the token is read again before the next call."""
        self._read_at = float("-inf")


def in_cluster(
    directory: Path = SERVICE_ACCOUNT, environment: dict[str, str] | None = None
) -> Access:
    """Access of a pod's service account. Raises ``ConfigurationError`` outside of a pod."""
    given = os.environ if environment is None else environment
    host, port = given.get("KUBERNETES_SERVICE_HOST"), given.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise ConfigurationError(
            "KUBERNETES_SERVICE_HOST",
            host or "",
            "set in every pod; outside of a cluster give --kubeconfig",
        )
    token, authority = directory / "token", directory / "ca.crt"
    for path in (token, authority):
        if not path.is_file():
            raise ConfigurationError(
                str(path), "missing", "a pod with automountServiceAccountToken has it"
            )

    def tls() -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(authority))

    def read() -> str:
        return token.read_text(encoding="ascii").strip()

    return Access(f"https://{f'[{host}]' if ':' in host else host}:{port}", tls, read)


def from_kubeconfig(path: Path | None, context: str | None = None) -> Access:
    """Access of a context of a kubeconfig (None: ``KUBECONFIG`` or ``~/.kube/config``; the current context). Raises
    ``ConfigurationError``.
    """
    # Heavy, and of no use in a pod.
    from kubernetes.client import Configuration
    from kubernetes.config import ConfigException, kube_config

    configuration: Any = Configuration()
    configuration.host = ""
    try:
        kube_config.load_kube_config(
            str(path) if path is not None else None,
            context=context,
            client_configuration=configuration,
            persist_config=False,
        )
    except (ConfigException, OSError, TypeError) as error:
        shown = str(path) if path is not None else "KUBECONFIG"
        raise ConfigurationError(shown, str(error), "a kubeconfig with the context") from error

    def tls() -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        if configuration.cert_file:
            made.load_cert_chain(configuration.cert_file, configuration.key_file)
        if not configuration.verify_ssl:
            made.check_hostname = False
            made.verify_mode = ssl.CERT_NONE
        return made

    def read() -> str | None:
        if configuration.refresh_api_key_hook is not None:
            configuration.refresh_api_key_hook(configuration)
        token = configuration.api_key.get("BearerToken") or configuration.api_key.get(
            "authorization"
        )
        return str(token).removeprefix("Bearer ") if token else None

    server = str(configuration.host).rstrip("/")
    name = getattr(configuration, "tls_server_name", None)
    return Access(
        server, tls if server.startswith("https://") else None, read, server_name=name or None
    )
