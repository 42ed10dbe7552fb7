"""What a container's command says, however it is written: arguments, a shell's text, variables. Pure, and only for
reading: a command is never changed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 4
"""Shells within shells."""
MAX_WORDS = 4096
MAX_TEXT = 32 << 10
"""Characters of a text that are looked at: variables that name one another can expand without end."""
MAX_EXPANDED = 1 << 20
"""Characters of all variables together; what comes later stays as it is written. Forty thousand of them that name a long one would
fill the memory."""
MAX_DIGITS = 10
SHORT_OPTIONS = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-dpl": "data-parallel-size-local",
    "-pcp": "prefill-context-parallel-size",
}
"""vLLM's short names of options that are read here. Not ``-n`` (nnodes): in a shell's text it is most often another program's."""
_REFERENCE = re.compile(
    r"\$\$\(|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)|\$\{([A-Za-z_]\w*)(?::?-([^}]{0,256}))?\}|\$([A-Za-z_]\w*)"
)
Container = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Said:
    """A container's command, read once. ``words``: of command and arguments, of shells' texts within them, and of variables
    that hold options. ``options``: ``(name, value)`` of each option among them. ``variables``: those whose values are known.
    """

    words: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    variables: Mapping[str, str]

    def option(self, name: str) -> str | None:
        """The value of an option, the last where it is given several times; None where it is not."""
        return next((value for key, value in reversed(self.options) if key == name), None)


def read(container: Container) -> Said:
    """What the container's command says."""
    variables = literal_environment(container)
    found = _words(container, variables)
    return Said(tuple(found), tuple(options(found)), variables)


def literal_environment(container: Container) -> dict[str, str]:
    """Variables whose values stand in the pod. The last of several entries of a name counts; a value from elsewhere is
    not known here, and hides an earlier one.
    """
    known: dict[str, str] = {}
    left = MAX_EXPANDED
    for entry in container.get("env") or ():
        name = str(entry.get("name"))
        if entry.get("valueFrom"):
            known.pop(name, None)
            continue
        text = str(entry.get("value") or "")[:MAX_TEXT]
        known[name] = expanded(text, known) if left > 0 else text
        left -= len(known[name])
    return known


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """The text with ``$(NAME)``, as Kubernetes replaces it, and ``$NAME`` and ``${NAME:-default}``, as a shell would.
    What is not known stays, and so does a text that would become too long.
    """
    length = len(text)

    def value(match: re.Match[str]) -> str:
        nonlocal length
        name = match[1] or match[2] or match[4]
        if name is None or length > MAX_TEXT:
            return match[0]
        found = variables.get(name, match[3] if match[3] is not None else match[0])
        length += len(found)
        return found

    return _REFERENCE.sub(value, text)


def _words(container: Container, variables: Mapping[str, str]) -> list[str]:
    # Variables first: what the command itself says counts, where both say something.
    found: list[str] = []
    left = MAX_TEXT
    for text in variables.values():
        if "--" in text:
            found.extend(_split(text[:left], 0))
            left -= min(left, len(text))
    left = MAX_TEXT
    for text in [*(container.get("command") or ()), *(container.get("args") or ())]:
        part = expanded(str(text)[:left], variables)[:left]
        left -= len(part)
        found.extend(_split(part, 0))
    return found[-MAX_WORDS:]


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


def number(text: str | None) -> int | None:
    """A positive whole number, or None."""
    if not text or len(text) > MAX_DIGITS or not (text.isascii() and text.isdigit()):
        return None
    return int(text) if 0 < int(text) < 1 << 31 else None
