"""A container's command line: options and variables in arguments, in the text of shells and in the
environment. Pure.

Reads only; KVTier never changes a command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtier_operator.api.pods import Container

MAX_DEPTH = 4
"""Nested shells."""
MAX_WORDS = 4096
MAX_TEXT = 32 << 10
"""Characters of a text that are parsed. Variables that refer to each other can expand without
limit."""
MAX_EXPANDED = 1 << 20
"""Characters of all variables together, for the same reason. Later variables are not expanded."""
MAX_DIGITS = 10
SHORT_OPTIONS = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-dpl": "data-parallel-size-local",
    "-pcp": "prefill-context-parallel-size",
}
"""vLLM's short options that are read here. Without ``-n`` (nnodes), which in a shell's text usually
belongs to another program."""
_REFERENCE = re.compile(
    r"\$\$\(|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)|\$\{([A-Za-z_]\w*)(?::?-([^}]{0,256}))?\}|\$([A-Za-z_]\w*)"
)


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A container's command line, parsed.

    ``words``: of command and arguments, of shells' texts in them, and of variables that hold
    options. ``options``: the ``(name, value)`` pairs among them. ``variables``: those with a value
    in the pod.
    """

    words: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    variables: Mapping[str, str]

    def option(self, name: str) -> str | None:
        """The value of an option, or None. If an option is given more than once, the last value
        wins.
        """
        return next((value for key, value in reversed(self.options) if key == name), None)


def parse_command_line(container: Container) -> CommandLine:
    """The command line of a container."""
    variables = literal_environment(container)
    words = _words(container, variables)
    return CommandLine(tuple(words), tuple(parse_options(words)), variables)


def literal_environment(container: Container) -> dict[str, str]:
    """Variables with a value in the pod. If a variable is defined more than once, the last
    definition wins; its value is unknown if that definition has ``valueFrom``.
    """
    known: dict[str, str] = {}
    left = MAX_EXPANDED
    for variable in container.env:
        if variable.value_from is not None:
            known.pop(variable.name, None)
            continue
        text = variable.value[:MAX_TEXT]
        known[variable.name] = expand(text, known) if left > 0 else text
        left -= len(known[variable.name])
    return known


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replaces ``$(NAME)`` as Kubernetes does, and ``$NAME`` and ``${NAME:-default}`` as a shell
    does. References to unknown variables stay, and so do those after ``MAX_TEXT`` characters.
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
    # Variables first: an option in the command itself wins.
    words: list[str] = []
    left = MAX_TEXT
    for text in variables.values():
        if "--" in text:
            words.extend(_split(text[:left], 0))
            left -= min(left, len(text))
    left = MAX_TEXT
    for text in (*container.command, *container.args):
        part = expand(text[:left], variables)[:left]
        left -= len(part)
        words.extend(_split(part, 0))
    return words[-MAX_WORDS:]


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


def parse_options(words: Sequence[str]) -> list[tuple[str, str]]:
    """``(name, value)`` of every option: ``--name value``, ``--name=value``, ``--name``.
    Underscores count as dashes, as in vLLM. The value is empty if none follows.
    """
    pairs: list[tuple[str, str]] = []
    for index, word in enumerate(words):
        key, equals, value = word.partition("=")
        if re.search(r"\s", key):
            continue
        name = key[2:].replace("_", "-") if key.startswith("--") else SHORT_OPTIONS.get(key, "")
        if not name:
            continue
        if not equals:
            following = words[index + 1] if index + 1 < len(words) else ""
            value = "" if following.startswith("-") else following
        pairs.append((name, value))
    return pairs


def parse_count(text: str | None) -> int | None:
    """A positive integer, or None."""
    if not text or len(text) > MAX_DIGITS or not (text.isascii() and text.isdigit()):
        return None
    return int(text) if 0 < int(text) < 1 << 31 else None
