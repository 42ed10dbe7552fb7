"""What tests with a real engine vary in a topology, and the documents that come of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtier.topology.models import (
    Breaker,
    Daemon,
    FileSystemTierDocument,
    HttpEndpoint,
    Live,
    LiveTier,
    MemoryTierDocument,
    PolicyIdentity,
    Selection,
    StorePolicy,
    Structural,
    TierDocument,
)

BLOCK_TOKENS = 32
CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Tuning:
    """What tests vary in a topology. Sizes in bytes."""

    chunk_tokens: int = CHUNK_TOKENS
    memory_bytes: int = 64 << 20
    file_bytes: int | None = 1 << 30
    daemon: Daemon = Daemon.ENGINE
    persistence: str = "Pod"
    load_timeout_seconds: int = 5
    min_load_tokens: int = CHUNK_TOKENS
    store_policy: StorePolicy = StorePolicy.ALL
    failure_threshold: int = 50
    selection: Selection = Selection.WEIGHTED
    hash_seed: str = "0"

    def structural(self, name: str, run_directory: Path, files_root: Path) -> Structural:
        """A policy called ``name``, with the file tier in ``files_root`` if there is one."""
        tiers: list[TierDocument] = [
            MemoryTierDocument(
                name="ram",
                capacity_bytes=self.memory_bytes,
                persistence="Pod" if self.persistence == "Pod" else "Process",
            )
        ]
        if self.file_bytes is not None:
            tiers.append(
                FileSystemTierDocument(
                    name="disk", path=str(files_root), sharing="Node", read_threads=4, write_threads=2
                )
            )
        return Structural(
            policy=PolicyIdentity(namespace="test", name=name),
            content_hash="test",
            daemon=self.daemon,
            run_directory=str(run_directory),
            chunk_tokens=self.chunk_tokens,
            hash_seed=self.hash_seed,
            local_ranks=1,
            tiers=tiers,
            http=HttpEndpoint(port=0),
            live=self.live(),
        )

    def live(self, generation: int = 1) -> Live:
        """The live document."""
        tiers = {"ram": LiveTier()}
        if self.file_bytes is not None:
            tiers["disk"] = LiveTier(
                capacity_bytes=self.file_bytes,
                load_timeout_seconds=self.load_timeout_seconds,
                store_policy=self.store_policy,
            )
        return Live(
            generation=generation,
            selection=self.selection,
            min_load_tokens=self.min_load_tokens,
            breaker=Breaker(failure_threshold=self.failure_threshold, period_seconds=1),
            tiers=tiers,
        )


DEFAULT = Tuning()
