"""A tierd in this process, as one worker's client sees it, for tests of the worker side.

It records the worker's messages and sends those of the test. Like the real client it delivers from
a thread of its own if ``threaded``, and after a loss it does not attach again before
``reattach``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

from kvtier.store.generations import generation_bytes
from kvtier.tierd.wire import GENERATIONS_NAME, PROTOCOL, Hello, Message, Ready, Welcome

FIRST_GENERATION = 2


class StubTierd:
    """Client and daemon in one. Any thread."""

    def __init__(
        self,
        run_directory: Path,
        hello: Callable[[], Hello],
        sink: Callable[[Message], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._hello = hello
        self._sink = sink
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self.pool = run_directory / "pool"
        self.attached = False
        self.full = False
        self.started = False
        self.closed = False
        self.sent: list[Message] = []
        self.hellos: list[Hello] = []
        self.reattached: list[int] = []
        self.dropped: list[str] = []
        self.on_reattach: Callable[[int], None] | None = None
        """Called on the worker's thread before it continues: the actions of a new tierd."""

    def start(self) -> None:
        """As the client's."""
        self.started = True

    def welcome(self, epoch: int, nbytes: int | None = None) -> None:
        """Tierd answers the Hello of a worker that is alone, and opens its namespace."""
        hello = self._hello()
        self.hellos.append(hello)
        self.attached = True
        size = self.pool.stat().st_size if nbytes is None else nbytes
        words = self.pool.with_name(GENERATIONS_NAME)
        if not words.exists() or words.stat().st_size < generation_bytes(size):
            # Every slot holds a complete object, in its first generation.
            words.write_bytes(
                FIRST_GENERATION.to_bytes(4, sys.byteorder) * (generation_bytes(size) // 4)
            )
        message = Welcome(
            protocol=PROTOCOL,
            epoch=epoch,
            session=1,
            pool_path=str(self.pool),
            pool_bytes=size,
            tiers=("ram",),
            settings="{}",
        )
        self._sink(message)
        sizes = hello.shard_bytes
        shards = tuple((0, size, True) for size in sizes)
        ready = Ready(namespace="n", slot_bytes=sizes, persistent=True, shards=shards)
        self._sink(ready)

    def say(self, message: Message) -> None:
        """Any message of tierd's."""
        self._sink(message)

    def lose(self, reason: str = "killed") -> None:
        """Tierd is gone."""
        self.attached = False
        self._on_lost(reason)

    def send(self, message: Message) -> bool:
        """As the client's; False also while ``full``."""
        with self._changed:
            if not self.attached or self.full:
                return False
            self.sent.append(message)
            self._changed.notify_all()
            return True

    def reattach(self, drained_epoch: int) -> None:
        """As the client's."""
        if self.on_reattach is not None:
            self.on_reattach(drained_epoch)
        with self._changed:
            self.reattached.append(drained_epoch)
            self._changed.notify_all()

    def drop(self, reason: str) -> None:
        """As the client's."""
        self.dropped.append(reason)
        self.lose(reason)

    def close(self, timeout_seconds: float) -> None:
        """As the client's: in order."""
        self.closed = True
        self.attached = False

    def wait(self, what: Callable[[StubTierd], bool], seconds: float = 60.0) -> bool:
        """Waits until ``what`` holds; it is looked at whenever the worker sends or reattaches."""
        with self._changed:
            return self._changed.wait_for(lambda: what(self), seconds)

    def of(self, kind: type[Message]) -> list[Message]:
        """What was sent of one kind."""
        with self._changed:
            return [message for message in self.sent if type(message) is kind]
