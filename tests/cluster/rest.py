"""The API server over plain HTTP: JSON in, status and JSON out. No client library is involved."""

from __future__ import annotations

import base64
import json
import ssl
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

REQUEST_SECONDS = 30


class Api:
    """One context of a kubeconfig, with a token or a client certificate. ``namespace`` is the
    session's own; with ``impersonate`` every call is made as that user.
    """

    def __init__(
        self, kubeconfig: Path, context: str, namespace: str, impersonate: str = ""
    ) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        chosen = _named(config["contexts"], context)["context"]
        cluster = _named(config["clusters"], chosen["cluster"])["cluster"]
        user = _named(config["users"], chosen["user"])["user"]
        self.namespace = namespace
        self._impersonate = impersonate
        self._server = cluster["server"]
        self._token = user.get("token")
        authority = _content(cluster, "certificate-authority", kubeconfig)
        self._context = ssl.create_default_context(cadata=authority.decode() if authority else None)
        certificate, key = (
            _content(user, f"client-{part}", kubeconfig) for part in ("certificate", "key")
        )
        if certificate and key:
            with tempfile.NamedTemporaryFile(suffix=".pem") as pair:
                pair.write(certificate + b"\n" + key)
                pair.flush()
                self._context.load_cert_chain(pair.name)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        accept: str = "application/json",
        content_type: str = "application/json",
    ) -> tuple[int, Any]:
        """The status and the decoded response, including errors."""
        headers = {"Accept": accept, "Content-Type": content_type}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if self._impersonate:
            headers["Impersonate-User"] = self._impersonate
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._server + path, data=data, headers=headers, method=method
        )
        try:
            with urllib.request.urlopen(
                request, timeout=REQUEST_SECONDS, context=self._context
            ) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            try:
                return error.code, json.loads(text)
            except ValueError:
                return error.code, {"message": text}


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(entry for entry in entries if entry["name"] == name)


def _content(holder: dict[str, Any], key: str, kubeconfig: Path) -> bytes | None:
    if f"{key}-data" in holder:
        return base64.b64decode(holder[f"{key}-data"])
    if key in holder:
        return (kubeconfig.parent / holder[key]).read_bytes()
    return None
