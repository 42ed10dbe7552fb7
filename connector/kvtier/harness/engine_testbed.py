"""The testbed of a real engine: one directory with topology, file tier, tier daemon and engine.

``EngineOptions`` are the settings that tests vary. The topology is written directly from its
models, so that a test sets exactly what it needs. The engine is attached by its environment alone,
as in production: a payload directory on PYTHONPATH, and ``KVTIER_TOPOLOGY``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtier.config.models import (
    BreakerSettings,
    Daemon,
    FileSystemTierDocument,
    HttpEndpoint,
    Live,
    LiveTier,
    LMCacheTierDocument,
    MemoryTierDocument,
    PolicyIdentity,
    Selection,
    StorePolicy,
    Structural,
    TierDocument,
    TierVolumeDocument,
)
from kvtier.files import replace_file
from kvtier.harness.engine_process import (
    DrivenEngine,
    EngineProcessError,
    ManagedProcess,
    cpu_environment,
    http_request,
    kill_tierd,
    parse_metrics,
    quiet_environment,
    tierd_processes,
)
from kvtier.harness.engine_requests import ReferenceEngine, Requests

BLOCK_TOKENS = 32
CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The settings of a topology that tests vary. Sizes in bytes. ``lmcache_url``: an lmcache tier
    takes the place of the file tier. ``volumes``: names of the file tier's directories, if it has
    several; the capacity is divided equally."""

    chunk_tokens: int = CHUNK_TOKENS
    memory_bytes: int = 64 << 20
    file_bytes: int | None = 1 << 30
    daemon: Daemon = Daemon.ENGINE
    persistence: str = "Pod"
    load_timeout_seconds: int = 120
    min_load_tokens: int = CHUNK_TOKENS
    store_policy: StorePolicy = StorePolicy.ALL
    failure_threshold: int = 50
    selection: Selection = Selection.WEIGHTED
    hash_seed: str = "0"
    lmcache_url: str = ""
    volumes: tuple[str, ...] = ()

    def structural(self, name: str, run_directory: Path, files_root: Path) -> Structural:
        """A policy called ``name``, with the file tier in ``files_root`` if there is one."""
        tiers: list[TierDocument] = [
            MemoryTierDocument(
                name="ram",
                capacity_bytes=self.memory_bytes,
                persistence="Pod" if self.persistence == "Pod" else "Process",
            )
        ]
        if self.lmcache_url:
            tiers.append(LMCacheTierDocument(name="disk", url=self.lmcache_url))
        elif self.file_bytes is not None:
            tiers.append(
                FileSystemTierDocument(
                    name="disk",
                    path="" if self.volumes else str(files_root),
                    volumes=tuple(
                        TierVolumeDocument(name=name, path=str(files_root / name))
                        for name in self.volumes
                    ),
                    sharing="Node",
                    read_threads=4,
                    write_threads=2,
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
                volume_capacity_bytes={
                    name: self.file_bytes // len(self.volumes) for name in self.volumes
                },
                load_timeout_seconds=self.load_timeout_seconds,
                store_policy=self.store_policy,
            )
        return Live(
            generation=generation,
            selection=self.selection,
            min_load_tokens=self.min_load_tokens,
            breaker=BreakerSettings(failure_threshold=self.failure_threshold, period_seconds=1),
            tiers=tiers,
        )


DEFAULT = EngineOptions()
WAIT_SECONDS = 60.0
LOADED_TOKENS = "vllm:kvtier_loaded_tokens_total"
LOAD_FAILURES = "vllm:kvtier_load_failures_total"
AWAITED_STATES = ("Unknown", "BreakerOpen")
READ_FAILURES = ("kvtier_tier_reads_failed_total", "kvtier_tier_reads_timed_out_total")
ENGINE_OPTIONS: dict[str, object] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "block_size": BLOCK_TOKENS,
    "kv_cache_memory_bytes": 24 << 20,
    "max_num_seqs": 8,
    "seed": 0,
    "disable_log_stats": False,
}
"""Options of ``vllm.LLM`` for a tiny CPU engine; every test starts from these."""


def start_reference_engine(
    model: Path, payload: Path, log: Path, python: str = sys.executable, **options: object
) -> DrivenEngine:
    """Starts an engine without KVTier; does not wait for it."""
    merged = {"model": str(model), **ENGINE_OPTIONS, **options}
    return DrivenEngine(python, merged, _environment(payload, log.parent / f"{log.stem}-tmp"), log)


@contextmanager
def running_reference(
    model: Path, payload: Path, log: Path, **options: Any
) -> Iterator[ReferenceEngine]:
    """An engine without KVTier that is ready. It is killed at the end."""
    engine = start_reference_engine(model, payload, log, **options)
    try:
        yield ReferenceEngine(engine.wait_ready())
    finally:
        engine.kill()


def _environment(payload: Path, temporary: Path) -> dict[str, str]:
    """The variables of every engine. Its temporary files, which remain after a kill, go to
    ``temporary``.
    """
    temporary.mkdir(parents=True, exist_ok=True)
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")
    }
    return {
        **inherited,
        **quiet_environment(),
        **cpu_environment(),
        "PYTHONPATH": str(payload),
        "TMPDIR": str(temporary),
    }


@dataclass(slots=True)
class Loads:
    """Tokens loaded during a block."""

    tokens: int = 0


def _samples(metrics: Mapping[str, float], name: str, label: str = "") -> Iterator[float]:
    """Values of the labelled samples of one metric that carry ``label``."""
    return (value for key, value in metrics.items() if key.startswith(name + "{") and label in key)


def _snapshot(status: Mapping[str, Any] | None) -> tuple[int, int]:
    """A number that rises with each snapshot of a daemon, and with each daemon."""
    return (0, 0) if status is None else (status["epoch"], status["snapshot"])


class EngineTestbed:
    """A new directory (``FileExistsError`` if it exists), its daemon and its engine. ``close``
    stops both and removes everything except the directory.
    """

    def __init__(
        self, directory: Path, model: Path, payload: Path, tuning: EngineOptions = DEFAULT
    ) -> None:
        self.directory = directory
        self.model = model
        self.payload = payload
        self.tuning = tuning
        self.topology = directory / "topology"
        self.files_root = directory / "tier"
        self.faults = directory / "faults.json"
        self.run_directory = Path("/dev/shm") / f"kvtier-test-{uuid.uuid4().hex[:12]}"
        self.engine: DrivenEngine | None = None
        self.daemon: ManagedProcess | None = None
        # Objects of another testbed would be in the same namespace, and their number unknown.
        self.topology.mkdir(parents=True)
        for each in (self.files_root, *(self.files_root / name for name in tuning.volumes)):
            each.mkdir()
        self.write_topology()

    # Topology.

    def write_topology(self) -> None:
        """Writes structural.json and live.json from ``tuning``."""
        structural = self.tuning.structural(
            self.directory.name, self.run_directory, self.files_root
        )
        (self.topology / "structural.json").write_text(
            structural.model_dump_json(by_alias=True, indent=2)
        )
        self.write_live()

    def write_live(self, generation: int = 1) -> None:
        """Replaces live.json in one step."""
        text = self.tuning.live(generation).model_dump_json(by_alias=True, indent=2)
        replace_file(self.topology / "live.json", text.encode())

    def retune(self, generation: int, **changes: Any) -> None:
        """Changes live values."""
        self.tuning = replace(self.tuning, **changes)
        self.write_live(generation)

    def environment(self) -> dict[str, str]:
        """The variables that attach an engine to this testbed."""
        return {
            **_environment(self.payload, self.directory / "tmp"),
            "PYTHONHASHSEED": self.tuning.hash_seed,
            "KVTIER_TOPOLOGY": str(self.topology),
        }

    # Processes.

    def start(self, python: str = sys.executable, **options: object) -> DrivenEngine:
        """Starts an attached engine and waits until it is ready. ``options`` override
        ``ENGINE_OPTIONS``.
        """
        merged = {"model": str(self.model), **ENGINE_OPTIONS, **options}
        self.engine = DrivenEngine(
            python, merged, self.environment(), self.directory / "engine.log"
        )
        self._requests = Requests(self.engine)
        return self.engine.wait_ready()

    def start_daemon(self, python: str = sys.executable) -> None:
        """Starts a daemon with fault hooks (for ``Daemon.SIDECAR``) and waits until it serves."""
        known = self._http_address()
        argv = [
            python,
            "-m",
            "kvtier.testing.faulty_tierd",
            "--topology",
            str(self.topology),
            "--faults",
            str(self.faults),
        ]
        self.daemon = ManagedProcess(argv, self.environment(), self.directory / "tierd.log")
        self.wait_for(
            lambda: self._http_address() not in (None, known) and self.status() is not None,
            "tierd does not serve",
        )

    def restart_daemon(self, number: int) -> None:
        """Stops the daemon by a signal and starts another."""
        self.stop_daemon(number)
        self.start_daemon()

    def stop_daemon(self, number: int) -> None:
        """Sends the signal ``number`` to the daemon started here and waits until it has exited."""
        if self.daemon is None:
            raise EngineProcessError("no tierd was started")
        self.daemon.signal_group(number)
        self.daemon.process.wait(WAIT_SECONDS)

    def set_faults(self, **faults: object) -> None:
        """Sets the faults of the secondary tiers (see ``kvtier.testing.faulty_tierd``)."""
        replace_file(self.faults, json.dumps(faults).encode())

    def daemon_pids(self) -> list[int]:
        """Process ids of the daemons that serve this topology."""
        return [process.pid for process in tierd_processes(self.topology)]

    def close(self) -> None:
        """Stops engine and daemon and removes the run directory."""
        if self.engine is not None:
            self.engine.kill()
        if self.daemon is not None:
            self.daemon.kill()
        kill_tierd(self.topology)
        shutil.rmtree(self.run_directory, ignore_errors=True)

    # Inspection.

    def _http_address(self) -> tuple[str, int] | None:
        try:
            document = json.loads((self.run_directory / "http.json").read_text())
            return str(document["host"]), int(document["port"])
        except (OSError, ValueError, KeyError):
            return None

    def status(self) -> dict[str, Any] | None:
        """The daemon's /status, or None while it does not respond."""
        address = self._http_address()
        if address is None:
            return None
        try:
            code, text = http_request(
                address[1], "GET", "/status", timeout_seconds=10, host=address[0]
            )
        except OSError:
            return None
        if code != 200:
            return None
        answer: dict[str, Any] = json.loads(text)
        return answer

    def daemon_metrics(self) -> dict[str, float]:
        """The daemon's /metrics; empty while it does not respond."""
        address = self._http_address()
        if address is None:
            return {}
        try:
            return parse_metrics(
                http_request(address[1], "GET", "/metrics", timeout_seconds=10, host=address[0])[1]
            )
        except OSError:
            return {}

    def engine_metrics(self) -> dict[str, float]:
        """The engine's ``vllm:`` metrics."""
        if self.engine is None:
            raise EngineProcessError("no engine was started")
        return parse_metrics(self.engine.call("metrics"))

    def files(self) -> list[Path]:
        """The objects in the file tier, oldest first."""
        found = [path for path in self.files_root.rglob("*.kv") if path.is_file()]
        return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))

    def wait_for(
        self, condition: Callable[[], bool], failure: str, seconds: float = WAIT_SECONDS
    ) -> None:
        """Waits until ``condition`` holds. Raises ``EngineProcessError`` with status and logs."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise EngineProcessError(
                    f"{failure} after {seconds:.0f} s; status: {self.status()}\n"
                    f"engine: {self._connector()}\n{self._logs()}"
                )
            time.sleep(0.05)

    def requests(self) -> Requests:
        """A way to run requests on the engine."""
        return self._requests

    def loaded(self, tier: str = "") -> int:
        """Tokens that were loaded so far, from one tier or from all, as the engine counts them."""
        return int(
            sum(_samples(self.engine_metrics(), LOADED_TOKENS, f'tier="{tier}"' if tier else ""))
        )

    @contextmanager
    def loads(self, tier: str = "") -> Iterator[Loads]:
        """Counts the tokens loaded within the block."""
        result = Loads()
        before = self.loaded(tier)
        yield result
        self.drive("settle")
        result.tokens = self.loaded(tier) - before

    def load_failures(self) -> int:
        """Loads into the GPU that failed so far, as the engine counts them."""
        return int(sum(_samples(self.engine_metrics(), LOAD_FAILURES)))

    def tier_failures(self) -> int:
        """Reads of the file tier that failed so far, as the daemon counts them."""
        self.wait_snapshot()
        metrics = self.daemon_metrics()
        return int(sum(sum(_samples(metrics, name)) for name in READ_FAILURES))

    def daemon_events(self, name: str, reason: str = "") -> int:
        """An event counter of the daemon."""
        self.wait_snapshot()
        counters = (self.status() or {}).get("counters", [])
        return sum(
            each["value"]
            for each in counters
            if each["name"] == name and reason in ("", each["reason"])
        )

    def settle_stores(self) -> None:
        """Waits until everything computed is stored in RAM and in the file tier, and the engine
        knows it.
        """
        if not self.drive("settle"):
            raise EngineProcessError(f"the engine does not become idle: {self.drive('state')}")
        self.wait_for(self._committed, "the daemon has not committed every store")
        # What was committed last is counted in a later step.
        self.drive("settle")
        self.wait_snapshot()
        self.wait_for(self._idle, "stores are still in progress")

    def _committed(self) -> bool:
        return bool(self.drive("settle")) and not self.drive("connector").get("stores")

    def wait_snapshot(self) -> None:
        """Waits until the daemon's status is later than this call. It is updated twice a second, or
        later on a busy machine."""
        before = _snapshot(self.status())
        self.wait_for(lambda: _snapshot(self.status()) > before, "the status is not updated")

    def _idle(self) -> bool:
        status = self.status()
        if status is None or status["pendingStores"]:
            return False
        return not any(tier["pendingStoreBytes"] for tier in status["tiers"])

    def wait_attached(self) -> None:
        """Waits until scheduler and worker are attached to the running daemon, its tiers work, and
        the engine knows every file.
        """
        self.wait_snapshot()
        self.wait_for(self._attached, "the engine is not attached")

    def _attached(self) -> bool:
        status = self.status()
        if (
            status is None
            or status["fenced"]
            or any(each["state"] in AWAITED_STATES for each in status["tiers"])
        ):
            return False
        epoch = status["epoch"]
        roles = {
            each["role"] for each in status["sessions"] if each["ready"] and each["epoch"] == epoch
        }
        if roles != {"scheduler", "worker"} or not self.drive("settle"):
            return False
        known = self.drive("connector")
        if (
            not known.get("usable")
            or not known["credits"]
            or {known["epoch"], known["worker_epoch"]} != {epoch}
        ):
            return False
        namespace = self.files_root / known["namespace"]
        return bool(known["replica"] >= sum(path.is_file() for path in namespace.rglob("*.kv")))

    def _connector(self) -> Any:
        """The connector's state for messages, if the engine responds."""
        try:
            return self.drive("connector")
        except (EngineProcessError, OSError, ValueError) as error:
            return f"does not respond: {error}"

    def daemon_pid(self) -> int:
        """Process id of the living daemon."""
        return int(json.loads((self.run_directory / "http.json").read_text())["pid"])

    def kill_daemon(self) -> None:
        """Kills the daemon, whichever process started it, and waits until it has exited."""
        kill_tierd(self.topology)

    def drive(self, do: str, **arguments: Any) -> Any:
        """One command to the engine."""
        if self.engine is None:
            raise EngineProcessError("no engine was started")
        return self.engine.call(do, **arguments)

    def empty_gpu_cache(self) -> None:
        """Empties the engine's own prefix cache."""
        if not self.drive("reset_prefix_cache"):
            raise EngineProcessError(
                f"the engine did not reset its prefix cache: {self.drive('state')}"
            )

    def step_until(self, name: str, *states: str) -> None:
        """Steps until the request is in one of ``states`` (names of vLLM's request status)."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            state = self.drive("state")["requests"].get(name, "")
            if state.endswith(states):
                return
            if time.monotonic() > deadline:
                raise EngineProcessError(
                    f"{name} is {state or 'unknown'}: must become one of {states}"
                )
            self.drive("step")

    def shared_memory_bytes(self) -> int:
        """Shared memory used by the run directory."""
        return sum(
            path.stat().st_blocks * 512 for path in self.run_directory.rglob("*") if path.is_file()
        )

    def _logs(self) -> str:
        parts = []
        for name in ("engine.log", "tierd.log"):
            path = self.directory / name
            if path.exists():
                parts.append(
                    f"--- {name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-30:])
                )
        for path in self.run_directory.glob("*.log"):
            parts.append(
                f"--- {path.name}\n"
                + "\n".join(path.read_text(errors="replace").splitlines()[-30:])
            )
        return "\n".join(parts)
