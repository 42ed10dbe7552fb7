"""What a container's command says, however it is written: arguments, a shell's text, variables. Pure, and only for
reading: a command is never changed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAX_DEPTH = 4
"""Shells within shells."""
MAX_WORDS = 4096
SHORT_OPTIONS = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-dpl": "data-parallel-size-local",
    "-pcp": "prefill-context-parallel-size",
    "-n": "nnodes",
}
"""vLLM's short names of options that are read here."""

_REFERENCE = re.compile(r"\$\$\(|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)|\$\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|\$([A-Za-z_]\w*)")

Container = Mapping[str, Any]


def literal_environment(container: Container) -> dict[str, str]:
    """Variables whose values stand in the pod. The last of several entries of a name counts; a value from elsewhere is
    not known here, and hides an earlier one.
    """
    known: dict[str, str] = {}
    for entry in container.get("env") or ():
        name = str(entry.get("name"))
        if entry.get("valueFrom"):
            known.pop(name, None)
        else:
            known[name] = expanded(str(entry.get("value") or ""), known)
    return known


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """The text with ``$(NAME)``, as Kubernetes replaces it, and ``$NAME`` and ``${NAME:-default}``, as a shell would.
    What is not known stays.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2] or match[4]
        if name is None:
            return match[0]
        return variables.get(name, match[3] if match[3] is not None else match[0])

    return _REFERENCE.sub(value, text)


def words(container: Container) -> list[str]:
    """Command and arguments as words, those of shell texts within them and of variables that hold options included."""
    variables = literal_environment(container)
    found: list[str] = []
    for text in [*(container.get("command") or ()), *(container.get("args") or ())]:
        found.extend(_split(expanded(str(text), variables), 0))
    for text in variables.values():
        if "--" in text:
            found.extend(_split(text, 0))
    return found[:MAX_WORDS]


def _split(text: str, depth: int) -> Iterator[str]:
    if depth >= MAX_DEPTH or not re.search(r"\s", text.strip()):
        yield text.strip() if depth else text
        return
    try:
        parts = shlex.split(text.replace("\\\n", " "))
    except ValueError:
        parts = text.split()
    yield text
    for part in parts:
        yield from _split(part.strip(";&|()"), depth + 1)


def options(found: Sequence[str]) -> list[tuple[str, str]]:
    """``(name, value)`` of every option: ``--name value``, ``--name=value``, ``--name``; underscores count as dashes, as
    vLLM has it. The value is empty where none follows.
    """
    pairs: list[tuple[str, str]] = []
    for index, word in enumerate(found):
        key, equals, value = word.partition("=")
        if re.search(r"\s", key):
            continue
        name = key[2:].replace("_", "-") if key.startswith("--") else SHORT_OPTIONS.get(key, "")
        if not name:
            continue
        if not equals:
            following = found[index + 1] if index + 1 < len(found) else ""
            value = "" if following.startswith("-") else following
        pairs.append((name, value))
    return pairs


def option(found: Sequence[str], name: str) -> str | None:
    """The value of an option, the last where it is given several times; None where it is not."""
    values = [value for key, value in options(found) if key == name]
    return values[-1] if values else None


def number(text: str | None) -> int | None:
    """A positive whole number, or None."""
    return int(text) if text and text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31 else None
