"""An ATOM image has no vLLM: the adapter must not need it, nor pretend that it is there."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vllm" and name not in sys.modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "vllm" else found(name, *rest)
sys.meta_path.insert(0, Blocked())
import kvtier.engines.atom.connector as connector
from kvtier.engines.atom.metadata import AtomStepMetadata
assert not [name for name in sys.modules if name.split(".")[0] == "vllm"], "vllm is visible"
assert connector.KVTierOffloadScheduler.is_offload and AtomStepMetadata().requests == []
assert not [name for name in sys.modules if name.startswith("kvtier.engines.vllm")]
assert not [name for name in sys.modules if name.split(".")[0] == "lmcache"], "lmcache is imported"
try:
    import vllm
except ModuleNotFoundError:
    print("absent")
"""


def test_the_adapter_is_imported_where_vllm_is_not_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "absent", done.stderr[-2000:]
