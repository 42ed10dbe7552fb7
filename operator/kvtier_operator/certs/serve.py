"""The webhook's serving certificate, loaded from a directory or a Secret and replaced without a
restart.

Everything runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path

from kvtier_operator.certs import certificates

logger = logging.getLogger(__name__)
POLL_SECONDS = 2.0
"""How often a mounted directory is read. The kubelet updates it about once a minute."""
MAX_FILE_BYTES = 1 << 20
"""A certificate chain has a few KiB."""


class UnusableCertificateError(Exception):
    """Certificate and key cannot be served; the message says why."""


class ServingCertificate:
    """A TLS context whose certificate changes. New connections use the latest certificate; open
    ones are unaffected.

    ``on_change`` is called with the expiry (Unix time) of each certificate that is loaded.
    """

    def __init__(self, on_change: Callable[[float], None] | None = None) -> None:
        self.context = _new_context()
        self.loaded = False
        self._pair: tuple[bytes, bytes] = (b"", b"")
        self._on_change = on_change

    def load(self, certificate: bytes, key: bytes) -> bool:
        """Serves this pair (PEM) from the next connection on. Returns whether it differs from the
        current one.

        Raises ``UnusableCertificateError``; the current pair then stays in use.
        """
        if (certificate, key) == self._pair:
            return False
        expiry = certificates.expiry(certificate)
        if expiry is None:
            raise UnusableCertificateError("the certificate is not valid PEM")
        # A failed load can leave a context with a certificate and no key, so a new context tries
        # the pair first.
        _load_chain(_new_context(), certificate, key)
        _load_chain(self.context, certificate, key)
        self._pair = (certificate, key)
        self.loaded = True
        if self._on_change is not None:
            self._on_change(expiry)
        return True


class CertificateDirectory:
    """A directory with ``tls.crt`` and ``tls.key``, such as a mounted Secret, which the kubelet
    updates by a symlink.
    """

    def __init__(self, directory: Path, serving: ServingCertificate) -> None:
        self._directory = directory
        self._serving = serving
        self._last_error = ""

    async def watch(self, poll_seconds: float = POLL_SECONDS) -> None:
        """Polls the directory until cancelled."""
        while True:
            self.poll()
            await asyncio.sleep(poll_seconds)

    def poll(self) -> None:
        """Loads the pair if it changed. Logs a failure once."""
        try:
            # An update between the two reads yields a mismatched pair. The next poll reads a
            # matching one.
            pair = (self._read(certificates.CERTIFICATE), self._read(certificates.KEY))
            if self._serving.load(*pair):
                logger.info("loaded serving certificate from %s", self._directory)
            self._last_error = ""
        except (OSError, UnusableCertificateError) as error:
            if str(error) != self._last_error:
                logger.warning(
                    "cannot use the serving certificate in %s: %s", self._directory, error
                )
            self._last_error = str(error)

    def _read(self, name: str) -> bytes:
        with (self._directory / name).open("rb") as file:
            return file.read(MAX_FILE_BYTES)


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _load_chain(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Loads a pair from memory. Python's ssl module reads files only, and the key must not be
    written to a disk.
    """
    descriptor = os.memfd_create("kvtier-serving")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(certificate + b"\n" + key)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    except (ssl.SSLError, ValueError) as error:
        raise UnusableCertificateError(
            f"certificate and key cannot be used together: {error}"
        ) from None
    finally:
        os.close(descriptor)
