"""Findings of ``kvtier doctor``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rich.text import Text

from kvtier.cli.console import console


class Severity(StrEnum):
    """``ERROR``: a tier does not work. ``WARNING``: it may be slow, or fail later. ``INFO``: good
    to know. ``OK``: nothing to do.
    """

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    OK = "ok"


STYLES = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}
ORDER = tuple(Severity)


@dataclass(frozen=True, slots=True)
class Finding:
    """One result. ``check``: an identifier. ``subject``: what was checked. ``remedy``: what to
    change; empty if nothing.
    """

    check: str
    severity: Severity
    subject: str
    message: str
    remedy: str = ""


def exit_status(findings: Iterable[Finding]) -> int:
    """1 if there is an error, else 0."""
    return int(any(each.severity is Severity.ERROR for each in findings))


def to_json(findings: Sequence[Finding], not_checked: Sequence[str] = ()) -> dict[str, Any]:
    """The output of ``-o json``."""
    return {
        "findings": [
            {
                "check": each.check,
                "severity": each.severity.value,
                "subject": each.subject,
                "message": each.message,
                "remedy": each.remedy or None,
            }
            for each in findings
        ],
        "notChecked": list(not_checked),
    }


def from_json(document: Any, where: str) -> list[Finding]:
    """The findings in the output of another ``kvtier doctor``, which ran in ``where``. Entries of
    another form are left out.
    """
    found = []
    entries = document.get("findings") if isinstance(document, dict) else None
    for each in entries if isinstance(entries, list) else ():
        try:
            subject = f"{where}: {each['subject']}"
            remedy = str(each.get("remedy") or "")
            severity = Severity(each["severity"])
            found.append(Finding(each["check"], severity, subject, str(each["message"]), remedy))
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    return found


def show(findings: Sequence[Finding], not_checked: Sequence[str] = ()) -> None:
    """Prints the findings, errors first."""
    out = console()
    for each in sorted(findings, key=lambda finding: ORDER.index(finding.severity)):
        line = Text(f"{each.severity.value:<8}", style=STYLES.get(each.severity, "green"))
        out.print(line.append(f"{each.check}: {each.subject}: {each.message}", style="default"))
        if each.remedy:
            out.print(Text(f"        -> {each.remedy}"))
    for text in not_checked:
        out.print(Text(f"not checked: {text}", style="yellow"))
    counts = {each: sum(finding.severity is each for finding in findings) for each in ORDER}
    out.print(Text(", ".join(f"{number} {each.value}" for each, number in counts.items())))
