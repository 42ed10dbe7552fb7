"""The hierarchy of errors. Three kinds differ in who may catch them:

* ``ConfigurationError``: the user must act. The message has the form of Kubernetes' field errors.
* ``TierError`` and below: storage failed. Raised by tiers, caught and counted by the store, never
  raised into the engine.
* ``ProtocolError``: a bug or another version at the other end of a socket. Logged with its context;
  the current load or store is dropped.
"""

from __future__ import annotations


class KVTierError(Exception):
    """Base of every error that KVTier raises on purpose."""


class ConfigurationError(KVTierError):
    """A document or an option that the user must correct.

    ``field``: path in the document, or the option. ``value``: its value. ``requirement``: what the
    value must be, such as "must be a JSON object".
    """

    def __init__(self, field: str, value: object, requirement: str) -> None:
        self.field = field
        self.value = value
        self.requirement = requirement
        super().__init__(f"{field}: Invalid value: {value!r}: {requirement}")


class TierError(KVTierError):
    """An operation of a tier failed; the object counts as absent."""

    reason = "error"


class TierMissError(TierError):
    """The object does not exist."""

    reason = "vanished"


class TierUnverifiableError(TierMissError):
    """The object has a kind of checksum that this process cannot compute."""

    reason = "unverifiable"


class TierForeignError(TierMissError):
    """The object has another format version. Another release can read it, so it is not removed."""

    reason = "other_version"


class TierUntrustedError(TierMissError):
    """The object is not proven to come from a holder of the tier's keys. It is not removed: another
    process may have the key.

    ``reason``: "unkeyed" (it carries no tag), "no_key" (it is encrypted and this tier has no keys),
    "unknown_key" (the tier's Secret lacks the key that it names) or "wrong_tag".
    """

    REASONS = ("no_key", "unkeyed", "unknown_key", "wrong_tag")

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class TierCorruptError(TierError):
    """The data is provably not the requested object."""

    reason = "corrupt"


class TierUnavailableError(TierError):
    """The storage fails: EIO, EACCES, a removed directory or a stale handle."""

    reason = "unavailable"


class TierKeyMissingError(TierUnavailableError):
    """The tier requires keys, and its Secret is absent or has never been valid."""

    reason = "key_missing"


class TierNoSpaceError(TierError):
    """The tier or its storage is full or read-only: capacity, ENOSPC, EDQUOT, EROFS. Its objects
    can be read."""

    reason = "no_space"


class TierMinFreeError(TierNoSpaceError):
    """The file system has no more free space than the tier must leave to others (minFree)."""

    reason = "min_free"


class TierQuotaError(TierNoSpaceError):
    """The tenant of the object has no room left in its share of the tier."""

    reason = "tenant_quota"


class TierExpiredError(TierMissError):
    """The object has expired, and is removed."""

    reason = "expired"


class ProtocolError(KVTierError):
    """A message that cannot be decoded, or is not allowed at this point."""
