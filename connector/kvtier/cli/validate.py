"""`kvtier validate`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from kvtier.cli.console import console, error_console
from kvtier.cli.render import read, shown_name
from kvtier_operator.api.documents import Checked, parse
from kvtier_operator.api.validation import FieldError


@dataclass(frozen=True, slots=True)
class Report:
    """What one file holds."""

    file: str
    policies: tuple[Checked, ...]

    @property
    def accepted(self) -> bool:
        """Whether nothing in it was refused."""
        return not any(checked.errors for checked in self.policies)


def check(name: str) -> Report:
    """Reads and checks a file; one that cannot be read is a refusal as well."""
    try:
        content = read(name)
    except OSError as error:
        refusal = FieldError.malformed("", error.strerror or str(error))
        return Report(shown_name(name), (Checked("", None, (refusal,)),))
    return Report(shown_name(name), tuple(parse(content)))


def duplicates(report: Report) -> list[str]:
    """Policies (``namespace/name``) that the file holds more than once: applying it would keep the last only."""
    names = Counter(
        f"{checked.policy.namespace}/{checked.policy.metadata.name}"
        for checked in report.policies
        if checked.policy is not None
    )
    return [name for name, count in names.items() if count > 1]


def as_json(reports: list[Report]) -> dict[str, Any]:
    """For programs."""
    return {
        "accepted": all(report.accepted for report in reports),
        "files": [
            {
                "file": report.file,
                "accepted": report.accepted,
                "duplicates": duplicates(report),
                "policies": [_policy_json(checked) for checked in report.policies],
            }
            for report in reports
        ],
    }


def _policy_json(checked: Checked) -> dict[str, Any]:
    policy = checked.policy
    return {
        "where": checked.where,
        "namespace": policy.namespace if policy is not None else None,
        "name": policy.metadata.name if policy is not None else None,
        "accepted": not checked.errors,
        "errors": [
            {
                "field": error.field,
                "type": error.type.value,
                "value": error.value,
                "detail": error.detail,
                "message": error.message,
            }
            for error in checked.errors
        ],
    }


def show(report: Report) -> None:
    """For people: what was accepted to standard output, what was refused to standard error."""
    for checked in report.policies:
        where = f"{report.file}: {checked.where}: " if checked.where else f"{report.file}: "
        if checked.policy is not None:
            line = Text(f"{where}{checked.policy.namespace}/{checked.policy.metadata.name} ")
            console().print(line.append("accepted", style="green"))
        for found in checked.errors:
            field, _, rest = found.message.partition(": ")
            line = Text(where).append(field, style="bold")
            error_console().print(line.append(f": {rest}"))
    for name in duplicates(report):
        error_console().print(
            Text(
                f"{report.file}: {name} is there more than once; applied in order, the last one stays",
                style="yellow",
            )
        )
