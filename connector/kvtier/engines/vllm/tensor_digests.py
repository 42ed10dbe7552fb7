"""Digests of tensors: dtype, shape, strides and every byte.

Tensors in host memory are hashed with BLAKE3. For those on a device ``word_sums`` computes sums on
the device, all in one launch, and BLAKE3 hashes the sums.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from blake3 import blake3

from kvtier.engines.vllm.word_sums import (
    CHUNK_BYTES,
    ChunkTable,
    WordSums,
    dense_bytes,
    is_dense,
)

DIGEST_DIGITS = 32
DEVICE_SECONDS = 60.0
"""A device reads its whole memory in a fraction of a second, behind what was launched before."""
_POLL_SECONDS = 0.0005
_sums: dict[torch.device, WordSums] = {}
_streams: dict[torch.device, Any] = {}


@dataclass(slots=True)
class _Part:
    """One plain, dense tensor of a parameter. ``first``: its first chunk among those of its
    device."""

    name: str
    header: bytes
    data: torch.Tensor | None
    device: torch.device
    nbytes: int
    first: int

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor; only between ``start`` and ``finish``."""
        if self.data is None:
            raise RuntimeError(f"{self.name}: no digest was started")
        return self.data


class TensorDigests:
    """Digests by name, computed together. One thread.

    ``add`` tensors, ``start``, and ``finish``. Between ``start`` and ``finish`` the device may
    still read the tensors, on a stream of its own. After ``finish`` they are referenced weakly: a
    model's old weights must be freed when it gets others. While they lie where they did,
    ``start_again`` computes their digests again, at the cost of one launch.
    """

    def __init__(self, hash_on_host: bool = True) -> None:
        """``hash_on_host``: False treats host memory as a device's, for tests."""
        self._hash_on_host = hash_on_host
        self.hashed_bytes = 0
        self._parts: list[_Part] = []
        self._chunks: dict[torch.device, int] = {}
        self._results: dict[torch.device, torch.Tensor] = {}
        """The sums in host memory, pinned for a CUDA device. Allocated once: pinning memory takes
        milliseconds while copies run."""
        self._events: list[Any] = []
        self._sums: dict[torch.device, torch.Tensor] = {}
        self._launches: dict[torch.device, ChunkTable] = {}
        self._refs: list[weakref.ref[torch.Tensor]] = []
        self._places: list[tuple[int, int]] = []
        """Address and bytes of each tensor."""
        self._forms: list[tuple[torch.Size, tuple[int, ...]]] = []
        """Shape and strides of each tensor."""
        self._referenced: list[torch.Tensor] = []
        self._copied = False
        """Whether a tensor has gaps: its copy does not change with it."""
        self._last: tuple[dict[torch.device, bytes], dict[str, str]] | None = None
        """The sums of all devices and the digests that followed from them."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor. One without elements or without data has no digest."""
        if tensor.device.type == "meta" or not tensor.numel():
            return
        self._refs.append(weakref.ref(tensor))
        self._places.append((tensor.data_ptr(), tensor.nbytes))
        self._forms.append((tensor.shape, tensor.stride()))
        for leaf_name, leaf in _leaves("", tensor):
            header = f"{leaf_name}\0{leaf.dtype}\0{tuple(leaf.shape)}\0{leaf.stride()}\0"
            # Without gaps: a copy then.
            dense = is_dense(leaf)
            self._copied |= not dense or leaf is not tensor
            data = leaf if dense else leaf.detach().contiguous()
            device, nbytes = data.device, data.nbytes
            first = self._chunks.get(device, 0)
            self._parts.append(_Part(name, header.encode(), data, device, nbytes, first))
            self._chunks[device] = first + -(-nbytes // CHUNK_BYTES)
            self.hashed_bytes += nbytes

    def start_again(self) -> bool:
        """As ``start``, if every tensor still lies where it did when it was added; returns whether
        it does.

        Requests wait for the device, so shapes are compared only after the launch. The memory that
        it reads is that of tensors that exist.
        """
        if self._copied:
            return False
        tensors = [tensor for ref in self._refs if (tensor := ref()) is not None]
        if [(each.data_ptr(), each.nbytes) for each in tensors] != self._places:
            return False
        self._launch(tensors)
        if [(each.shape, each.stride()) for each in tensors] == self._forms:
            return True
        self.finish()
        return False

    def start(self) -> None:
        """Launches what a device computes, behind what this thread has launched before."""
        # One that is gone is an error of the caller.
        self._launch([tensor for ref in self._refs if (tensor := ref()) is not None])

    def _launch(self, tensors: list[torch.Tensor]) -> None:
        self._events = []
        if not self._copied:
            # Held until ``finish``.
            self._referenced = tensors
            for part, tensor in zip(self._parts, tensors, strict=True):
                part.data = tensor
        for device in self._chunks:
            if device.type == "cpu" and self._hash_on_host:
                continue
            parts = self._on(device)
            if device.type == "cuda":
                self._start_on_cuda(device, parts)
            else:
                self._results[device] = _sums_of(device)(self._table(device, parts)).cpu()

    def _start_on_cuda(self, device: torch.device, parts: list[torch.Tensor]) -> None:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        stream = _streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            sums = _sums_of(device)(self._table(device, parts), self._sums.get(device))
            host = self._results.get(device)
            if host is None:
                host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            host.copy_(sums, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        self._events.append(event)
        self._sums[device], self._results[device] = sums, host

    def _on(self, device: torch.device) -> list[torch.Tensor]:
        if len(self._chunks) == 1 and not self._copied:
            return self._referenced
        return [part.tensor for part in self._parts if part.device == device]

    def _table(self, device: torch.device, parts: list[torch.Tensor]) -> ChunkTable:
        table = self._launches.get(device)
        if table is None:
            table = self._launches[device] = _sums_of(device).table(parts)
        return replace(table, tensors=tuple(parts))

    @property
    def done(self) -> bool:
        """Whether ``finish`` does not wait for a device. Raises ``RuntimeError`` if one failed."""
        return all(event.query() for event in self._events)

    def finish(self) -> dict[str, str]:
        """Returns the digests by name. Raises ``RuntimeError`` if a device failed, or does not
        answer within ``DEVICE_SECONDS``."""
        deadline = time.monotonic() + DEVICE_SECONDS
        for event in self._events:
            while not event.query():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the device did not answer within {DEVICE_SECONDS:g} s")
                time.sleep(_POLL_SECONDS)
        found = {device: each.numpy().tobytes() for device, each in self._results.items()}
        all_on_devices = all(part.device in self._results for part in self._parts)
        if not (all_on_devices and self._last is not None and self._last[0] == found):
            self._last = (found, self._digests())
        for part in self._parts:
            part.data = None
        self._referenced = []
        for device, table in self._launches.items():
            self._launches[device] = replace(table, tensors=())
        return self._last[1]

    def _digests(self) -> dict[str, str]:
        digests: dict[str, blake3] = {}
        sums = {device: each.numpy() for device, each in self._results.items()}
        for part in self._parts:
            digest = digests.setdefault(part.name, blake3())
            digest.update(part.header)
            sum_rows = sums.get(part.device)
            if sum_rows is None:
                digest.update(dense_bytes(part.tensor.detach()).numpy())
            else:
                chunks = -(-part.nbytes // CHUNK_BYTES)
                digest.update(sum_rows[part.first : part.first + chunks].tobytes())
        return {name: digest.hexdigest()[:DIGEST_DIGITS] for name, digest in digests.items()}


def _sums_of(device: torch.device) -> WordSums:
    if device not in _sums:
        _sums[device] = WordSums(device)
    return _sums[device]


_plain_types: set[type] = set()
"""Classes of tensors that are nothing but a tensor."""


def _leaves(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the plain tensors in a tensor subclass or in a shared weight."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    kind = type(tensor)
    if kind in _plain_types:
        yield name, tensor
        return
    partitions = getattr(tensor, "partitions", None)
    if isinstance(partitions, dict) and partitions:
        for key, each in partitions.items():
            yield from _leaves(f"{name}.{key}", each)
    elif is_traceable_wrapper_subclass(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from _leaves(f"{name}.{attribute}", getattr(tensor, attribute))
    else:
        if kind in (torch.Tensor, torch.nn.Parameter):
            _plain_types.add(kind)
        yield name, tensor
