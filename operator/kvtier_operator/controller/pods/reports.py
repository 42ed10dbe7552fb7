"""What a pod's ``/status`` says, read as what it is: data from a process that others can influence.

Sizes, types, counts and texts are bounded; whatever is not as it should be reads as absent, and a document that is none
at all is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier_operator.api.status import TierState

MAX_BODY_BYTES = 256 << 10
"""A document with eight tiers, 64 ranks and all counters has some 30 KiB."""
MAX_TEXT = 256
MAX_NUMBER = (1 << 63) - 1
MAX_TIERS = 8
MAX_SESSIONS = 1024
MAX_CONDITIONS = 16
MAX_ENGINES = 4
MAX_COUNTERS = 4096


class MalformedError(ValueError):
    """An answer that is no status document; the text says why, without quoting it."""


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier of one pod. ``hit_tokens``: prompt tokens loaded from it, last five minutes."""

    name: str
    state: TierState
    used_bytes: int
    capacity_bytes: int
    hit_tokens: int | None = None
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What a pod says. ``schedulers`` and ``workers``: how many of its sessions are ready; ``unready``: how many are not.

    ``engines``: names and versions, as far as sessions tell. ``conditions``: type and message.
    """

    version: str = ""
    content_hash: str = ""
    started: bool = False
    applied_generation: int = 0
    live_refusals: tuple[str, ...] = ()
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
        """Whether an engine is there, with its scheduler and workers. One that is still gathering its ranks, beside
        others that have theirs, counts as not yet."""
        return self.schedulers > 0 and self.workers > 0 and self.unready == 0


@dataclass(frozen=True, slots=True)
class LastReport:
    """What is known of a pod by asking. ``report``: its last answer; ``failures``: unanswered polls since; ``why``: of the
    last one. Neither: it has not been asked yet.
    """

    report: Report | None = None
    failures: int = 0
    why: str = ""


NOTHING_SAID = LastReport()


def text(value: Any) -> str:
    """A text of one line and bounded length; empty where it is none."""
    if not isinstance(value, str):
        return ""
    return "".join(letter if letter.isprintable() else " " for letter in value[:MAX_TEXT])


def number(value: Any) -> int | None:
    """A count or a size; None where it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_NUMBER:
        return None
    return value


def entries(value: Any, most: int) -> list[Mapping[str, Any]]:
    """The mappings in a list, up to so many."""
    if not isinstance(value, list):
        return []
    return [entry for entry in value[:most] if isinstance(entry, dict)]


def read(body: bytes) -> Report:
    """Reads a document. Raises ``MalformedError``."""
    if len(body) > MAX_BODY_BYTES:
        raise MalformedError(f"more than {MAX_BODY_BYTES} bytes")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise MalformedError("no JSON") from None
    if not isinstance(document, dict):
        raise MalformedError("no JSON object")
    sessions = entries(document.get("sessions"), MAX_SESSIONS)
    ready = [entry for entry in sessions if entry.get("ready") is True]
    refusals = document.get("liveRefusals")
    return Report(
        version=text(document.get("version")),
        content_hash=text(document.get("contentHash")),
        started=document.get("started") is True,
        applied_generation=number(document.get("appliedGeneration")) or 0,
        live_refusals=tuple(filter(None, map(text, refusals[:MAX_TIERS])))
        if isinstance(refusals, list)
        else (),
        tiers=_tiers(document.get("tiers")),
        schedulers=sum(entry.get("role") == "scheduler" for entry in ready),
        workers=sum(entry.get("role") == "worker" for entry in ready),
        unready=len(sessions) - len(ready),
        sessions_refused=sum(
            number(entry.get("value")) or 0
            for entry in entries(document.get("counters"), MAX_COUNTERS)
            if entry.get("name") == "sessions_refused"
        ),
        prompt_tokens=number(document.get("promptTokens")),
        engines=tuple(sorted({text(entry.get("engineVersion")) for entry in ready} - {""}))[
            :MAX_ENGINES
        ],
        conditions=tuple(
            (text(entry.get("type")), text(entry.get("message")))
            for entry in entries(document.get("conditions"), MAX_CONDITIONS)
        ),
    )


def _tiers(value: Any) -> tuple[TierReport, ...]:
    found: dict[str, TierReport] = {}
    for entry in entries(value, MAX_TIERS):
        name = text(entry.get("name"))
        if not name or name in found:
            continue
        found[name] = TierReport(
            name=name,
            state=_state(entry.get("state")),
            used_bytes=number(entry.get("usedBytes")) or 0,
            capacity_bytes=number(entry.get("capacityBytes")) or 0,
            hit_tokens=number(entry.get("hitTokens")),
            last_error=text(entry.get("lastError")),
        )
    return tuple(found.values())


def _state(value: Any) -> TierState:
    try:
        return TierState(value)
    except ValueError:
        return TierState.UNKNOWN
