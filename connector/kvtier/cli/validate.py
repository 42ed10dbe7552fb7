"""``kvtier validate``: checks policy files."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from kvtier.cli.console import console, error_console
from kvtier.cli.inputs import display_name, read
from kvtier_operator.api.documents import Checked, parse
from kvtier_operator.api.selector import SELECTS_EVERYTHING, selects_everything
from kvtier_operator.api.unenforced import not_enforced
from kvtier_operator.api.validation import FieldError
from kvtier_operator.render import connectors


@dataclass(frozen=True, slots=True)
class FileReport:
    """The documents of one file, each with its policy or its errors."""

    file: str
    documents: tuple[Checked, ...]

    @property
    def valid(self) -> bool:
        """Whether the file has no errors."""
        return not any(document.errors for document in self.documents)

    @property
    def duplicates(self) -> list[str]:
        """Policies (``namespace/name``) that the file defines more than once."""
        names = Counter(
            f"{document.policy.namespace}/{document.policy.metadata.name}"
            for document in self.documents
            if document.policy is not None
        )
        return [name for name, count in names.items() if count > 1]


def validate(name: str) -> FileReport:
    """Reads and checks a file. A file that cannot be read is an error in the report."""
    try:
        content = read(name)
    except OSError as error:
        unreadable = FieldError.malformed("", error.strerror or str(error))
        return FileReport(display_name(name), (Checked("", None, (unreadable,)),))
    return FileReport(display_name(name), tuple(parse(content)))


def to_json(reports: list[FileReport]) -> dict[str, Any]:
    """The output of ``--json``."""
    return {
        "valid": all(report.valid for report in reports),
        "files": [
            {
                "file": report.file,
                "valid": report.valid,
                "duplicates": report.duplicates,
                "policies": [_document_json(document) for document in report.documents],
            }
            for report in reports
        ],
    }


def show(report: FileReport) -> None:
    """Prints valid policies to standard output, errors and warnings to standard error."""
    for document in report.documents:
        location = f"{report.file}: {document.where}: " if document.where else f"{report.file}: "
        policy = document.policy
        if policy is not None:
            line = Text(f"{location}{policy.namespace}/{policy.metadata.name} ")
            console().print(line.append("valid", style="green"))
        for warning in warnings_of(document):
            error_console().print(Text(f"{location}{warning}", style="yellow"))
        for error in document.errors:
            error_console().print(Text(location).append(error.message, style="red"))
    for name in report.duplicates:
        text = f"{report.file}: {name} is defined more than once; the last definition wins"
        error_console().print(Text(text, style="yellow"))


def warnings_of(document: Checked) -> list[str]:
    """A message for each field that the policy sets and that has no effect, and for a selector of
    every pod. Whether the operator may restart workloads is not known here.
    """
    policy = document.policy
    if policy is None:
        return []
    gaps = connectors.unsupported_fields(policy)
    found = [*not_enforced(policy, may_restart=True), *(gap.message for gap in gaps)]
    if selects_everything(policy.spec.pod_selector):
        found.append(f"spec.podSelector: {SELECTS_EVERYTHING}")
    return found


def _document_json(document: Checked) -> dict[str, Any]:
    policy = document.policy
    return {
        "where": document.where,
        "namespace": policy.namespace if policy is not None else None,
        "name": policy.metadata.name if policy is not None else None,
        "valid": not document.errors,
        "warnings": warnings_of(document),
        "errors": [
            {
                "field": error.field,
                "type": error.type.value,
                "value": error.value,
                "detail": error.detail,
                "message": error.message,
            }
            for error in document.errors
        ],
    }
