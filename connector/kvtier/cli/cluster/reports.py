"""Reports of running pods: tierd's ``/status``, read through the API server's proxy or by URL. They
are parsed by what the controller parses them with.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import http.client
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Protocol

from kvtier.cli.cluster.access import ClusterReader, api_client, right
from kvtier_operator.api.names import token_secret
from kvtier_operator.api.pods import Pod
from kvtier_operator.controller import objects
from kvtier_operator.controller.pods.pod_view import UNREACHABLE_FAILURES
from kvtier_operator.controller.pods.poll import poll_target
from kvtier_operator.controller.pods.reports import (
    MAX_BODY_BYTES,
    NO_REPORT,
    LastReport,
    MalformedReportError,
    parse_report,
)
from kvtier_operator.kube.resources import PODS, SECRETS, ApiError

PROXIED_HEADER = "KVTier-Authorization"
"""The API server's proxy removes ``Authorization``."""
SECONDS = 5.0


class PodStatusSource(Protocol):
    """Reads the ``/status`` of a pod."""

    async def read(self, pod: Pod, token: str | None) -> LastReport:
        """The report, or why there is none."""


class ProxiedStatus:
    """Reads ``/status`` through the API server, which needs the right ``get pods/proxy``."""

    def __init__(self, reader: ClusterReader) -> None:
        self._reader = reader
        self._may_proxy = True

    async def read(self, pod: Pod, token: str | None) -> LastReport:
        client, target = api_client(self._reader), poll_target(pod)
        if client is None or target is None or not self._may_proxy:
            return NO_REPORT
        headers = {PROXIED_HEADER: f"Bearer {token}"} if token else {}
        namespace, name = pod.metadata.namespace, f"{pod.metadata.name}:{target.port}"
        try:
            body = await client.read_pod(namespace, name, "/status", headers, MAX_BODY_BYTES)
        except ApiError as error:
            if error.status == 403:
                self._may_proxy = False
                needed = right("get", PODS, namespace, "proxy")
                self._reader.not_checked.append(
                    f"reports of running pods: the right to {needed} is missing"
                )
                return NO_REPORT
            cause = "the pod does not accept the policy's token" if error.status == 401 else ""
            return failed(cause or f"HTTP {error.status}: {error.message}")
        return parsed(body)


async def read_reports(
    reader: ClusterReader, source: PodStatusSource, pods: Iterable[Pod], policy: str
) -> dict[str, LastReport]:
    """The reports of those of a policy's ``pods`` that run tierd, by uid."""
    asked = [pod for pod in pods if objects.has_tierd(pod) and pod.status.pod_ip]
    if not asked:
        return {}
    token = await read_token(reader, policy)
    answers = await asyncio.gather(*(source.read(pod, token) for pod in asked))
    return {pod.metadata.uid: answer for pod, answer in zip(asked, answers, strict=True)}


async def read_token(reader: ClusterReader, policy: str) -> str | None:
    """The bearer token of a policy's pods; None if it may not be read."""
    purpose = f"reports of pods of policy {policy}"
    secret = await reader.try_get(SECRETS, reader.namespace, token_secret(policy), purpose)
    encoded = ((secret or {}).get("data") or {}).get("token")
    if not encoded:
        return None
    try:
        return base64.b64decode(encoded, validate=True).decode("ascii").strip() or None
    except (binascii.Error, UnicodeDecodeError):
        return None


def read_url(url: str, token: str | None) -> LastReport:
    """The report of a tierd outside Kubernetes. ``url``: with or without ``/status``."""
    headers: Mapping[str, str] = {"Authorization": f"Bearer {token}"} if token else {}
    full = url if url.rstrip("/").endswith("/status") else f"{url.rstrip('/')}/status"
    request = urllib.request.Request(full, headers=dict(headers))  # noqa: S310  (checked by caller)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=SECONDS) as response:
            return parsed(response.read(MAX_BODY_BYTES + 1))
    except urllib.error.HTTPError as error:
        hint = ": give the token with --token-file" if error.code == 401 else ""
        return failed(f"HTTP {error.code}{hint}")
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        return failed(str(getattr(error, "reason", error)) or type(error).__name__)


def parsed(body: bytes) -> LastReport:
    """The report in the body of an answer."""
    try:
        return LastReport(parse_report(body))
    except MalformedReportError as error:
        return failed(f"malformed answer: {error}")


def failed(error: str) -> LastReport:
    """A pod that does not answer."""
    return LastReport(failures=UNREACHABLE_FAILURES, error=error[:256])
