"""Engines for the GPU benchmarks: vLLM with a model's shape and random weights, in a process of its
own for each measurement, so that contender and peer have the same start.

Needs vLLM and a CUDA device. No weights are read and no network is used.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtier.config.models import (
    Daemon,
    FileSystemTierDocument,
    HttpEndpoint,
    Live,
    LiveTier,
    MemoryTierDocument,
    PolicyIdentity,
    Structural,
    Topology,
)
from kvtier.config.writer import write
from kvtier.engines.vllm.plugin import TOPOLOGY_VARIABLE
from kvtier.payload import write as write_payload

ATTACH_SECONDS = 120.0
DRAIN_SECONDS = 60.0
QUIET_LOOKS = 10
CHILD_SECONDS = 280.0
"""A measurement that takes longer has failed."""
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""The shape of Llama 3.1 8B."""
BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2
CHUNK_TOKENS = 64
FILES_GIB = 40


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that every GPU benchmark has."""
    parser.add_argument("--runner", choices=("v1", "v2"), default="v2", help="vLLM's model runner")
    parser.add_argument(
        "--in-process", action="store_true", help="the engine's core in the caller's process"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of one engine")
    parser.add_argument("--ram-gib", type=int, default=36, help="capacity of the memory tier")
    parser.add_argument(
        "--chunk-tokens", type=int, default=CHUNK_TOKENS, help="in a chunk; as policies by default"
    )
    parser.add_argument("--layers", type=int, default=32, help="fewer: for a trial without a GPU")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--only", choices=("kvtier", "peer"), help="measure one of the two")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", default="", help=argparse.SUPPRESS)


def run_child(script: str, mode: str, scratch: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs ``script`` with ``--child mode`` and returns the JSON that it leaves in ``scratch``.

    Raises ``SystemExit`` with the end of its log if it fails.
    """
    result, log = scratch / f"{mode}.json", scratch / f"{mode}.log"
    result.unlink(missing_ok=True)
    command = [sys.executable, script, *arguments, "--child", mode, "--scratch", str(scratch)]
    with log.open("wb") as output:
        try:
            subprocess.run(
                command,
                env={**os.environ, **environment(scratch)},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=CHILD_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(f"{mode}: no result within {CHILD_SECONDS:g} s", file=sys.stderr)
    if not result.exists():
        raise SystemExit(f"{mode} failed:\n{log.read_text(errors='replace')[-4000:]}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def finish(scratch: str, mode: str, result: dict[str, Any], llm: Any) -> None:
    """Leaves the result for the parent and ends this process with its engine."""
    (Path(scratch) / f"{mode}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    llm.llm_engine.engine_core.shutdown()
    os._exit(0)


def environment(scratch: Path) -> dict[str, str]:
    """Settings of all engines: no reports to anybody, equal block hashes, and KVTier as the
    operator delivers it, a payload whose plugin attaches the connector."""
    payload = scratch / "payload"
    if not payload.exists():
        write_payload(payload, include=("payload",))
    path = [str(payload), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(each for each in path if each),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }


def make_model(directory: Path, layers: int) -> Path:
    """Writes the configuration of the model and returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    shape = {**LLAMA_8B, "num_hidden_layers": layers}
    (directory / "config.json").write_text(json.dumps(shape))
    return directory


def make_topology(
    directory: Path,
    ram_gib: int,
    chunk_tokens: int = CHUNK_TOKENS,
    daemon: Daemon = Daemon.ENGINE,
    tier: FileSystemTierDocument | None = None,
) -> Path:
    """Writes documents with one memory tier, and ``tier`` below it, and returns their directory.
    Its tierd runs in a directory of the same name in shared memory."""
    lower = [] if tier is None else [tier]
    tiers = {"ram": LiveTier()} | {
        each.name: LiveTier(capacity_bytes=FILES_GIB << 30) for each in lower
    }
    live = Live(min_load_tokens=256, tiers=tiers)
    structural = Structural(
        policy=PolicyIdentity(namespace="default", name="benchmark"),
        content_hash="benchmark",
        daemon=daemon,
        run_directory=str(run_directory_of(directory)),
        tiers=[MemoryTierDocument(name="ram", capacity_bytes=ram_gib << 30), *lower],
        http=HttpEndpoint(port=0),
        live=live,
        chunk_tokens=chunk_tokens,
    )
    write(directory, Topology(structural=structural, live=live))
    return directory


def run_directory_of(topology: Path) -> Path:
    """Where the tierd of a topology directory runs."""
    return Path("/dev/shm") / f"{topology.parent.name}-{topology.name}"


def engine_arguments(
    mode: str, options: argparse.Namespace, scratch: Path
) -> tuple[dict[str, Any], Path | None]:
    """Returns vLLM's arguments for an engine, and the run directory of its tierd. ``mode``:
    "kvtier"; "peer", vLLM's OffloadingConnector with as much memory; or "none", no connector."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if options.runner == "v2" else "0"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if options.in_process else "1"
    transfer: dict[str, Any] = {}
    os.environ.pop(TOPOLOGY_VARIABLE, None)
    run_directory = None
    if mode == "kvtier":
        topology = scratch / "topology"
        if not topology.exists():
            make_topology(topology, options.ram_gib, options.chunk_tokens)
        run_directory = run_directory_of(topology)
        os.environ[TOPOLOGY_VARIABLE] = str(topology)
    elif mode == "peer":
        transfer = {
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {"cpu_bytes_to_use": options.ram_gib << 30},
        }
    arguments: dict[str, Any] = {
        "model": str(make_model(scratch / "model", options.layers)),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 66_560,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.6,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "tensor_parallel_size": options.tensor_parallel,
        "seed": 0,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 40, 64],
        },
    }
    if transfer:
        arguments["kv_transfer_config"] = transfer
    return arguments, run_directory


def make_engine(
    mode: str, options: argparse.Namespace, scratch: Path, **more: Any
) -> tuple[Any, Path | None]:
    """Returns an engine, and the run directory of its tierd. See ``engine_arguments``."""
    arguments, run_directory = engine_arguments(mode, options, scratch)
    from vllm import LLM

    return LLM(**{**arguments, **more}), run_directory


def status(run_directory: Path) -> dict[str, Any]:
    """Returns tierd's status; {} while it does not answer."""
    try:
        address = json.loads((run_directory / "http.json").read_text())
        url = f"http://{address['host']}:{address['port']}/status"
        with urllib.request.urlopen(url, timeout=5) as response:
            found: dict[str, Any] = json.load(response)
    except (OSError, ValueError, KeyError):
        return {}
    return found


def wait_attached(run_directory: Path | None, step: Callable[[], object], ranks: int = 1) -> float:
    """Steps the engine until every rank is attached; returns how many seconds that took."""
    started_at = time.monotonic()
    while run_directory is not None:
        sessions = status(run_directory).get("sessions", [])
        ready = [each for each in sessions if each["role"] == "worker" and each["ready"]]
        if len(ready) >= ranks:
            break
        if time.monotonic() - started_at > ATTACH_SECONDS:
            raise SystemExit(f"not attached after {ATTACH_SECONDS:g} s: {sessions}")
        step()
        time.sleep(0.05)
    return time.monotonic() - started_at


def settle(run_directory: Path | None, step: Callable[[], object], seconds: float = 60.0) -> None:
    """Steps the engine until all of its stores are in the memory tier."""
    deadline = time.monotonic() + seconds
    for _ in range(3):
        step()
    quiet = 0
    while run_directory is not None and quiet < 3 and time.monotonic() < deadline:
        quiet = quiet + 1 if not status(run_directory).get("pendingStores", 0) else 0
        time.sleep(0.05)
    step()


def reset_prefix_cache(llm: Any, step: Callable[[], object]) -> None:
    """Empties the GPU's prefix cache. Raises ``SystemExit`` if it stays in use for 50 steps."""
    for _ in range(50):
        if llm.reset_prefix_cache():
            return
        step()
    raise SystemExit("the prefix cache cannot be reset")


def drain(run_directory: Path | None, step: Callable[[], object]) -> float:
    """Returns the seconds until no tier has anything to write, at several looks in a row: the
    engine submits the last stores, and looks after copies, in its steps."""
    begin = last = time.perf_counter()
    quiet = 0
    while run_directory is not None and quiet < QUIET_LOOKS and last - begin < DRAIN_SECONDS:
        step()
        time.sleep(0.02)
        found = status(run_directory)
        pending = found.get("pendingStores", 0)
        pending += sum(each["pendingStoreBytes"] for each in found.get("tiers", []))
        quiet = 0 if pending else quiet + 1
        if not quiet:
            last = time.perf_counter()
    return last - begin


def link_bytes_per_second(gpus: int = 1) -> float:
    """Measures the copy of 1 GiB of pinned memory to each of the first ``gpus`` GPUs, all at once:
    the floor of a reload. Returns the rate of the slowest."""
    program = """
import sys, threading, time, torch
gpus = int(sys.argv[1])
hosts = [torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True) for _ in range(gpus)]
devices = [torch.empty(1 << 30, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in range(gpus)]
together, slowest = threading.Barrier(gpus), [1e9] * gpus

def copy(gpu):
    for _ in range(5):
        torch.cuda.synchronize(gpu)
        together.wait(60)
        started = time.perf_counter()
        devices[gpu].copy_(hosts[gpu], non_blocking=True)
        torch.cuda.synchronize(gpu)
        slowest[gpu] = min(slowest[gpu], time.perf_counter() - started)

threads = [threading.Thread(target=copy, args=(gpu,)) for gpu in range(gpus)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print((1 << 30) / max(slowest))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(gpus)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return float(done.stdout.strip().splitlines()[-1])


def scratch_directory() -> tempfile.TemporaryDirectory[str]:
    """Where the children leave logs and results."""
    return tempfile.TemporaryDirectory(prefix="kvtier-benchmark-")
