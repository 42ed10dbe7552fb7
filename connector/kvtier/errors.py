"""The one tree of errors.

Three kinds, told apart by who may catch them:

* ``ConfigurationError``: a person must act. The message names the field, the value found and what is accepted.
* ``TierError`` and below: storage misbehaved. Raised by tiers, caught by the store, counted, never raised into the engine.
* ``ProtocolError``: a bug or a foreign version at the other end of a socket. Logged with its context; the load or store
  at hand is dropped.
"""

from __future__ import annotations


class KVTierError(Exception):
    """Base of every error that KVTier raises on purpose."""


class ConfigurationError(KVTierError):
    """A document or an option that a person must correct.

    ``field`` is the dotted path in the document, ``value`` what stood there, ``accepted`` what would be taken.
    """

    def __init__(self, field: str, value: object, accepted: str) -> None:
        self.field = field
        self.value = value
        self.accepted = accepted
        super().__init__(f"{field}: {value!r} is not accepted; {accepted}")


class TierError(KVTierError):
    """A tier could not do what it was asked; the object counts as absent."""

    reason = "error"


class TierMissError(TierError):
    """The object is not (or no longer) there."""

    reason = "vanished"


class TierUnverifiableError(TierMissError):
    """The object may be right, but was written with a checksum that this process cannot compute."""

    reason = "unverifiable"


class TierCorruptError(TierError):
    """What the tier returned is provably not the object that was asked for."""

    reason = "corrupt"


class TierUnavailableError(TierError):
    """The storage below refuses or fails: EIO, EACCES, a directory that has vanished or gone stale."""

    reason = "unavailable"


class TierNoSpaceError(TierError):
    """The tier, or the storage below it, takes no more: capacity, ENOSPC, EDQUOT, EROFS. What it holds can be read."""

    reason = "no_space"


class ProtocolError(KVTierError):
    """A message that the protocol does not allow at this point, or that cannot be decoded."""
