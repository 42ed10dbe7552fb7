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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3

from kvtier.engines.vllm.tensor_digests import DIGEST_DIGITS, TensorDigests

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)
_WRAPPED = "_kvtier_wrapped"
KV_CACHE_TAG = "kv_cache"
"""vLLM's name of the memory of the KV cache."""


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
        self.on_model: Callable[[], None] | None = None
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
        self.changes = 0
        """Rises with every model and every layer that is noted."""
        self.digests: weakref.WeakKeyDictionary[Any, _ModelDigests] = weakref.WeakKeyDictionary()
        """By worker, of the last fingerprint."""


_models = _LoadedModels()


def install(on_model: Callable[[], None] | None = None) -> None:
    """Wraps vLLM's worker and model loading. Idempotent. Call it before models are loaded.

    ``on_model`` is called when a worker has a device and is about to load weights, for each model.
    It must not raise.
    Raises ``ImportError`` or ``AttributeError`` for a vLLM without these functions.
    """
    from vllm.model_executor.model_loader import utils
    from vllm.v1.worker.worker_base import WorkerBase

    _models.on_model = on_model or _models.on_model
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


def _note_model(model: torch.nn.Module) -> None:
    """Notes the parameters of a new model, and wraps what processes them after loading."""
    _models.changes += 1
    if _models.on_model is not None:
        _models.on_model()
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
    _models.changes += 1
    try:
        digests = TensorDigests()
        for name, each in _own_parameters(layer):
            digests.add(name, each)
        digests.start()
        _models.consumed.setdefault(layer, {}).update(digests.finish())
    except Exception as error:
        _models.consumed.pop(layer, None)
        logger.exception("KVTier: cannot hash the weights of a layer: %s", error)
    _models.capture_seconds += time.perf_counter() - started


class PendingFingerprint:
    """A fingerprint that the device may still compute. The worker's thread only."""

    def __init__(self, known: WeightsFingerprint | None, models: _ModelDigests | None = None):
        self._known = known
        self._models = models
        self._started_at = time.perf_counter()

    @property
    def done(self) -> bool:
        """Whether ``result`` does not wait. Never raises."""
        if self._known is not None or self._models is None:
            return True
        try:
            return self._models.digests.done
        except Exception:  # noqa: BLE001 - result names the error
            return True

    def result(self) -> WeightsFingerprint:
        """Returns the fingerprint; waits until the device has computed it. Never raises."""
        if self._known is None:
            self._known = self._finish()
            self._models = None
        return self._known

    def _finish(self) -> WeightsFingerprint:
        models = self._models
        if models is None:
            return WeightsFingerprint("", "no fingerprint was taken")
        try:
            digests = {**models.digests.finish(), **models.consumed}
        except Exception as error:  # noqa: BLE001 - it is logged, and the weights are unknown
            return _unreadable(error)
        seconds = time.perf_counter() - self._started_at
        hashed = models.digests.hashed_bytes
        if models.missing:
            names = ", ".join(models.missing[:3]) + (", ..." if len(models.missing) > 3 else "")
            reason = f"{len(models.missing)} weights cannot be read: {names}"
            return WeightsFingerprint("", reason, seconds, hashed)
        return WeightsFingerprint(_combined(digests), "", seconds, hashed)


def take(vllm_config: VllmConfig) -> WeightsFingerprint:
    """Returns the fingerprint that ``begin`` describes. Waits for it; never raises."""
    return begin(vllm_config).result()


def begin(vllm_config: VllmConfig) -> PendingFingerprint:
    """Begins to read every weight of the worker that has ``vllm_config``.

    On the worker's thread: what it has launched before is seen, and no update may be launched
    before the result is there, or the result means nothing. Never raises.
    """
    try:
        reason = _moving_weights(vllm_config)
        if reason:
            return PendingFingerprint(WeightsFingerprint("", reason))
        if not _models.installed:
            reason = "the weights were loaded before KVTier could see them; set KVTIER_TOPOLOGY"
            return PendingFingerprint(WeightsFingerprint("", reason))
        worker = _worker_of(vllm_config)
        if worker is None:
            # With an explicit setting of the hybrid KV cache manager vLLM imports the connector
            # after it has created the worker.
            reason = (
                "KVTier was loaded after the worker that holds the weights; set KVTIER_TOPOLOGY"
            )
            return PendingFingerprint(WeightsFingerprint("", reason))
        models = _models.digests.get(worker)
        if models is None or not models.start_again(worker):
            models = _ModelDigests()
            models.add(worker)
            _models.digests[worker] = models
            models.digests.start()
    except Exception as error:  # noqa: BLE001 - it is logged, and the weights are unknown
        return PendingFingerprint(_unreadable(error))
    return PendingFingerprint(None, models)


def _unreadable(error: Exception) -> WeightsFingerprint:
    logger.error("KVTier: cannot take the fingerprint of the weights", exc_info=error)
    return WeightsFingerprint("", f"cannot read the weights: {type(error).__name__}: {error}")


def watch_sleep(
    vllm_config: VllmConfig, on_sleep: Callable[[], None], on_wake_up: Callable[[], None]
) -> None:
    """Calls ``on_sleep`` before the worker that has ``vllm_config`` sleeps, or discards the memory
    of its KV cache without that, and ``on_wake_up`` after it has woken up, on the worker's thread.
    """
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
        if tags is None or KV_CACHE_TAG in tags:
            on_wake_up()
        return result

    worker.sleep, worker.wake_up = sleep_without_copies, wake_up_with_copies
    discard = getattr(worker, "discard", None)
    if discard is None:
        return

    @functools.wraps(discard)
    def discard_without_copies(tags: Sequence[str], *arguments: Any, **named: Any) -> Any:
        if KV_CACHE_TAG in tags:
            on_sleep()
        return discard(tags, *arguments, **named)

    # 0.32: ``release_kv_cache_memory`` of the engine.
    worker.discard = discard_without_copies


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
    # One of several connectors in an engine has a copy of the configuration, with the same parts.
    cache = vllm_config.cache_config
    workers = [each() for each in _models.workers]
    found = [
        each for each in workers if each is not None and each.vllm_config.cache_config is cache
    ]
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


class _ModelDigests:
    """The digests of all tensors of a worker's models, and the names of those that are missing."""

    def __init__(self) -> None:
        self.digests = TensorDigests()
        self.consumed: dict[str, str] = {}
        self.missing: list[str] = []
        self._seen: set[int] = set()
        self._structure: tuple[int, ...] = ()

    def start_again(self, worker: Any) -> bool:
        """Launches the same digests again if the models of ``worker`` have the same modules and
        tensors as in ``add``, in the same places; returns whether they have.

        The device begins before the modules are compared, because requests wait for it.
        """
        if not self.digests.start_again():
            return False
        if self._structure == _structure(worker):
            return True
        # What was launched still reads tensors; they must not be freed before it ends.
        self.digests.finish()
        return False

    def add(self, worker: Any) -> None:
        """Adds the models of ``worker``."""
        self._structure = _structure(worker)
        for prefix, model in (("", worker.get_model()), ("draft.", _draft_of(worker))):
            if model is None:
                continue
            for path, module in model.named_modules():
                # With LoRA enabled a layer is wrapped, and its weights are named differently.
                self._add_module(module, f"{prefix}{path}.".replace(".base_layer.", "."))

    def _add_module(self, module: torch.nn.Module, where: str) -> None:
        present: set[str] = set()
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if tensor.device.type == "meta":
                self.missing.append(f"{where}{name} (not loaded)")
            elif tensor.numel():
                present.add(name)
                if id(tensor) not in self._seen:
                    self._seen.add(id(tensor))
                    self.digests.add(where + name, tensor)
        consumed = _models.consumed.get(module, {})
        for name in _models.created.get(module, frozenset(consumed)) - present:
            if name not in consumed:
                self.missing.append(where + name)
        for name, digest in consumed.items():
            if name not in present:
                self.consumed[f"{where}{name} (consumed)"] = digest


def _structure(worker: Any) -> tuple[int, ...]:
    """Returns the identities of the modules of a worker's models and of their tensors."""
    found = [_models.changes]
    modules = [each for each in (worker.get_model(), _draft_of(worker)) if each is not None]
    for module in modules:  # grows
        found.append(id(module))
        found.extend(map(id, module._parameters.values()))
        found.extend(map(id, module._buffers.values()))
        modules.extend(each for each in module._modules.values() if each is not None)
    return tuple(found)


def _own_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return module.named_parameters(recurse=False)


def _combined(digests: dict[str, str]) -> str:
    total = blake3()
    for name in sorted(digests):
        total.update(f"{name}\0{digests[name]}\0".encode())
    return str(total.hexdigest()[:DIGEST_DIGITS])
