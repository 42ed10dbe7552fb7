"""Records when an engine does what, for ``engine_steps.py``: a plugin for vLLM.

``deliver`` writes a directory for the ``PYTHONPATH`` of an engine. vLLM then calls ``install`` in
every process of the engine. It wraps methods of vLLM and of its connector, and changes nothing of
what they do. Each process appends events to a file in the directory that ``KVTIER_STEP_TRACE``
names, one JSON array for each: name, begin and end in seconds of the machine's monotonic clock,
which all processes share, and details.

The times of copies on a GPU come from events of the device. They are placed on the host's clock by
an event that is recorded while nothing is loaded, at most each ``ANCHOR_SECONDS``.

This file is copied, and imports nothing but the standard library until it is installed.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import pickle
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "KVTIER_STEP_TRACE"
CONSTANTS = "KVTIER_STEP_TRACE_CONSTANTS"
"""Other values of constants, for a comparison: ``module:NAME=number``, separated by spaces."""
MODULE = "kvtier_step_trace"
FLUSH_SECONDS = 0.5
ANCHOR_SECONDS = 0.3
SCHEDULER_HOOKS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "take_events",
    "get_kv_connector_stats",
)
WORKER_HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "build_connector_worker_meta",
)
_now = time.monotonic


def deliver(directory: Path) -> Path:
    """Writes the plugin into ``directory`` and puts that on the ``PYTHONPATH``; returns it."""
    metadata = directory / f"{MODULE}-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(__file__, directory / f"{MODULE}.py")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{MODULE} = {MODULE}:install\n"
    )
    path = [str(directory), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return directory


class _Log:
    """The events of this process. Appending to a list needs no lock."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._events: list[tuple[object, ...]] = []
        self._process = os.getpid()
        self._written_at = _now()

    def add(self, name: str, begin: float, end: float, **details: object) -> None:
        if os.getpid() != self._process:
            self._process, self._events = os.getpid(), []
        self._events.append((name, begin, end, details))

    def flush(self, force: bool = False) -> None:
        """Writes what there is, at most once in ``FLUSH_SECONDS``."""
        if not self._events or (not force and _now() - self._written_at < FLUSH_SECONDS):
            return
        events, self._events, self._written_at = self._events, [], _now()
        with Path(self._directory, f"{os.getpid()}.jsonl").open("a") as target:
            target.write("".join(json.dumps(each) + "\n" for each in events))


_log: _Log | None = None
_installed = False
_noted: list[str] = []
"""What could not be wrapped."""


def install() -> None:
    """Wraps the engine's methods, once in each process. Never raises: vLLM would not start."""
    global _log, _installed
    if _installed:
        return
    _installed = True
    _try(_set_constants)
    directory = os.environ.get(VARIABLE, "")
    if not directory:
        return
    _log = _Log(directory)
    for wrap in (_wrap_core, _wrap_ranks, _wrap_connectors, _wrap_kvtier):
        _try(wrap)
    _log.add("installed", _now(), _now(), missing=list(_noted))


def _try(wrap: Callable[[], None]) -> None:
    try:
        wrap()
    except Exception as error:  # noqa: BLE001 - a trace without this part is better than none
        _noted.append(f"{wrap.__name__}: {type(error).__name__}: {error}")
        print(f"step trace: {_noted[-1]}", file=sys.stderr)


def _set_constants() -> None:
    for each in os.environ.get(CONSTANTS, "").split():
        place, _, value = each.partition("=")
        module, _, name = place.partition(":")
        if (module, name) == ("sys", "switchinterval"):
            sys.setswitchinterval(float(value))
            continue
        owner = importlib.import_module(module)
        kind = type(getattr(owner, name))
        setattr(owner, name, kind(float(value)))


def _timed(
    owner: Any,
    method: str,
    name: str,
    details: Callable[..., dict[str, object]] | None = None,
    flush: bool = False,
) -> None:
    """Replaces ``owner.method`` with one that records how long a call takes.

    ``details``: called with the result and the arguments after the call.
    """
    original = getattr(owner, method, None)
    if original is None:
        _noted.append(f"{getattr(owner, '__name__', owner)} has no {method}")
        return

    @functools.wraps(original)
    def timed(*arguments: Any, **named: Any) -> Any:
        begin = _now()
        result = original(*arguments, **named)
        end = _now()
        log = _log
        if log is not None:
            more = details(result, *arguments) if details is not None else {}
            log.add(name, begin, end, **more)
            if flush:
                log.flush()
        return result

    setattr(owner, method, timed)


def _wrap_core() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    def scheduled(result: Any, *_: Any) -> dict[str, object]:
        return {"tokens": int(result.total_num_scheduled_tokens)}

    def updated(result: Any, scheduler: Any, output: Any, model: Any, *_: Any) -> dict[str, object]:
        connector = getattr(model, "kv_connector_output", None)
        first = any(
            each.new_token_ids
            for outputs in (result or {}).values()
            for each in getattr(outputs, "outputs", ())
        )
        return {
            "tokens": int(output.total_num_scheduled_tokens),
            "loaded": sorted(getattr(connector, "finished_recving", None) or ()),
            "sampled": first,
        }

    def request(result: Any, core: Any, added: Any, *_: Any) -> dict[str, object]:
        return {"prompt": len(getattr(added, "prompt_token_ids", None) or ())}

    _timed(Scheduler, "schedule", "schedule", scheduled)
    _timed(Scheduler, "update_from_output", "update", updated)
    _timed(EngineCore, "preprocess_add_request", "preprocess", request)
    _timed(EngineCore, "add_request", "add", request)
    _timed(EngineCore, "step", "step")
    _timed(EngineCore, "step_with_batch_queue", "step")
    _timed(EngineCoreProc, "_process_engine_step", "turn", flush=True)


def _wrap_ranks() -> None:
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def executed(result: Any, owner: Any, output: Any, *_: Any) -> dict[str, object]:
        return {"tokens": int(output.total_num_scheduled_tokens)}

    for executor in (MultiprocExecutor, UniProcExecutor, Executor):
        if "execute_model" in vars(executor):
            _timed(executor, "execute_model", "dispatch", executed)
    _timed(WorkerWrapperBase, "execute_model", "rank", executed, flush=True)


def _wrap_connectors() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    original = KVConnectorFactory.create_connector.__func__

    def create(cls: Any, config: Any, role: Any, *arguments: Any, **named: Any) -> Any:
        connector = original(cls, config, role, *arguments, **named)
        side = role.name.lower()
        hooks = SCHEDULER_HOOKS if side == "scheduler" else WORKER_HOOKS
        for hook in hooks:
            if hasattr(connector, hook):
                _timed(connector, hook, f"{side}.{hook}", _metadata_size(hook))
        return connector

    KVConnectorFactory.create_connector = classmethod(create)


def _metadata_size(hook: str) -> Callable[..., dict[str, object]] | None:
    """What it takes to pickle the message of a step that loads, after its hook was timed."""
    if hook != "build_connector_meta":
        return None

    def details(result: Any, *_: Any) -> dict[str, object]:
        if not getattr(result, "loads", None):
            return {}
        begin = _now()
        size = len(pickle.dumps(result, pickle.HIGHEST_PROTOCOL))
        return {"bytes": size, "pickled": _now() - begin}

    return details


class _Device:
    """Places events of a GPU on the host's clock."""

    def __init__(self) -> None:
        self._anchor: Any = None
        self._at = 0.0

    def anchor(self) -> None:
        """Records an event and waits for it. Only while nothing is loaded."""
        import torch

        if not torch.cuda.is_available() or _now() - self._at < ANCHOR_SECONDS:
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        self._anchor, self._at = event, _now()

    def when(self, event: Any) -> float:
        """When the device reached a completed event; 0 if that is not known."""
        if self._anchor is None:
            return 0.0
        return self._at + float(self._anchor.elapsed_time(event)) / 1e3


_device = _Device()


def _wrap_kvtier() -> None:
    if not os.environ.get("KVTIER_TOPOLOGY"):
        return
    loads = importlib.import_module("kvtier.engines.common.worker_loads").WorkerLoads
    thread = importlib.import_module("kvtier.engines.common.worker_thread").TransferThread
    in_flight = importlib.import_module("kvtier.engines.vllm.loads_in_flight").LoadsInFlight
    engine = importlib.import_module("kvtier.transfer.engine").CopyEngine
    state = importlib.import_module("kvtier.engines.common.worker_state").CompletionQueue
    worker = importlib.import_module("kvtier.engines.vllm.worker").KVTierConnectorWorker

    def copied(result: Any, owner: Any, copies: Any, direction: Any, *_: Any) -> dict[str, object]:
        return {"direction": direction.value, "bytes": result.total_bytes}

    def received(result: Any, owner: Any, message: Any) -> dict[str, object]:
        return {"message": type(message).__name__}

    def ended(result: Any, owner: Any, end: Any) -> dict[str, object]:
        report = end.result
        return {
            "request": report.request_id,
            "early": report.copying,
            "follows": report.follows,
            "seconds": report.seconds,
            "copy_seconds": report.copy_seconds,
            "reason": report.reason,
        }

    def anchored(result: Any, owner: Any, metadata: Any) -> dict[str, object]:
        if not metadata.loads and owner._thread is not None and not len(owner._thread._loads):
            _device.anchor()
        return {}

    _timed(in_flight, "start", "load.start")
    _timed(loads, "add", "load.received", lambda r, o, jobs, *_: {"loads": len(tuple(jobs))})
    _timed(engine, "submit", "copy.submit", copied)
    _timed(thread, "receive", "tierd.message", received)
    _timed(thread, "weights_known", "weights.known")
    _timed(thread, "order_kernels", "kernels.ordered")
    _timed(state, "add_load", "load.reported", ended)
    _timed(worker, "begin_step", "begin_step", anchored)
    _wrap_done(engine)


def _wrap_done(engine: Any) -> None:
    """The first time that a copy was seen to be complete, and when the device completed it."""
    original = engine.done

    @functools.wraps(original)
    def done(self: Any, handle: Any) -> bool:
        submission = handle.state
        if handle.finished:
            return bool(original(self, handle))
        found = bool(original(self, handle))
        log = _log
        if found and log is not None:
            at, start, end = _now(), 0.0, 0.0
            if hasattr(submission, "end"):
                try:
                    end = _device.when(submission.end)
                    start = _device.when(submission.start) if submission.started else 0.0
                except RuntimeError:
                    start = end = 0.0
            log.add(
                "copy.done",
                at,
                at,
                direction=handle.direction.value,
                bytes=handle.total_bytes,
                device_start=start,
                device_end=end,
            )
        return found

    engine.done = done
