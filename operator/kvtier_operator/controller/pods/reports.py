"""Parsing of a pod's ``/status``: untrusted data, since others can influence the process that sends
it.

Sizes, types, counts and text lengths are bounded. An invalid field reads as absent; an invalid
document raises ``MalformedReportError``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier_operator.api.status import TierState

MAX_BODY_BYTES = 256 << 10
"""A document with eight tiers, 64 ranks and all counters has about 30 KiB."""
MAX_TEXT = 256
MAX_NUMBER = (1 << 63) - 1
MAX_TIERS = 8
MAX_VOLUMES = 16
MAX_SESSIONS = 1024
MAX_CONDITIONS = 16
MAX_ENGINES = 4
MAX_COUNTERS = 4096
MAX_TENANTS = 16
_DIGEST = re.compile(r"[0-9a-f]{16}")


class MalformedReportError(ValueError):
    """The answer is not a status document. The message says why, without quoting the answer."""


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier of one pod. ``hit_tokens``: prompt tokens loaded from it, last five minutes."""

    name: str
    state: TierState
    used_bytes: int
    capacity_bytes: int
    hit_tokens: int | None = None
    last_error: str = ""
    volumes: tuple[tuple[str, TierState], ...] = ()
    """Name and state of each, if the tier has several."""
    tenants: int = 0
    """Tenants that hold objects in it."""
    tenant_share_bytes: int = 0
    """What one of them may hold; 0: all of it."""
    largest_tenants: tuple[tuple[str, int], ...] = ()
    """Digest and bytes of those that hold the most."""


@dataclass(frozen=True, slots=True)
class PodReport:
    """The content of a pod's ``/status``.

    ``schedulers`` and ``workers``: numbers of ready sessions; ``unready``: number of the others.
    ``engines``: name and version of each engine that reports them. ``conditions``: type and
    message. ``prompt_tokens``: of the last five minutes. ``pod_uid``: of a pod that shares the
    node's network, empty for others.
    """

    version: str = ""
    pod_uid: str = ""
    content_hash: str = ""
    started: bool = False
    applied_generation: int = 0
    live_errors: tuple[str, ...] = ()
    tiers: tuple[TierReport, ...] = ()
    schedulers: int = 0
    workers: int = 0
    unready: int = 0
    sessions_refused: int = 0
    prompt_tokens: int | None = None
    engines: tuple[str, ...] = ()
    conditions: tuple[tuple[str, str], ...] = ()

    @property
    def attached(self) -> bool:
        """Whether all engines of the pod have attached, each with its scheduler and workers."""
        return self.schedulers > 0 and self.workers > 0 and self.unready == 0


@dataclass(frozen=True, slots=True)
class LastReport:
    """The result of polling a pod. ``report``: its last answer; ``failures``: polls without an
    answer since; ``error``: of the last failed poll. Without a report and without failures the pod
    has not been polled yet.
    """

    report: PodReport | None = None
    failures: int = 0
    error: str = ""


NO_REPORT = LastReport()


def bounded_text(value: Any) -> str:
    """The value as one line of at most ``MAX_TEXT`` characters; empty if it is not a string."""
    if not isinstance(value, str):
        return ""
    return "".join(letter if letter.isprintable() else " " for letter in value[:MAX_TEXT])


def bounded_number(value: Any) -> int | None:
    """A count or a size; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_NUMBER:
        return None
    return value


def entries(value: Any, most: int) -> list[Mapping[str, Any]]:
    """The JSON objects among the first ``most`` entries of a list."""
    if not isinstance(value, list):
        return []
    return [entry for entry in value[:most] if isinstance(entry, dict)]


def parse_report(body: bytes) -> PodReport:
    """Parses the body of an answer. Raises ``MalformedReportError``."""
    if len(body) > MAX_BODY_BYTES:
        raise MalformedReportError(f"more than {MAX_BODY_BYTES} bytes")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise MalformedReportError("not JSON") from None
    if not isinstance(document, dict):
        raise MalformedReportError("not a JSON object")
    sessions = entries(document.get("sessions"), MAX_SESSIONS)
    ready = [entry for entry in sessions if entry.get("ready") is True]
    live_errors = document.get("liveRefusals")
    return PodReport(
        version=bounded_text(document.get("version")),
        pod_uid=bounded_text(document.get("podUid")),
        content_hash=bounded_text(document.get("contentHash")),
        started=document.get("started") is True,
        applied_generation=bounded_number(document.get("appliedGeneration")) or 0,
        live_errors=tuple(filter(None, map(bounded_text, live_errors[:MAX_TIERS])))
        if isinstance(live_errors, list)
        else (),
        tiers=_tiers(document.get("tiers")),
        schedulers=sum(entry.get("role") == "scheduler" for entry in ready),
        workers=sum(entry.get("role") == "worker" for entry in ready),
        unready=len(sessions) - len(ready),
        sessions_refused=sum(
            bounded_number(entry.get("value")) or 0
            for entry in entries(document.get("counters"), MAX_COUNTERS)
            if entry.get("name") == "sessions_refused"
        ),
        prompt_tokens=bounded_number(document.get("promptTokens")),
        engines=tuple(sorted({bounded_text(entry.get("engineVersion")) for entry in ready} - {""}))[
            :MAX_ENGINES
        ],
        conditions=tuple(
            (bounded_text(entry.get("type")), bounded_text(entry.get("message")))
            for entry in entries(document.get("conditions"), MAX_CONDITIONS)
        ),
    )


def _tiers(value: Any) -> tuple[TierReport, ...]:
    found: dict[str, TierReport] = {}
    for entry in entries(value, MAX_TIERS):
        name = bounded_text(entry.get("name"))
        if not name or name in found:
            continue
        found[name] = TierReport(
            name=name,
            state=_state(entry.get("state")),
            used_bytes=bounded_number(entry.get("usedBytes")) or 0,
            capacity_bytes=bounded_number(entry.get("capacityBytes")) or 0,
            hit_tokens=bounded_number(entry.get("hitTokens")),
            last_error=bounded_text(entry.get("lastError")),
            volumes=tuple(
                (bounded_text(each.get("name")), _state(each.get("state")))
                for each in entries(entry.get("volumes"), MAX_VOLUMES)
            ),
            tenants=bounded_number(entry.get("tenants")) or 0,
            tenant_share_bytes=bounded_number(entry.get("tenantShareBytes")) or 0,
            largest_tenants=tuple(
                (digest, bounded_number(each.get("usedBytes")) or 0)
                for each in entries(entry.get("largestTenants"), MAX_TENANTS)
                if _DIGEST.fullmatch(digest := bounded_text(each.get("tenant")))
            ),
        )
    return tuple(found.values())


def _state(value: Any) -> TierState:
    try:
        return TierState(value)
    except ValueError:
        return TierState.UNKNOWN
