"""Engines for the GPU benchmarks: vLLM with a model's shape and random weights, in a process of its
own for each measurement, so that contender and peer have the same start.

Needs vLLM and a CUDA device. No weights are read and no network is used. With ``--cpu`` the CPU
engine takes the place of the GPU, with a tiny model and a thirty-second of every length: a trial of
the programs, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from kvtier.harness.engine_process import cpu_environment
from kvtier.payload import write as write_payload

ATTACH_SECONDS = 120.0
DRAIN_SECONDS = 60.0
QUIET_LOOKS = 10
CHILD_SECONDS = 280.0
"""A measurement that takes longer has failed."""
CPU_CHILD_SECONDS = 1200.0
"""The same of a trial, on a machine that other programs use."""
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
CPU_SCALE = 32
"""With ``--cpu``, lengths in tokens are divided by this, and gigabytes are megabytes."""
CPU_BLOCK_TOKENS = 32
CPU_LLAMA = {
    **LLAMA_8B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "torch_dtype": "float32",
}
CHUNK_TOKENS = 64
FILES_GIB = 40
CPU_NOTE = "CPU engine, a tiny model: figures mean nothing"
CPU_LINK_BYTES_PER_SECOND = 1e9
"""Stands for the link of a GPU in a trial."""
SUPPORT = Path(__file__).parents[2] / "tests" / "support"
"""Has the copies that vLLM's OffloadingConnector lacks on the CPU."""


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
    parser.add_argument(
        "--cpu", action="store_true", help="a trial on the CPU engine: figures mean nothing"
    )
    parser.add_argument(
        "--keep", default="", help="leave logs and the results of engines in this directory"
    )
    parser.add_argument(
        "--link", type=float, default=0.0, help="bytes per second to a GPU; 0: it is measured"
    )
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", default="", help=argparse.SUPPRESS)


def scaled(chosen: argparse.Namespace, tokens: int) -> int:
    """A length in tokens, or in anything that grows with them; less of it with ``--cpu``."""
    return max(1, tokens // CPU_SCALE) if chosen.cpu else tokens


def ram_bytes(chosen: argparse.Namespace) -> int:
    """Capacity of the memory tier."""
    return int(chosen.ram_gib) << (20 if chosen.cpu else 30)


def bytes_per_token(chosen: argparse.Namespace) -> int:
    """KV of one token, on all ranks."""
    shape: dict[str, Any] = CPU_LLAMA if chosen.cpu else LLAMA_8B
    element = 4 if chosen.cpu else 2
    size: int = 2 * chosen.layers * shape["num_key_value_heads"] * shape["head_dim"] * element
    return size


def card(chosen: argparse.Namespace) -> str:
    """The name of the GPU."""
    if chosen.cpu:
        return CPU_NOTE
    program = "import torch; print(torch.cuda.get_device_name(0))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip().splitlines()[-1]


def run_child(script: str, mode: str, scratch: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs ``script`` with ``--child mode`` and returns the JSON that it leaves in ``scratch``.

    A child that does not end in time is ended with its engine, and what it has left until then is
    returned. Raises ``SystemExit`` with the end of its log if there is nothing.
    """
    result, log = scratch / f"{mode}.json", scratch / f"{mode}.log"
    result.unlink(missing_ok=True)
    command = [sys.executable, script, *arguments, "--child", mode, "--scratch", str(scratch)]
    seconds = CPU_CHILD_SECONDS if "--cpu" in arguments else CHILD_SECONDS
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            env={**os.environ, **environment(scratch)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            print(f"{mode}: did not end within {seconds:g} s", file=sys.stderr)
        finally:
            # Its engine is in the same group. A benchmark that is interrupted ends it too.
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            child.wait(30)
    if not result.exists():
        raise SystemExit(f"{mode} failed:\n{log.read_text(errors='replace')[-4000:]}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def leave(scratch: str, mode: str, result: dict[str, Any]) -> None:
    """Leaves what has been measured so far for the parent."""
    target = Path(scratch) / f"{mode}.json"
    staged = target.with_suffix(".new")
    staged.write_text(json.dumps(result))
    staged.replace(target)


def finish(scratch: str, mode: str, result: dict[str, Any], llm: Any) -> None:
    """Leaves the result for the parent and ends this process with its engine."""
    leave(scratch, mode, result)
    sys.stdout.flush()
    llm.llm_engine.engine_core.shutdown()
    os._exit(0)


def environment(scratch: Path) -> dict[str, str]:
    """Settings of all engines: no reports to anybody, equal block hashes, and KVTier as the
    operator delivers it, a payload whose plugin attaches the connector."""
    payload = scratch / "payload"
    if not payload.exists():
        write_payload(payload, include=("harness", "payload"))
    path = [str(payload), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(each for each in path if each),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }


def make_model(directory: Path, layers: int, cpu: bool = False) -> Path:
    """Writes the configuration of the model and returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    shape = {**(CPU_LLAMA if cpu else LLAMA_8B), "num_hidden_layers": layers}
    (directory / "config.json").write_text(json.dumps(shape))
    return directory


def make_topology(
    directory: Path,
    chosen: argparse.Namespace,
    daemon: Daemon = Daemon.ENGINE,
    tier: FileSystemTierDocument | None = None,
) -> Path:
    """Writes documents with one memory tier, and ``tier`` below it, and returns their directory.
    Its tierd runs in a directory of the same name in shared memory."""
    lower = [] if tier is None else [tier]
    tiers = {"ram": LiveTier()} | {
        each.name: LiveTier(capacity_bytes=FILES_GIB << 30) for each in lower
    }
    live = Live(min_load_tokens=scaled(chosen, 256), tiers=tiers)
    structural = Structural(
        policy=PolicyIdentity(namespace="default", name="benchmark"),
        content_hash="benchmark",
        daemon=daemon,
        run_directory=str(run_directory_of(directory)),
        tiers=[MemoryTierDocument(name="ram", capacity_bytes=ram_bytes(chosen)), *lower],
        http=HttpEndpoint(port=0),
        live=live,
        chunk_tokens=chosen.chunk_tokens,
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
    v2 = options.runner == "v2" and not options.cpu
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if v2 else "0"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if options.in_process else "1"
    transfer: dict[str, Any] = {}
    os.environ.pop(TOPOLOGY_VARIABLE, None)
    run_directory = None
    if mode == "kvtier":
        topology = scratch / "topology"
        if not topology.exists():
            make_topology(topology, options)
        run_directory = run_directory_of(topology)
        os.environ[TOPOLOGY_VARIABLE] = str(topology)
    elif mode == "peer":
        extra: dict[str, Any] = {"cpu_bytes_to_use": ram_bytes(options)}
        if options.cpu:
            sys.path.insert(0, str(SUPPORT))
            extra |= {"spec_name": "CopyingSpec", "spec_module_path": "offloading_on_cpu"}
        transfer = {
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": extra,
        }
    arguments: dict[str, Any] = {
        "model": str(make_model(scratch / "model", options.layers, options.cpu)),
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
    if options.cpu:
        os.environ.update(cpu_environment())
        del arguments["gpu_memory_utilization"], arguments["compilation_config"]
        arguments |= {
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": CPU_BLOCK_TOKENS,
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": 4096,
            "max_num_batched_tokens": 512,
        }
    if transfer:
        arguments["kv_transfer_config"] = transfer
    return arguments, run_directory


def cache_arguments(options: argparse.Namespace, max_tokens: int) -> dict[str, Any]:
    """vLLM's arguments for a cache of ``options.gpu_blocks`` blocks of 16 tokens and prompts of at
    most ``max_tokens``."""
    blocks, length = options.gpu_blocks, scaled(options, max_tokens)
    if options.cpu:
        # vLLM wants room for one prompt of the greatest length.
        least = length // CPU_BLOCK_TOKENS + 2
        blocks = max(least, scaled(options, blocks) * 16 // CPU_BLOCK_TOKENS)
    return {"num_gpu_blocks_override": blocks, "max_model_len": length}


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


def link_bytes_per_second(chosen: argparse.Namespace) -> float:
    """Measures the copy of 1 GiB of pinned memory to each of the first GPUs, all at once: the floor
    of a reload. Returns the rate of the slowest."""
    if chosen.link or chosen.cpu:
        return float(chosen.link or CPU_LINK_BYTES_PER_SECOND)
    gpus = int(chosen.tensor_parallel)
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


@contextmanager
def scratch_directory(chosen: argparse.Namespace, part: str = "") -> Iterator[Path]:
    """Where the children leave logs and results. Removed at the end, unless it was named.
    ``part``: if a benchmark needs several."""
    if chosen.keep:
        kept = Path(f"{Path(chosen.keep).absolute()}{part and '-'}{part}")
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="kvtier-benchmark-") as directory:
        yield Path(directory)
