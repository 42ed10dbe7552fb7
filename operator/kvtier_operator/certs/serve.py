"""The serving certificate: read from a directory or from the Secret, taken into use without a restart."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path

from kvtier_operator.certs import certificates

logger = logging.getLogger(__name__)
LOOK_SECONDS = 2.0
"""How often a mounted directory is looked at. The kubelet replaces it about once a minute at most."""
MAX_FILE_BYTES = 1 << 20
"""A certificate chain has a few KiB."""


class UnusableError(Exception):
    """Certificate and key cannot serve; the message says why."""


class ServingCertificate:
    """One TLS context whose certificate changes. New connections get the newest; those that exist are not touched.

    Used on the event loop's thread only. ``on_change`` is told when the certificate in use ends (seconds since 1970).
    """

    def __init__(self, on_change: Callable[[float], None] | None = None) -> None:
        self.context = _context()
        self.loaded = False
        self._pair: tuple[bytes, bytes] = (b"", b"")
        self._on_change = on_change

    def take(self, certificate: bytes, key: bytes) -> bool:
        """Serves this pair (PEM) from now on; whether it was another one. Raises ``UnusableError``, and goes on with
        what it has.
        """
        if (certificate, key) == self._pair:
            return False
        ends = certificates.expiry(certificate)
        if ends is None:
            raise UnusableError("the certificate cannot be read")
        # A context that took half of a pair would be of no use: a context of nobody tries it first.
        _load(_context(), certificate, key)
        _load(self.context, certificate, key)
        self._pair = (certificate, key)
        self.loaded = True
        if self._on_change is not None:
            self._on_change(ends)
        return True


class CertificateDirectory:
    """A directory with ``tls.crt`` and ``tls.key``, as the kubelet mounts a Secret: replaced as a whole, by a link."""

    def __init__(self, directory: Path, serving: ServingCertificate) -> None:
        self._directory = directory
        self._serving = serving
        self._said = ""

    async def follow(self, look_seconds: float = LOOK_SECONDS) -> None:
        """Takes what is there, again and again, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(look_seconds)

    def look(self) -> None:
        """Takes what is there, if it is another pair and usable; says once what is wrong otherwise."""
        try:
            # Follows links, so a swapped ..data is seen; a swap between the two reads gives a pair that does not fit,
            # and the next look gives one that does.
            pair = (self._read(certificates.CERTIFICATE), self._read(certificates.KEY))
            if self._serving.take(*pair):
                logger.info("serving certificate taken from %s", self._directory)
            self._said = ""
        except (OSError, UnusableError) as error:
            if str(error) != self._said:
                logger.warning("serving certificate in %s: %s", self._directory, error)
            self._said = str(error)

    def _read(self, name: str) -> bytes:
        with (self._directory / name).open("rb") as file:
            return file.read(MAX_FILE_BYTES)


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _load(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """OpenSSL's Python interface reads files only; the key never reaches a disk."""
    descriptor = os.memfd_create("kvtier-serving")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(certificate + b"\n" + key)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    except (ssl.SSLError, ValueError) as error:
        raise UnusableError(f"certificate and key cannot be used together: {error}") from None
    finally:
        os.close(descriptor)
