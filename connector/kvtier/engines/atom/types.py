"""ATOM's types of completions. Without ATOM, equal types of our own, for tests.

ATOM's aggregator over ranks tells generations apart by the class of an operation id, and its model
runner accepts only its own class of outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

RequestId = str | int

if TYPE_CHECKING:
    _USE_OWN = True
else:
    try:
        from atom.kv_transfer.disaggregation.types import (
            KVConnectorOutput,
            LoadOperationId,
            SaveOperationId,
        )

        _USE_OWN = False
    except ImportError:
        _USE_OWN = True

if _USE_OWN:

    @dataclass(frozen=True)
    class LoadOperationId:
        """One load. ``generation`` is unique for the life of the scheduler."""

        req_id: RequestId
        generation: int

    @dataclass(frozen=True)
    class SaveOperationId:
        """One save. ``generation`` is unique for the life of the scheduler."""

        req_id: RequestId
        generation: int

    @dataclass
    class KVConnectorOutput:
        """What ended on one rank, or on all after aggregation. An operation is in one set."""

        finished_sending: set[Any] = field(default_factory=set)
        finished_recving: set[Any] = field(default_factory=set)
        failed_recving: set[Any] = field(default_factory=set)
        finished_saving: set[Any] = field(default_factory=set)
        finished_loading: set[Any] = field(default_factory=set)
        failed_loading: set[Any] = field(default_factory=set)
        expected_finished_count: int = 0
        connector_completions: set[Any] = field(default_factory=set)


__all__ = ["KVConnectorOutput", "LoadOperationId", "RequestId", "SaveOperationId"]
