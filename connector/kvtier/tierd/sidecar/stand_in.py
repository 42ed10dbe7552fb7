"""Answers on tierd's address while there is no tierd: what is waited for, and why.

Without it, an unreadable document would look like a pod that cannot be reached.
"""

from __future__ import annotations

import logging
from pathlib import Path

from kvtier import __version__
from kvtier.tierd.http import HttpServer, text
from kvtier.tierd.reporting import routes
from kvtier.tierd.status import Condition, Snapshot
from kvtier.tierd.token import Token
from kvtier.topology.models import HttpEndpoint, Structural

_log = logging.getLogger("kvtier.sidecar")


class StandIn:
    """``begin`` and ``end`` by the supervisor's thread; neither raises."""

    def __init__(self, token_file: Path | None, port: int) -> None:
        self._endpoint = HttpEndpoint(host="0.0.0.0", port=port)  # noqa: S104  (who asks is in other pods)
        self._token = None if token_file is None else Token(token_file)
        self._server: HttpServer | None = None
        self._snapshot = Snapshot()
        self._problem = ""

    def begin(self, structural: Structural | None, kind: str, problem: str) -> None:
        """Answers from here on, with ``problem`` as a condition of type ``kind``."""
        policy = "" if structural is None else f"{structural.policy.namespace}/{structural.policy.name}"
        content_hash = "" if structural is None else structural.content_hash
        self._problem = problem
        self._snapshot = Snapshot(
            version=__version__, policy=policy, content_hash=content_hash, conditions=(Condition(kind, problem),)
        )
        if self._server is not None:
            return
        endpoint = self._endpoint if structural is None else structural.http
        found = routes(lambda: self._snapshot, lambda: text(503, f"tierd does not run: {self._problem}"))
        try:
            self._server = HttpServer(endpoint.host, endpoint.port, found, self._token)
        except OSError as error:
            _log.debug("http on %s port %d: %s", endpoint.host, endpoint.port, error)

    def end(self) -> None:
        """Gives the address back."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
