"""The simple commands of a shell's text. Pure.

Text is split as a POSIX shell splits it: comments, quotes, continuation lines, redirections, here
documents and command substitutions are recognized; the elements of bash arrays too. Nothing is
executed, and both branches of a condition count. Every text is read once from left to right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

_PLAIN = re.compile(r"[^\s\\'\"`$;&|()<>]+")
_DOUBLE_QUOTED = re.compile(r"[^\\\"`$]+")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*]")
_BRACED = re.compile(r"\{([A-Za-z_]\w*|[0-9@*])(\[[@*]\])?(?::?([-+])([^{}]{0,1024}))?\}")
_DELIMITER = re.compile(r"<<(-?)[ \t]*(?:'([^'\n]*)'|\"([^\"\n]*)\"|\\?([^\s;&|()<>]+))")
_WHICH = re.compile(r"\s*(?:which|command\s+-v|type\s+-P)\s+([\w./-]+)\s*")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")


class PieceKind(Enum):
    """``TEXT``: as it is. ``REFERENCE``: to a variable. ``UNKNOWN``: known only at run time."""

    TEXT = "text"
    REFERENCE = "reference"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a word. ``text``: the part as written, without its quotes. Of a reference: ``name``
    and what the text says if the variable is not set (``operator`` is ``-``), or set (``+``).
    """

    text: str
    quoted: bool
    kind: PieceKind = PieceKind.TEXT
    name: str = ""
    operator: str = ""
    other: str = ""


@dataclass(slots=True)
class Word:
    """A word before expansion. ``elements``: of the array that it assigns, or None."""

    pieces: list[Piece] = field(default_factory=list)
    elements: list[Word] | None = None

    @property
    def source(self) -> str:
        """The word as written, without quotes."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def is_quoted(self) -> bool:
        """Whether the word begins with a quote, and so is no keyword and no assignment."""
        return bool(self.pieces) and self.pieces[0].quoted


def simple_commands(text: str) -> Iterator[list[Word]]:
    """The words of each simple command, in the order of the text."""
    return _Lexer(text).commands()


class _Lexer:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._words: list[Word] = []
        self._word: Word | None = None
        self._array: list[Word] | None = None
        """The command's words while the elements of an array are read."""
        self._skips_target = False
        """The next word is the target of a redirection."""
        self._here_documents: list[tuple[str, bool]] = []

    def commands(self) -> Iterator[list[Word]]:
        text = self._text
        while self._at < len(text):
            char = text[self._at]
            if char in " \t\r":
                self._end_word()
                self._at += 1
            elif char == "#" and self._word is None:
                self._skip_comment()
            elif char in "\n;&|()":
                yield from self._separator(char)
            elif char in "<>":
                self._redirection(char)
            else:
                self._part_of_word(char)
        self._close_array()
        yield from self._end_command()

    def _skip_comment(self) -> None:
        end = self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end

    def _separator(self, char: str) -> Iterator[list[Word]]:
        word = self._word
        self._at += 1
        is_plain = word is not None and not word.is_quoted and self._array is None
        if char == "(" and is_plain and word is not None and _ARRAY.fullmatch(word.source):
            self._end_word()
            self._array, self._words = self._words, []
            return
        if self._array is not None:
            self._end_word()
            if char == ")":
                self._close_array()
            return
        yield from self._end_command()
        if char == "\n":
            self._skip_here_documents()

    def _close_array(self) -> None:
        if self._array is None:
            return
        self._end_word()
        elements, self._words, self._array = self._words, self._array, None
        self._words[-1].elements = elements

    def _end_word(self) -> None:
        if self._word is None:
            return
        if self._skips_target:
            self._skips_target = False
        else:
            self._words.append(self._word)
        self._word = None

    def _end_command(self) -> Iterator[list[Word]]:
        self._end_word()
        self._skips_target = False
        if self._words:
            yield self._words
            self._words = []

    def _redirection(self, char: str) -> None:
        text, word = self._text, self._word
        if word is not None and not word.is_quoted and word.source.isdigit():
            self._word = None  # the number of a file descriptor
        self._end_word()
        if text.startswith("(", self._at + 1):  # process substitution
            self._at = _end_of_substitution(text, self._at + 2)
            self._add(Piece(char, True, PieceKind.UNKNOWN))
            return
        found = _DELIMITER.match(text, self._at) if not text.startswith("<<<", self._at) else None
        if found is not None:
            delimiter = next((each for each in found.groups()[1:] if each is not None), "")
            self._here_documents.append((delimiter, found[1] == "-"))
            self._at = found.end()
            return
        while self._at < len(text) and text[self._at] in "<>&|":
            self._at += 1
        self._skips_target = True

    def _skip_here_documents(self) -> None:
        for delimiter, indented in self._here_documents:
            while self._at < len(self._text):
                end = self._text.find("\n", self._at)
                end = len(self._text) if end < 0 else end
                line = self._text[self._at : end]
                self._at = min(end + 1, len(self._text))
                if (line.lstrip("\t") if indented else line) == delimiter:
                    break
        self._here_documents = []

    def _add(self, piece: Piece) -> None:
        if self._word is None:
            self._word = Word()
        self._word.pieces.append(piece)

    def _part_of_word(self, char: str) -> None:
        text = self._text
        if char == "\\":
            if text.startswith("\r\n", self._at + 1):
                self._at += 3
            elif text.startswith("\n", self._at + 1):
                self._at += 2
            else:
                self._add(Piece(text[self._at + 1 : self._at + 2], True))
                self._at += 2
        elif char == "'":
            self._single_quotes()
        elif char == '"':
            self._double_quotes()
        elif char == "`":
            self._backquotes(quoted=False)
        elif char == "$":
            self._dollar(quoted=False)
        else:
            self._plain(_PLAIN, quoted=False)

    def _plain(self, pattern: re.Pattern[str], quoted: bool) -> None:
        found = pattern.match(self._text, self._at)
        end = found.end() if found is not None else self._at + 1
        self._add(Piece(self._text[self._at : end], quoted))
        self._at = end

    def _single_quotes(self) -> None:
        end = self._text.find("'", self._at + 1)
        if end < 0:  # unfinished: the quote is a character like any other
            self._add(Piece("'", False))
            self._at += 1
            return
        self._add(Piece(self._text[self._at + 1 : end], True))
        self._at = end + 1

    def _double_quotes(self) -> None:
        text = self._text
        self._add(Piece("", True))
        self._at += 1
        while self._at < len(text) and text[self._at] != '"':
            char = text[self._at]
            if char == "\\" and self._at + 1 < len(text):
                following = text[self._at + 1]
                if following in '$`"\\':
                    self._add(Piece(following, True))
                elif following != "\n":
                    self._add(Piece(char + following, True))
                self._at += 2
            elif char == "`":
                self._backquotes(quoted=True)
            elif char == "$":
                self._dollar(quoted=True)
            else:
                self._plain(_DOUBLE_QUOTED, quoted=True)
        self._at += 1

    def _backquotes(self, quoted: bool) -> None:
        end = self._text.find("`", self._at + 1)
        end = len(self._text) if end < 0 else end
        self._substitution(self._text[self._at + 1 : end], quoted)
        self._at = end + 1

    def _dollar(self, quoted: bool) -> None:
        text, start = self._text, self._at
        following = text[start + 1 : start + 2]
        if following == "(":
            end = _end_of_substitution(text, start + 2)
            self._substitution(text[start + 2 : end - 1], quoted)
            self._at = end
            return
        if following == "'" and not quoted:
            self._at += 1
            self._single_quotes()
            return
        pattern, begin = (_BRACED, start + 1) if following == "{" else (_NAME, start + 1)
        found = pattern.match(text, begin)
        if found is None:
            self._add(Piece("$", quoted, PieceKind.UNKNOWN))
            self._at += 1
            return
        self._at = found.end()
        kind, source = PieceKind.REFERENCE, text[start : self._at]
        if pattern is _NAME:
            self._add(Piece(source, quoted, kind, found[0]))
        else:
            operator, other = found[3] or "", found[4] or ""
            self._add(Piece(source, quoted, kind, found[1], operator, other))

    def _substitution(self, command: str, quoted: bool) -> None:
        found = _WHICH.fullmatch(command)
        if found is not None:
            self._add(Piece(found[1], quoted))
        else:
            self._add(Piece("$()", quoted, PieceKind.UNKNOWN))


def _end_of_substitution(text: str, at: int) -> int:
    """The index after the parenthesis that closes the substitution whose content begins at ``at``;
    the length of the text plus 1 if nothing closes it.
    """
    open_parts = ["("]
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif open_parts[-1] == '"':
            if char == '"':
                open_parts.pop()
            elif char == "$" and text.startswith("(", at + 1):
                open_parts.append("(")
                at += 1
        elif char == "'":
            end = text.find("'", at + 1)
            at = len(text) if end < 0 else end
        elif char in '"(':
            open_parts.append(char)
        elif char == ")":
            open_parts.pop()
            if not open_parts:
                return at + 1
        at += 1
    return len(text) + 1
