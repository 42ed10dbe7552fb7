"""Reads and writes the files of objects: bytes (io), their layout (format) and their seal (seal).

Any thread may call any method, several at once. Each thread has its own buffers, which direct I/O
can use: a header of 4 KiB, and 2 MiB for encryption if the tier encrypts.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable

from kvtier.errors import TierCorruptError, TierForeignError
from kvtier.tiers.base import ObjectMeta, ObjectRef, Payload
from kvtier.tiers.checksum import preferred
from kvtier.tiers.filesystem import io
from kvtier.tiers.filesystem.format import HEADER_BYTES, clear_padding, is_foreign, write_header
from kvtier.tiers.filesystem.layout import Modes
from kvtier.tiers.filesystem.record import is_nfs
from kvtier.tiers.filesystem.seal import (
    PIECE_BYTES,
    Encryptor,
    Sealing,
    open_object,
    write_tagged,
)
from kvtier.tiers.isolation_keys import IsolationKey, KeySet
from kvtier.tiers.pieces import chunks_of

CHECK_BYTES = 4096


class ObjectFiles:
    """The object files of one tier. ``sealing``: None if objects have no tag. ``direct``: whether
    the mount supports direct I/O."""

    def __init__(self, modes: Modes, sealing: Sealing | None) -> None:
        self.direct = False
        self._modes = modes
        self._sealing = sealing
        self._buffers = threading.local()

    def keys(self) -> KeySet | None:
        """The keys in effect; None if objects have no tag. Raises ``TierKeyMissingError``."""
        return None if self._sealing is None else self._sealing.keys()

    def revalidate(self, path: str) -> bool:
        """Makes the file system forget that the object at ``path`` did not exist, and returns
        whether it may exist now. False if the file system does not cache that.

        An NFS client remembers names that do not exist for as long as it trusts what it knows of
        their directory, up to a minute. Opening a directory makes it ask the server whether that
        has changed. Raises ``OSError``.
        """
        directories = [os.path.dirname(path)]
        for _ in range(2):
            directories.append(os.path.dirname(directories[-1]))
        root = os.path.dirname(directories[-1])
        if not is_nfs(os.stat(root).st_dev):
            return False
        for directory in reversed(directories):
            try:
                os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            except FileNotFoundError:
                return False
        return True

    def read(self, path: str, ref: ObjectRef, into: Payload) -> tuple[ObjectMeta, float]:
        """Reads an object of exactly the size of ``into``, verifies it and decrypts it in place.
        Returns it with the modification time of the file.

        Raises ``OSError`` and every ``TierError`` of ``open_object``.
        """
        keys, header = self.keys(), self._header()
        try:
            modified = io.read_file(path, header, into, self.direct)
            return open_object(header, into, ref, keys), modified
        except TierCorruptError as error:
            # Another format may have another size.
            if is_foreign(io.read_start(path, HEADER_BYTES)):
                raise TierForeignError(f"{path} has another format version: {error}") from error
            raise

    def writer(
        self, ref: ObjectRef, payload: Payload, meta: ObjectMeta, sync: bool
    ) -> Callable[[str], None]:
        """A function that writes the object to a path, which it creates. It raises ``OSError``, and
        must be called on this thread, before another call.

        Raises ``ValueError`` if the format cannot hold the object, and ``TierKeyMissingError``.
        """
        header, keys = self._header(), self.keys()
        write_header(header, ref, meta)
        if isinstance(payload, memoryview) and payload.readonly:
            payload = memoryview(bytearray(payload))
        clear_padding(payload, meta)

        def write(path: str) -> None:
            if keys is not None and self._sealing is not None and self._sealing.encrypt:
                self._write_encrypted(path, ref, payload, meta, keys.current, sync)
                return
            if keys is not None:
                write_tagged(header, payload, ref, meta, keys.current)
            io.write_file(path, header, payload, modes=self._modes, direct=self.direct, sync=sync)

        return write

    def _write_encrypted(
        self,
        path: str,
        ref: ObjectRef,
        payload: Payload,
        meta: ObjectMeta,
        key: IsolationKey,
        sync: bool,
    ) -> None:
        """Encrypts piece by piece: the slot is being read by others and must not change, and a
        second buffer of the size of an object is too much memory."""
        header, scratch = self._header(), self._scratch()
        encryptor = Encryptor(header, ref, meta, key)
        with io.new_file(path, modes=self._modes, direct=self.direct, sync=sync) as descriptor:
            position = HEADER_BYTES
            for plain in chunks_of(payload, PIECE_BYTES):
                piece = scratch[: plain.nbytes]
                encryptor.piece(plain, piece)
                io.write_at(descriptor, [piece], position)
                position += piece.nbytes
            encryptor.finish()
            io.write_at(descriptor, [header], 0)

    def check(self, path: str) -> None:
        """Writes, reads and verifies a small object at ``path``, which it creates and does not
        remove. Raises ``OSError`` and ``TierError``."""
        page = memoryview(mmap.mmap(-1, CHECK_BYTES))
        checksum = preferred()
        meta = ObjectMeta((CHECK_BYTES,), checksum.kind, (checksum.digest(page),))
        ref = ObjectRef(f"{0:032x}", os.urandom(8))
        self.writer(ref, page, meta, sync=False)(path)
        self.read(path, ref, page)

    def _header(self) -> memoryview:
        """This thread's page-aligned header buffer."""
        buffer: memoryview | None = getattr(self._buffers, "header", None)
        if buffer is None:
            buffer = self._buffers.header = memoryview(mmap.mmap(-1, HEADER_BYTES))
        return buffer

    def _scratch(self) -> memoryview:
        buffer: memoryview | None = getattr(self._buffers, "scratch", None)
        if buffer is None:
            buffer = self._buffers.scratch = memoryview(mmap.mmap(-1, PIECE_BYTES))
        return buffer
