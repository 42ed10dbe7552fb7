"""The GPU benchmark of the CacheEngine path on a CPU: what it compares, and what it needs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest
import torch
from benchmarks.gpu import cache_engine
from tests.support.cache_engine import lmcache_in_process
from tests.support.lmcache_backends import require_lmcache

from kvtier.engines.common.jobs import BlockRun
from kvtier.engines.lmcache.block_copier import BlockCopier
from kvtier.errors import KVTierError


@pytest.fixture
def chosen() -> Iterator[argparse.Namespace]:
    require_lmcache()
    with lmcache_in_process():
        yield argparse.Namespace(device="cpu", layers=1, chunks=2, quick=True)


def test_it_compares_every_byte_and_measures(chosen: argparse.Namespace) -> None:
    rows, ratio = cache_engine.measure(chosen)
    assert [row[0] for row in rows] == ["raw link", "store", "retrieve"]
    assert ratio > 0


def test_one_byte_that_differs_ends_it(
    chosen: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = BlockCopier.load

    def damaging(self: BlockCopier, run: BlockRun, source: memoryview, after: object) -> None:
        content = bytearray(source)
        content[-1] ^= 1
        load(self, run, memoryview(content), after)

    monkeypatch.setattr(BlockCopier, "load", damaging)
    with pytest.raises(SystemExit, match="bytes that were loaded differ"):
        cache_engine.measure(chosen)


def test_without_a_gpu_or_lmcache_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        cache_engine.require("cuda")

    def absent() -> None:
        raise KVTierError("the package lmcache is not installed")

    monkeypatch.setattr(cache_engine, "require_lmcache", absent)
    with pytest.raises(SystemExit, match=r"lmcache is not installed; install lmcache 0\.5\.6"):
        cache_engine.require("cpu")
