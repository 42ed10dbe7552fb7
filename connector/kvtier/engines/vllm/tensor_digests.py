"""Digests of tensors: dtype, shape, strides and every byte.

Tensors in host memory are hashed with BLAKE3. For those on a device ``word_sums`` computes sums on
the device, all in one launch, and BLAKE3 hashes the sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3

from kvtier.engines.vllm.word_sums import CHUNK_BYTES, WordSums, dense_bytes, is_dense

DIGEST_DIGITS = 32
_sums: dict[torch.device, WordSums] = {}
_streams: dict[torch.device, Any] = {}


@dataclass(slots=True)
class _Part:
    """One plain, dense tensor of a parameter. ``first``: its first chunk among those of its
    device."""

    name: str
    header: bytes
    data: torch.Tensor
    nbytes: int
    first: int


class TensorDigests:
    """Digests by name, computed together. One thread.

    ``add`` tensors, ``start``, and ``finish``. Between ``start`` and ``finish`` the device may
    still read the tensors, on a stream of its own.
    """

    def __init__(self, hash_on_host: bool = True) -> None:
        """``hash_on_host``: False treats host memory as a device's, for tests."""
        self._hash_on_host = hash_on_host
        self.hashed_bytes = 0
        self._parts: list[_Part] = []
        self._chunks: dict[torch.device, int] = {}
        self._results: dict[torch.device, torch.Tensor] = {}
        self._events: list[Any] = []
        self._scratch: list[torch.Tensor] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor. One without elements or without data has no digest."""
        if tensor.device.type == "meta" or not tensor.numel():
            return
        for leaf_name, leaf in _leaves("", tensor):
            header = f"{leaf_name}\0{leaf.dtype}\0{tuple(leaf.shape)}\0{leaf.stride()}\0"
            # Without gaps: a copy then.
            data = leaf if is_dense(leaf) else leaf.detach().contiguous()
            device, nbytes = data.device, data.nbytes
            first = self._chunks.get(device, 0)
            self._parts.append(_Part(name, header.encode(), data, nbytes, first))
            self._chunks[device] = first + -(-nbytes // CHUNK_BYTES)
            self.hashed_bytes += nbytes

    def start(self) -> None:
        """Launches what a device computes, behind what this thread has launched before."""
        for device in self._chunks:
            if device.type == "cpu" and self._hash_on_host:
                continue
            parts = [part.data for part in self._parts if part.data.device == device]
            if device.type == "cuda":
                self._start_on_cuda(device, parts)
            else:
                self._results[device] = _sums_of(device)(parts).cpu()

    def _start_on_cuda(self, device: torch.device, parts: list[torch.Tensor]) -> None:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        stream = _streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            sums = _sums_of(device)(parts)
            host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            host.copy_(sums, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        self._events.append(event)
        self._scratch.append(sums)
        self._results[device] = host

    @property
    def done(self) -> bool:
        """Whether ``finish`` does not wait for a device. Raises ``RuntimeError`` if one failed."""
        return all(event.query() for event in self._events)

    def finish(self) -> dict[str, str]:
        """Returns the digests by name. Raises ``RuntimeError`` if a device failed."""
        for event in self._events:
            event.synchronize()
        digests: dict[str, blake3] = {}
        sums = {device: each.numpy() for device, each in self._results.items()}
        for part in self._parts:
            digest = digests.setdefault(part.name, blake3())
            digest.update(part.header)
            result = sums.get(part.data.device)
            if result is None:
                digest.update(dense_bytes(part.data.detach()).numpy())
            else:
                chunks = -(-part.nbytes // CHUNK_BYTES)
                digest.update(result[part.first : part.first + chunks].tobytes())
        self._parts, self._scratch = [], []
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
