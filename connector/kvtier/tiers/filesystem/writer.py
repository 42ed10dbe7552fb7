"""One writer of a directory: its own directory there, its record, its grants. Used by the keeper, one thread at a time.

The record, rewritten at least every ``BEAT_SECONDS``: ``beat``; ``ask`` (number of the latest wish) with ``bytes`` and ``least``; ``used``, what is in
files of every grant; ``settled``, grants that ended and what was used of them, until the janitor has them in its books; ``closed``; ``full`` and
``recount``, counted up when the file system is full and when the books may be wrong.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from kvtier.tiers.filesystem import record
from kvtier.tiers.filesystem.allowance import Allowance
from kvtier.tiers.filesystem.direct import GONE
from kvtier.tiers.filesystem.layout import (
    RECORD,
    WORKING_PREFIX,
    Modes,
    grant_name,
    make_directory,
    offer_name,
    seat_path,
    writers_path,
)
from kvtier.tiers.filesystem.lease import BEAT_SECONDS, BROKEN, LEASE_SECONDS, new_holder, remove_fenced


class Writer:
    """See the module's text. Methods that do I/O raise ``OSError``."""

    def __init__(self, root: Path, modes: Modes, allowance: Allowance) -> None:
        self.name = ""
        self.server_time = 0.0
        """The file system's clock at the latest beat, seconds since its epoch."""
        self.revocations = 0
        self._root = root
        self._modes = modes
        self._allowance = allowance
        self._path = root
        self._beat_at = float("-inf")
        self._dirty = False
        self._recall: tuple[int, object] | None = None
        self._document: dict[str, Any] = {}

    @property
    def registered(self) -> bool:
        """Whether this writer has its directory, as far as it knows."""
        return bool(self.name)

    def alive(self, now: float) -> bool:
        """Whether the lease is good at ``now``: beyond it, others may have given this writer up."""
        return self.registered and now - self._beat_at < LEASE_SECONDS

    def working_path(self) -> str:
        """A new name for a file to be written. Any thread."""
        return f"{self._path}/{WORKING_PREFIX}{os.urandom(6).hex()}"

    def register(self, now: float) -> None:
        """Makes the writer's directory, a new one each time."""
        name = new_holder()
        path = writers_path(self._root) / name
        make_directory(path, self._modes)
        self._document = {
            "beat": 0,
            "ask": 0,
            "bytes": 0,
            "least": 0,
            "used": {},
            "settled": {},
            "closed": False,
            "full": 0,
            "recount": 0,
        }
        record.create(path / RECORD, self._document, self._modes)
        self._path, self.name, self._beat_at, self._recall = path, name, now, None

    def revoked(self) -> None:
        """This writer was given up by the janitor: its grants are void, and it is nobody until it registers anew."""
        self.name = ""
        self.revocations += 1
        self._allowance.revoke()

    def ask(self, size_bytes: int, least_bytes: int) -> None:
        """Wishes for a grant, unless a wish is open."""
        if self._document["bytes"]:
            return
        self._document.update(ask=self._document["ask"] + 1, bytes=size_bytes, least=least_bytes)
        self._dirty = True

    def note(self, what: str) -> None:
        """Counts ``full`` or ``recount`` up."""
        self._document[what] = self._document.get(what, 0) + 1
        self._dirty = True

    def settle(self) -> None:
        """Puts ended grants into the record."""
        for number, used in self._allowance.take_settled().items():
            self._document["settled"][str(number)] = used
            self._dirty = True

    def flush(self, now: float) -> None:
        """Writes the record if it says something new, or a beat is due."""
        if not self._dirty and now - self._beat_at < BEAT_SECONDS:
            return
        self._document["beat"] += 1
        self._document["used"] = {str(number): used for number, used in self._allowance.used().items()}
        try:
            self.server_time = record.rewrite(self._path / RECORD, self._document)
        except OSError as error:
            if error.errno not in BROKEN:
                raise
            self.revoked()
            return
        self._beat_at, self._dirty = now, False

    def collect(self, fence: int, ledger: dict[str, Any]) -> None:
        """Takes what the janitor's record has for this writer."""
        mine = ledger.get("writers", {}).get(self.name)
        if mine is None:
            return
        settled = self._document["settled"]
        # A number that was answered and is not open any more is in the janitor's books.
        for number in [each for each in settled if int(each) not in mine["open"] and int(each) <= mine["answer"][0]]:
            del settled[number]
            self._dirty = True
        number, size_bytes = mine["answer"]
        if self._document["bytes"] and number == self._document["ask"]:
            self._document["bytes"] = 0
            self._dirty = True
            if not size_bytes:
                self._allowance.deny()
            else:
                self._accept(fence, number, size_bytes)
        recall = (fence, ledger.get("recall"))
        if self._recall is not None and self._recall[0] == fence and self._recall != recall:
            self._allowance.recall()
        self._recall = recall

    def _accept(self, fence: int, number: int, size_bytes: int) -> None:
        # The rename is the check of the fencing number: a janitor that was deposed has no directory any more.
        offer = seat_path(self._root, fence) / offer_name(self.name, number)
        try:
            os.rename(offer, self._path / grant_name(number, size_bytes))
        except OSError as error:
            if error.errno not in GONE:
                raise
            return
        self._allowance.add(number, size_bytes)

    def close(self, now: float) -> None:
        """Gives everything back. What is still being written settles by being cut off."""
        if not self.registered:
            return
        self._allowance.recall()
        self.settle()
        # Grants with a file under way have to be charged in full: the janitor does so with what it finds open.
        self._document["closed"] = True
        self._dirty = True
        self.flush(now)

    def remove(self) -> None:
        """Removes the writer's directory where there is no janitor to do so."""
        with contextlib.suppress(OSError):
            remove_fenced(self._path)
