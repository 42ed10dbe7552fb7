"""Digests of content and of canonical text.

BLAKE3 for data and for names that only KVTier reads. SHA-256 for names in Kubernetes: the
operator's image has no BLAKE3. Digests appear in file names, in records and in annotations, so
neither function may ever change its result.
"""

from __future__ import annotations

import hashlib


def blake3_digest(content: bytes | bytearray | memoryview, size_bytes: int = 32) -> bytes:
    """BLAKE3 digest of ``content``."""
    # Imported here so that the operator can import this module.
    from blake3 import blake3

    return blake3(content).digest(size_bytes)


def blake3_hex(content: bytes | bytearray | memoryview, digits: int) -> str:
    """The first ``digits`` hex digits of the BLAKE3 digest of ``content``."""
    return blake3_digest(content, (digits + 1) // 2).hex()[:digits]


def sha256_hex(text: str, digits: int) -> str:
    """The first ``digits`` hex digits of the SHA-256 digest of ``text``, for names and annotations
    in Kubernetes."""
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
