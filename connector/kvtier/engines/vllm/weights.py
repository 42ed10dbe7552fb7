"""A fingerprint of every byte of weights that the engine's models have in one worker.

The fingerprint covers registered parameters and buffers as they lie on the device. Some layers
consume their weights after loading (the CPU engine packs linear weights into a library's handles,
some GPU back ends replace the weights of experts), so ``install`` wraps the step that does that and
hashes a layer's parameters just before. Of these digests only those of vanished parameters enter
the fingerprint, so a weight that was updated in place and the same weight loaded from a file agree.

A parameter that is neither there nor was hashed, or a tensor on the meta device (a weight update
has failed or is in progress), means that the weights are unknown: there is no fingerprint then, and
a reason instead.

Tensors that are plain attributes of a module are not covered. Those that are derived from
parameters follow them.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)
PIECE_WORDS = 1 << 20
"""Words of 4 bytes that are summed at once on a device: 32 MiB of scratch memory in all, which is
released before ``take`` returns."""
DIGEST_DIGITS = 32
_WRAPPED = "_kvtier_wrapped"
# The constants of splitmix64 as signed numbers.
_GOLDEN, _MIX1, _MIX2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


@dataclass(frozen=True, slots=True)
class WeightsFingerprint:
    """``text``: 32 hex digits; empty if the weights are unknown, for ``reason``."""

    text: str
    reason: str = ""
    seconds: float = 0.0
    hashed_bytes: int = 0


class _LoadedModels:
    """What was noted about the models of this process. The thread that loads and steps them."""

    def __init__(self) -> None:
        self.installed = False
        self.on_worker: Callable[[], None] | None = None
        self.workers: list[weakref.ref[Any]] = []
        self.created: weakref.WeakKeyDictionary[torch.nn.Module, frozenset[str]] = (
            weakref.WeakKeyDictionary()
        )
        """The names of the parameters that each module was created with."""
        self.consumed: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, str]] = (
            weakref.WeakKeyDictionary()
        )
        """Digests of the parameters of each module before they were processed."""
        self.capture_seconds = 0.0


_models = _LoadedModels()


def install(on_worker: Callable[[], None] | None = None) -> None:
    """Wraps vLLM's worker and model loading. Idempotent. Call it before models are loaded.

    ``on_worker`` is called when a worker is created, before it loads a model; it must not raise.
    Raises ``ImportError`` or ``AttributeError`` for a vLLM without these functions.
    """
    from vllm.model_executor.model_loader import utils
    from vllm.v1.worker.worker_base import WorkerBase

    _models.on_worker = on_worker or _models.on_worker
    _wrap(WorkerBase, "__init__", _note_worker, before=False)
    # vLLM calls it for each model, drafts included, before the model's weights are loaded.
    _wrap(utils, "record_metadata_for_reloading", _note_model, before=True)
    _models.installed = True


def _wrap(owner: Any, name: str, note: Callable[[Any], None], *, before: bool) -> None:
    original = getattr(owner, name)
    if getattr(original, _WRAPPED, False):
        return

    @functools.wraps(original)
    def wrapper(first: Any, *arguments: Any, **named: Any) -> Any:
        if before:
            note(first)
        result = original(first, *arguments, **named)
        if not before:
            note(first)
        return result

    setattr(wrapper, _WRAPPED, True)
    setattr(owner, name, wrapper)


def _note_worker(worker: Any) -> None:
    alive = [each for each in _models.workers if each() is not None]
    _models.workers = [*alive, weakref.ref(worker)]
    if _models.on_worker is not None:
        _models.on_worker()


def _note_model(model: torch.nn.Module) -> None:
    """Notes the parameters of a new model, and wraps what processes them after loading."""
    for module in model.modules():
        names = (name for name, each in _own_parameters(module) if each.numel())
        _models.created[module] = frozenset(names)
        method = getattr(module, "quant_method", None)
        if hasattr(type(method), "process_weights_after_loading"):
            _wrap_processing(type(method))


def _wrap_processing(method_class: type) -> None:
    original = method_class.process_weights_after_loading  # type: ignore[attr-defined]
    if getattr(original, _WRAPPED, False):
        return

    @functools.wraps(original)
    def process(self: Any, layer: Any, *arguments: Any, **named: Any) -> Any:
        _capture(layer)
        return original(self, layer, *arguments, **named)

    setattr(process, _WRAPPED, True)
    method_class.process_weights_after_loading = process  # type: ignore[attr-defined]


def _capture(layer: object) -> None:
    """Hashes a layer's parameters. Never raises: what is not hashed makes the weights unknown."""
    if not isinstance(layer, torch.nn.Module):
        return
    started = time.perf_counter()
    try:
        hasher = _Hasher()
        found = {name: hasher.parameter(each) for name, each in _own_parameters(layer)}
        digests = {name: digest for name, digest in found.items() if digest}
        _models.consumed.setdefault(layer, {}).update(digests)
    except Exception as error:
        _models.consumed.pop(layer, None)
        logger.exception("KVTier: cannot hash the weights of a layer: %s", error)
    _models.capture_seconds += time.perf_counter() - started


def take(vllm_config: VllmConfig) -> WeightsFingerprint:
    """Returns the fingerprint of the models of the worker that has ``vllm_config``.

    Reads every weight, on the caller's thread, which must be the worker's: no update may run at the
    same time. Never raises.
    """
    started = time.perf_counter()
    try:
        reason = _moving_weights(vllm_config)
        if reason:
            return WeightsFingerprint("", reason)
        if not _models.installed:
            return WeightsFingerprint(
                "", "the weights were loaded before KVTier could see them; set KVTIER_TOPOLOGY"
            )
        worker = _worker_of(vllm_config)
        if worker is None:
            return WeightsFingerprint("", "the worker that holds the weights was not found")
        hasher = _Hasher()
        digests, missing = _model_digests(worker, hasher)
    except Exception as error:
        logger.exception("KVTier: cannot take the fingerprint of the weights")
        return WeightsFingerprint("", f"cannot read the weights: {type(error).__name__}: {error}")
    seconds = time.perf_counter() - started
    if missing:
        names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        reason = f"{len(missing)} weights cannot be read: {names}"
        return WeightsFingerprint("", reason, seconds, hasher.hashed_bytes)
    return WeightsFingerprint(_combined(digests), "", seconds, hasher.hashed_bytes)


def watch_sleep(
    vllm_config: VllmConfig, on_sleep: Callable[[], None], on_wake_up: Callable[[], None]
) -> None:
    """Calls ``on_sleep`` before the worker that has ``vllm_config`` sleeps, which may release the
    memory of its KV cache, and ``on_wake_up`` after it has woken up, on the worker's thread."""
    worker = _worker_of(vllm_config)
    sleep, wake_up = getattr(worker, "sleep", None), getattr(worker, "wake_up", None)
    if worker is None or sleep is None or wake_up is None:
        return

    @functools.wraps(sleep)
    def sleep_without_copies(*arguments: Any, **named: Any) -> Any:
        on_sleep()
        return sleep(*arguments, **named)

    @functools.wraps(wake_up)
    def wake_up_with_copies(*arguments: Any, **named: Any) -> Any:
        result = wake_up(*arguments, **named)
        tags = arguments[0] if arguments else named.get("tags")
        if tags is None or "kv_cache" in tags:
            on_wake_up()
        return result

    worker.sleep, worker.wake_up = sleep_without_copies, wake_up_with_copies


def capture_seconds() -> float:
    """Returns how long hashing before processing has taken in this process."""
    return _models.capture_seconds


def _moving_weights(config: VllmConfig) -> str:
    """Returns why weights of this engine can change without a signal; empty if they cannot."""
    if getattr(config.parallel_config, "enable_eplb", False):
        return "expert load balancing moves weights between ranks while the engine runs"
    offload = getattr(config, "offload_config", None)
    prefetch = getattr(offload, "prefetch", None)
    if int(getattr(prefetch, "offload_group_size", 0) or 0):
        return "layers share GPU buffers, because prefetch offloading is on"
    if getattr(config.cache_config, "calculate_kv_scales", False):
        return "KV scales are computed at the first forward pass"
    return ""


def _worker_of(vllm_config: VllmConfig) -> Any | None:
    workers = [each() for each in _models.workers]
    found = [each for each in workers if each is not None and each.vllm_config is vllm_config]
    return found[-1] if found else None


def _draft_of(worker: Any) -> Any | None:
    """Returns the draft model of speculative decoding; None without one."""
    get_draft = getattr(worker, "get_draft_model", None)
    if get_draft is not None:
        return get_draft()
    runner = worker.model_runner
    for name in ("drafter", "speculator"):  # vLLM 0.24
        model = getattr(getattr(runner, name, None), "model", None)
        if isinstance(model, torch.nn.Module):
            return model
    return None


def _model_digests(worker: Any, hasher: _Hasher) -> tuple[dict[str, str], list[str]]:
    """Returns digests by name, and the names of weights that cannot be read."""
    digests: dict[str, str] = {}
    missing: list[str] = []
    seen: set[int] = set()
    for prefix, model in (("", worker.get_model()), ("draft.", _draft_of(worker))):
        if model is None:
            continue
        for path, module in model.named_modules():
            # With LoRA enabled a layer is wrapped, and its weights are named differently.
            where = f"{prefix}{path}.".replace(".base_layer.", ".")
            _add_module(module, where, hasher, seen, digests, missing)
    return digests, missing


def _add_module(
    module: torch.nn.Module,
    where: str,
    hasher: _Hasher,
    seen: set[int],
    digests: dict[str, str],
    missing: list[str],
) -> None:
    present: set[str] = set()
    registered = [*_own_parameters(module), *module.named_buffers(recurse=False)]
    for name, tensor in registered:
        if tensor.device.type == "meta":
            missing.append(f"{where}{name} (not loaded)")
        elif tensor.numel():
            present.add(name)
            if id(tensor) not in seen:
                seen.add(id(tensor))
                digests[where + name] = hasher.parameter(tensor)
    consumed = _models.consumed.get(module, {})
    for name in _models.created.get(module, frozenset(consumed)) - present:
        if name not in consumed:
            missing.append(where + name)
    for name, digest in consumed.items():
        if name not in present:
            digests[f"{where}{name} (consumed)"] = digest


def _own_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return module.named_parameters(recurse=False)


def _combined(digests: dict[str, str]) -> str:
    total = blake3()
    for name in sorted(digests):
        total.update(f"{name}\0{digests[name]}\0".encode())
    return str(total.hexdigest()[:DIGEST_DIGITS])


class _Hasher:
    """Digests of tensors: dtype, shape, strides and every byte.

    Tensors in host memory are hashed with BLAKE3. On other devices two multilinear sums modulo 2^64
    over 32-bit words are computed for each piece, with fixed odd coefficients, and BLAKE3 hashes
    the sums. One changed word always changes both sums; different pieces have equal sums with a
    probability of 2^-64. Integer sums do not depend on their order.
    """

    def __init__(self) -> None:
        self.hashed_bytes = 0
        self._sums: dict[torch.device, _WordSums] = {}

    def parameter(self, tensor: torch.Tensor) -> str:
        """Returns the digest; empty for a tensor without elements or without data."""
        if tensor.device.type == "meta" or not tensor.numel():
            return ""
        digest = blake3()
        for name, leaf in _leaves("", tensor.detach()):
            header = f"{name}\0{leaf.dtype}\0{tuple(leaf.shape)}\0{tuple(leaf.stride())}\0"
            digest.update(header.encode())
            data = _storage_bytes(leaf)
            self.hashed_bytes += data.numel()
            if data.device.type == "cpu":
                digest.update(data.numpy())
            else:
                sums = self._sums.setdefault(data.device, _WordSums(data.device))
                digest.update(sums(data).cpu().numpy().tobytes())
        return str(digest.hexdigest()[:DIGEST_DIGITS])


def _leaves(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the plain tensors in a tensor subclass or in a shared weight."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    partitions = getattr(tensor, "partitions", None)
    if isinstance(partitions, dict) and partitions:
        for key, each in partitions.items():
            yield from _leaves(f"{name}.{key}", each)
    elif is_traceable_wrapper_subclass(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from _leaves(f"{name}.{attribute}", getattr(tensor, attribute))
    else:
        yield name, tensor


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes in storage order as a vector: a view, or a copy of a tensor with gaps."""
    order = sorted(range(tensor.dim()), key=lambda each: (-tensor.stride(each), each))
    dense = tensor.permute(order) if tensor.dim() else tensor
    if not dense.is_contiguous():
        dense = tensor.contiguous()
    return dense.reshape(-1).view(torch.uint8)


class _WordSums:
    """Two multilinear sums for each piece of a vector of bytes, on one device."""

    def __init__(self, device: torch.device, piece_words: int = PIECE_WORDS) -> None:
        self._words = piece_words
        self._coefficients = [_coefficients(piece_words, seed, device) for seed in (1, 2)]
        self._wide = torch.empty(piece_words, dtype=torch.int64, device=device)
        self._product = torch.empty(piece_words, dtype=torch.int64, device=device)

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        """Returns int64 [pieces, 2]. ``data``: uint8 [n], contiguous. Does not synchronize."""
        step = self._words * 4
        pieces = -(-data.numel() // step)
        # One result tensor, written in place: a tensor per sum would fragment the allocator.
        sums = torch.zeros(pieces, 2, dtype=torch.int64, device=data.device)
        for number in range(pieces):
            piece = data[number * step : (number + 1) * step]
            if piece.numel() % 4 or piece.data_ptr() % 4:
                padded = torch.zeros(
                    -(-piece.numel() // 4) * 4, dtype=torch.uint8, device=data.device
                )
                padded[: piece.numel()] = piece
                piece = padded
            words = piece.view(torch.int32)
            count = words.numel()
            wide, product = self._wide[:count], self._product[:count]
            wide.copy_(words)
            for column, coefficients in enumerate(self._coefficients):
                torch.mul(wide, coefficients[:count], out=product)
                torch.sum(product, dim=0, out=sums[number, column])
        return sums


def _coefficients(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Returns pseudo-random odd numbers (splitmix64), int64 [count]."""
    value = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    value = (value + seed * (1 << 40)) * _GOLDEN
    value = (value ^ _logical_shift(value, 30)) * _MIX1
    value = (value ^ _logical_shift(value, 27)) * _MIX2
    return (value ^ _logical_shift(value, 31)) | 1


def _logical_shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)
