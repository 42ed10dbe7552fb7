"""The namespace: a digest of everything that determines the bytes of KV, and its source text.

An object may be used only by an engine that would have computed the same bytes. The scheduler side
describes the engine (``canonical_json``), each worker its byte layout and its weights; tierd
combines them. The text is stored beside the data of a namespace, so that people can see why two
engines do not share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from kvtier.errors import ProtocolError
from kvtier.hashing import blake3_hex

NAMESPACE_DIGITS = 32


def canonical_json(value: Mapping[str, object]) -> str:
    """JSON with exactly one spelling: sorted keys, no spaces, only values of the JSON standard.

    Raises ``ProtocolError`` for a value that JSON cannot represent. Its ``repr`` could differ
    between starts.
    """
    try:
        return json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"the identity cannot be represented in JSON: {error}") from error


def derive_namespace(
    identity_json: str,
    codecs: Sequence[str],
    weights: Sequence[str] = (),
    shards: Sequence[Sequence[Sequence[int]]] = (),
) -> tuple[str, str]:
    """Namespace (32 hex digits) and its text (indented JSON), from the scheduler's identity and, in
    rank order, the workers' codec texts, fingerprints of ``weights`` and ``shards`` ([offset in the
    slot, size] by group). The namespace is the digest of exactly that text.

    Raises ``ProtocolError`` for an identity that is not a JSON object.
    """
    try:
        identity = json.loads(identity_json)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the identity is not JSON: {error}") from error
    if not isinstance(identity, dict):
        raise ProtocolError(f"the identity is a JSON {type(identity).__name__}, not an object")
    document = {"engine": identity, "layout": _grouped([_readable(text) for text in codecs])}
    if any(weights):
        # Once per rank, because each has another part of the weights.
        document["weights"] = list(weights)
    if shards:
        document["shards"] = [[list(each) for each in of_rank] for of_rank in shards]
    # The round trip removes differences in spelling, which must not change the digest.
    normal = json.loads(canonical_json(document))
    text = json.dumps(normal, sort_keys=True, indent=1, ensure_ascii=True) + "\n"
    return namespace_digest(text), text


def namespace_digest(text: str) -> str:
    """The namespace of a canonical text."""
    return blake3_hex(text.encode(), NAMESPACE_DIGITS)


def _readable(text: str) -> object:
    """The value of a codec text that is JSON; any other text unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _grouped(layouts: list[object]) -> list[dict[str, object]]:
    """Merges adjacent ranks with the same layout, so that a rank with a different one stands
    out."""
    grouped: list[dict[str, object]] = []
    for rank, layout in enumerate(layouts):
        if grouped and grouped[-1]["codec"] == layout:
            grouped[-1]["ranks"] = f"{str(grouped[-1]['ranks']).split('-')[0]}-{rank}"
        else:
            grouped.append({"ranks": str(rank), "codec": layout})
    return grouped
