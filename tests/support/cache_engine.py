"""A rank's LMCache engine on CPU tensors, for tests of the CacheEngine path."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from kvtier.engines.atom.layout import byte_layout, rows_of
from kvtier.engines.common.jobs import BlockRun
from kvtier.engines.lmcache.block_copier import BlockCopier
from kvtier.engines.lmcache.transfers import LoadTransfer, StoreTransfer
from kvtier.transfer.factory import make_engine
from kvtier.transfer.startup_check import pageable_scratch

if TYPE_CHECKING:
    from kvtier.engines.lmcache.cache import RankCache

BLOCKS, TOKENS, CHUNK = 12, 4, 8
NAMESPACE = "ab" * 16
SECONDS = 300.0


@dataclass
class CacheTensor:
    """As ATOM's: keys, values, and scales where the cache is quantized."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    index_cache: torch.Tensor | None = None


def kv_tensors(dtype: torch.dtype = torch.bfloat16, seed: int = 3) -> dict[int, CacheTensor]:
    """Two layers of the forms that ATOM's kernels use, with random content."""
    torch.manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(0, 255, shape, dtype=torch.uint8).view(dtype)

    size = torch.empty((), dtype=dtype).element_size()
    return {
        layer: CacheTensor(
            random(BLOCKS, 2, 3, TOKENS, 8 * size),
            random(BLOCKS, 2, 24, TOKENS * size),
            torch.randn(BLOCKS, 2, TOKENS),
        )
        for layer in range(2)
    }


@dataclass
class Rank:
    """One rank: its KV tensors and its LMCache engine."""

    tensors: dict[int, CacheTensor]
    copier: BlockCopier
    cache: RankCache

    def block(self, number: int) -> list[bytes]:
        """The bytes of a block, tensor by tensor."""
        found = []
        for each in self.tensors.values():
            for tensor in (each.k_cache, each.v_cache, each.k_scale):
                if tensor is not None:
                    found.append(bytes(rows_of("", tensor, BLOCKS)[number].numpy()))
        return found

    def wipe(self) -> None:
        """The KV cache is empty again."""
        for each in self.tensors.values():
            for tensor in (each.k_cache, each.v_cache, each.k_scale):
                if tensor is not None:
                    tensor.view(-1).view(torch.uint8).zero_()

    def store(self, key: bytes, store: int, *blocks: int) -> str:
        return self.cache.store(StoreTransfer(key, store, BlockRun(0, 0, blocks)))

    def load(self, *parts: tuple[bytes, int, tuple[int, ...]]) -> LoadTransfer:
        """``parts``: key, store and target blocks of each chunk."""
        keys, stores, blocks = zip(*parts, strict=True)
        transfer = LoadTransfer(keys, stores, tuple(BlockRun(0, 0, each) for each in blocks))
        self.cache.load(transfer)
        return transfer


def config_file(directory: Path, options: Mapping[str, Any]) -> Path:
    """LMCache's configuration: 32 MiB of memory, and ``options``."""
    path = directory / "lmcache.yaml"
    found = {"chunk_size": CHUNK, "local_cpu": True, "max_local_cpu_size": 0.03125, **options}
    path.write_text(yaml.safe_dump(found))
    return path


def copier_for(tensors: Mapping[object, object]) -> BlockCopier:
    """A copier between these tensors and host memory."""
    layout = byte_layout(tensors, BLOCKS, TOKENS, CHUNK)
    engine = make_engine(layout.tensors, layout.codec)
    return BlockCopier(engine, pageable_scratch)


def open_rank(
    config: Path, ranks: int = 1, rank: int = 0, tensors: dict[int, CacheTensor] | None = None
) -> Rank:
    """Opens the engine of one rank. Imports LMCache."""
    from kvtier.engines.lmcache.cache import open_cache

    tensors = tensors or kv_tensors(seed=3 + rank)
    copier = copier_for(tensors)
    return Rank(tensors, copier, open_cache(config, NAMESPACE, ranks, rank, copier, CHUNK))


@contextmanager
def lmcache_in_process() -> Iterator[None]:
    """Undoes what LMCache's engine changes in a process."""
    method = multiprocessing.get_start_method(allow_none=True)
    collecting = gc.isenabled()
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)
        if collecting:
            gc.enable()


def wait(condition: Callable[[], object]) -> None:
    """Waits for what a thread does. Raises ``TimeoutError``."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.002)
