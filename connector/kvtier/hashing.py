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


def derived_key(material: bytes, context: str) -> bytes:
    """A key of 32 bytes for one purpose, from secret material. ``context``: a constant that names
    the purpose (BLAKE3's key derivation)."""
    from blake3 import blake3

    return blake3(material, derive_key_context=context).digest(32)


def keyed_digest(key: bytes, *parts: bytes | bytearray | memoryview) -> bytes:
    """BLAKE3 of 32 bytes over all parts, keyed with ``key`` (32 bytes).

    Single-threaded. BLAKE3's threads would be as many as the host has cores, whose stacks count
    against the memory limit of tierd, and tierd already hashes on several threads. The interpreter
    lock is released for large parts.
    """
    from blake3 import blake3

    digest = blake3(key=key)
    for part in parts:
        digest.update(part)
    return digest.digest(32)


def sha256_hex(text: str, digits: int) -> str:
    """The first ``digits`` hex digits of the SHA-256 digest of ``text``, for names and annotations
    in Kubernetes."""
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
