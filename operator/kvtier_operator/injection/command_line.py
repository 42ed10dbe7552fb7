"""A container's command line: commands, options and variables in arguments, in the text of shells
and in the environment. Pure.

Reads only; KVTier never changes a command. Where a text leaves open what is executed (a condition,
a variable that is known only at run time), everything that could be executed counts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvtier_operator.api.pods import Container
from kvtier_operator.injection.programs import ENGINE_PROGRAMS, Program, program_of
from kvtier_operator.injection.shell_text import Piece, PieceKind, Word, simple_commands

MAX_DEPTH = 4
"""Nested shells."""
MAX_WORDS = 4096
MAX_TEXT = 32 << 10
"""Characters of a text that are parsed. Variables that refer to each other can expand without
limit."""
MAX_PARSED = 4 * MAX_TEXT
"""Characters that are parsed altogether, in nested shells too."""
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
SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"})
KEYWORDS = frozenset({"if", "then", "else", "elif", "do", "while", "until", "!", "{", "}", "time"})
DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset"})
TEXT_PROGRAMS = frozenset(
    {
        "[",
        "[[",
        ":",
        "awk",
        "case",
        "cat",
        "command",
        "curl",
        "cut",
        "done",
        "echo",
        "egrep",
        "esac",
        "exit",
        "false",
        "fi",
        "find",
        "for",
        "function",
        "getent",
        "grep",
        "head",
        "jq",
        "kill",
        "logger",
        "ls",
        "mkdir",
        "printf",
        "pwd",
        "return",
        "sed",
        "select",
        "set",
        "shift",
        "sleep",
        "sort",
        "tail",
        "test",
        "trap",
        "true",
        "type",
        "unset",
        "wait",
        "wget",
        "which",
    }
)
"""Programs whose arguments are text, not a command and not the options of an engine."""
_REFERENCE = re.compile(
    r"\$\$\(|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)|\$\{([A-Za-z_]\w*)(?::?-([^}]{0,256}))?\}|\$([A-Za-z_]\w*)"
)
_KUBERNETES_REFERENCE = re.compile(r"\$\$\(|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_SHELL_OPTIONS = re.compile(r"[-+][a-zA-Z]+")
_HOLDS_OPTIONS = re.compile(
    r"(^|_)(ARGS?|ARGUMENTS|OPTS?|OPTIONS|FLAGS|PARAMS?|PARAMETERS|CMD|COMMAND|CLI|EXTRA)(_|$)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A container's command line, parsed.

    ``commands``: the words of each command that could be executed, in shells' texts too; without
    programs that print or search text. ``options``: the ``(name, value)`` pairs of the engine's
    commands, or of all if none is known to be an engine's, and of variables that hold options.
    ``variables``: those with a value in the pod. ``assignments``: variables that a shell's text
    assigns, with the text of the value before expansion. ``programs``: what the commands run.
    """

    commands: tuple[tuple[str, ...], ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    assignments: tuple[tuple[str, str], ...] = ()
    programs: tuple[Program, ...] = ()

    def option(self, name: str) -> str | None:
        """The value of an option, or None. If an option is given more than once, the last value
        wins.
        """
        return next((value for key, value in reversed(self.options) if key == name), None)


def parse_command_line(container: Container) -> CommandLine:
    """The command line of a container."""
    variables = literal_environment(container)
    reader = _Reader(variables, _unknown_names(container), bool(container.env_from))
    argv: list[str] = []
    left = MAX_TEXT
    for text in (*container.command, *container.args):
        part = expand_by_kubernetes(text[:left], variables)[:left]
        left -= len(part)
        argv.append(part)
    reader.execute(argv, has_program=bool(container.command))
    words: list[str] = []
    # Variables first: an option in the command itself wins.
    for name, value in variables.items():
        if "--" in value and (value.lstrip().startswith("-") or _HOLDS_OPTIONS.search(name)):
            words += reader.split(value)
    words += reader.possible_words()
    engines = [each for each in reader.commands if program_of(each) in ENGINE_PROGRAMS]
    pairs = parse_options(words)
    for command in engines or reader.commands:
        pairs += parse_options(command)
    return CommandLine(
        tuple(reader.commands),
        tuple(pairs[-MAX_WORDS:]),
        variables,
        tuple(reader.assignments),
        tuple(found for each in reader.commands if (found := program_of(each)) is not None),
    )


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
    return _replace(_REFERENCE, text, variables)


def expand_by_kubernetes(text: str, variables: Mapping[str, str]) -> str:
    """Replaces ``$(NAME)`` only. The limits of ``expand`` apply."""
    return _replace(_KUBERNETES_REFERENCE, text, variables)


def _replace(pattern: re.Pattern[str], text: str, variables: Mapping[str, str]) -> str:
    length = len(text)

    def value(match: re.Match[str]) -> str:
        nonlocal length
        groups = (*match.groups(), None, None, None)
        name, default = groups[0] or groups[1] or groups[3], groups[2]
        if name is None or length > MAX_TEXT:
            return match[0]
        found = variables.get(name, default if default is not None else match[0])
        length += len(found)
        return found

    return pattern.sub(value, text)


class _Reader:
    """Collects the commands that a container could execute.

    ``unknown``: variables whose value is not in the pod. ``any_unknown``: others may have one too.
    """

    def __init__(
        self, variables: Mapping[str, str], unknown: frozenset[str], any_unknown: bool
    ) -> None:
        self.commands: list[tuple[str, ...]] = []
        self.assignments: list[tuple[str, str]] = []
        self._environment = variables
        self._unknown = unknown
        self._any_unknown = any_unknown
        self._assigned: dict[str, list[str]] = {}
        self._possible: list[str] = []
        """Texts with options that a variable may hold when the engine starts."""
        self._left = MAX_PARSED
        self._words_left = MAX_WORDS

    def execute(self, argv: Sequence[str], has_program: bool) -> None:
        """Reads the container's own command. ``has_program``: its first word is a program, and not
        an argument of the image's entry point.
        """
        if not argv:
            return
        if not has_program and re.search(r"\s", argv[0].strip()) and not _is_document(argv[0]):
            # The entry point is a shell, or passes its arguments to one.
            self._read_text(argv[0], argv[1:], 0)
            return
        self._run(argv, (), 0)
        if not self.commands or self.commands[-1] != tuple(argv):
            return
        if program_of(argv) is None:
            # A launcher or an entry point: what it does with its arguments is not known.
            self.commands[-1] = tuple(expand(word, self._environment) for word in argv)
            for word in argv:
                if re.search(r"\s", word.strip()) and not _is_document(word):
                    self._read_text(expand(word, self._environment), (), 1)

    def split(self, text: str) -> list[str]:
        """The words of a text of options, as a shell would split it."""
        words: list[str] = []
        for command in simple_commands(self._take(text)):
            for word in command:
                words += self._expand(word, ())
        return words

    def possible_words(self) -> list[str]:
        """The words of every value with options that a shell's text assigns to a variable."""
        return [word for text in self._possible for word in self.split(text)]

    def _take(self, text: str) -> str:
        part = text[: min(self._left, MAX_TEXT)]
        self._left -= len(part)
        return part

    def _read_text(self, text: str, positional: Sequence[str], depth: int) -> None:
        if depth >= MAX_DEPTH:
            return
        for words in simple_commands(self._take(text)):
            self._read_command(words, positional, depth)

    def _read_command(self, words: Sequence[Word], positional: Sequence[str], depth: int) -> None:
        rest = list(words)
        while rest and not rest[0].is_quoted:
            if rest[0].source in KEYWORDS:
                rest.pop(0)
            elif _ASSIGNMENT.match(rest[0].source):
                self._assign(rest.pop(0), positional)
            else:
                break
        if not rest:
            return
        if rest[0].source in DECLARATIONS:
            for word in rest[1:]:
                if _ASSIGNMENT.match(word.source):
                    self._assign(word, positional)
            return
        fields = [field for word in rest for field in self._expand(word, positional)]
        if fields and fields[0] == "exec":
            fields = fields[1:]
        if fields and fields[0] not in TEXT_PROGRAMS:
            self._run(fields, positional, depth)

    def _run(self, words: Sequence[str], positional: Sequence[str], depth: int) -> None:
        """Reads one command: of a shell with ``-c`` the text, else its words."""
        if words[0] == "eval":
            self._read_text(" ".join(words[1:]), positional, depth + 1)
            return
        for index, word in enumerate(words):
            if word.rpartition("/")[2] not in SHELLS:
                continue
            following = _shell_text(words[index + 1 :])
            if following is not None:
                text, arguments = following
                self._read_text(text, arguments, depth + 1)
                return
        if _asks_for_help(words):
            return
        kept = tuple(words[: self._words_left])
        self._words_left -= len(kept)
        if kept:
            self.commands.append(kept)

    def _assign(self, word: Word, positional: Sequence[str]) -> None:
        found = _ASSIGNMENT.match(word.source)
        if found is None:
            return
        name = found[1]
        if word.elements is not None:
            values = [field for each in word.elements for field in self._expand(each, positional)]
            text = shlex.join(values)
            source = " ".join(each.source for each in word.elements)
        else:
            source = word.source[found.end() :]
            values = self._expand(word, positional, splits=False)
            values = [" ".join(values)[found.end() :]]
            text = values[0]
        self.assignments.append((name, source))
        earlier = self._assigned.get(name, []) if found[2] else []
        self._assigned[name] = [*earlier, *values]
        if "--" in text:
            self._possible.append(text)

    def _expand(self, word: Word, positional: Sequence[str], splits: bool = True) -> list[str]:
        """The fields of a word. Without ``splits`` there is one, as in an assignment."""
        fields: list[str] = []
        current: str | None = None
        for piece in word.pieces:
            values = self._values(piece, positional)
            if piece.quoted or not splits or piece.kind is not PieceKind.REFERENCE:
                parts = values if piece.name == "@" or len(values) > 1 else [" ".join(values)]
            else:
                parts = [part for value in values for part in value.split()]
            for index, part in enumerate(parts):
                if index:
                    fields.append(current or "")
                    current = None
                current = (current or "") + part
        if current is not None:
            fields.append(current)
        return fields if splits else [" ".join(fields)]

    def _values(self, piece: Piece, positional: Sequence[str]) -> Sequence[str]:
        """What a piece of a word stands for. A variable that is unknown keeps its text."""
        if piece.kind is not PieceKind.REFERENCE:
            return [piece.text]
        name = piece.name
        if name in "@*":
            return positional if name == "@" else [" ".join(positional)]
        values: Sequence[str] | None = None
        if name.isdigit():
            values = positional[int(name) - 1 : int(name)] if int(name) else ["sh"]
        elif name in self._assigned:
            values = self._assigned[name]
        elif name in self._environment:
            values = [self._environment[name]]
        is_unknown = values is None and (self._any_unknown or name in self._unknown)
        if piece.operator == "+":
            other = [expand(_unquoted(piece.other), self._environment)]
            if is_unknown and "--" in other[0]:
                self._possible.append(other[0])
            return other if values and any(values) else []
        if piece.operator == "-" and not (values and any(values)):
            return [expand(_unquoted(piece.other), self._environment)]
        return [piece.text] if values is None else values


def _shell_text(arguments: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """The text after ``-c`` and the positional parameters from ``$1``, or None if a shell has no
    such text.
    """
    takes_text = False
    index = 0
    while index < len(arguments):
        word = arguments[index]
        if _SHELL_OPTIONS.fullmatch(word):
            takes_text = takes_text or "c" in word
            if word[-1] in "oO":  # the name of an option follows
                index += 1
        elif not word.startswith(("-", "+")) or word in ("-", "--"):
            if word in ("-", "--"):
                index += 1
            break
        index += 1
    if not takes_text or index >= len(arguments):
        return None
    return arguments[index], arguments[index + 2 :]


def _asks_for_help(words: Sequence[str]) -> bool:
    return any(word in ("--help", "--version") or word.startswith("--help=") for word in words)


def _is_document(word: str) -> bool:
    return word.lstrip().startswith(("{", "["))


def _unquoted(text: str) -> str:
    return text.strip().strip("'\"") if text.count('"') + text.count("'") <= 2 else text


def _unknown_names(container: Container) -> frozenset[str]:
    return frozenset(each.name for each in container.env if each.value_from is not None)


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
