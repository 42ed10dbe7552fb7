"""The namespace: a digest over everything that shapes the bytes of KV, and the text that a person can compare.

An object may be used only by an engine that would have computed the same bytes (DATAPATH 8). The scheduler side describes the
engine (``canonical`` of a mapping), each worker its byte layout; tierd, which sees both, joins them. The text is stored beside the
data of a namespace, so that the difference between two engines that do not share can be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from kvtier.errors import ProtocolError
from kvtier.hashing import blake3_hex

NAMESPACE_DIGITS = 32


def canonical_json(value: Mapping[str, object]) -> str:
    """JSON of which there is exactly one spelling: sorted keys, no spaces, no value that only Python knows.

    Raises ``ProtocolError`` for what JSON cannot hold, instead of writing its ``repr``, which may differ from start to start.
    """
    try:
        return json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"the identity holds what JSON cannot: {error}") from error


def derive_namespace(identity_json: str, codecs: Sequence[str]) -> tuple[str, str]:
    """Namespace (32 hex digits) and its readable text (indented JSON), from the scheduler's identity and the workers' codec texts
    in rank order. The digest covers exactly the text.

    Raises ``ProtocolError`` for an identity that is not a JSON object.
    """
    try:
        identity = json.loads(identity_json)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the identity is not JSON: {error}") from error
    if not isinstance(identity, dict):
        raise ProtocolError(f"the identity is a JSON {type(identity).__name__}, not an object")
    document = {"engine": identity, "layout": _grouped([_readable(text) for text in codecs])}
    # A round trip first: what differs only in spelling must not differ in the digest.
    normal = json.loads(canonical_json(document))
    text = json.dumps(normal, sort_keys=True, indent=1, ensure_ascii=True) + "\n"
    return namespace_digest(text), text


def namespace_digest(text: str) -> str:
    """The namespace of a canonical text."""
    return blake3_hex(text.encode(), NAMESPACE_DIGITS)


def _readable(text: str) -> object:
    """A codec text that is JSON is shown as what it says, anything else as it stands."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _grouped(layouts: list[object]) -> list[dict[str, object]]:
    """Ranks with one layout are written once: eight equal pages would hide the one that differs."""
    grouped: list[dict[str, object]] = []
    for rank, layout in enumerate(layouts):
        if grouped and grouped[-1]["codec"] == layout:
            grouped[-1]["ranks"] = f"{str(grouped[-1]['ranks']).split('-')[0]}-{rank}"
        else:
            grouped.append({"ranks": str(rank), "codec": layout})
    return grouped
