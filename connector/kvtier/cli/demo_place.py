"""Where the demo works: directories, the rendered topology, and the processes it has to take with it when it ends."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.cli import payload, topology
from kvtier.cli.demo_engine import DemoError, Installation, engine_environment
from kvtier.testing.engine_process import DrivenEngine, EngineServer, ManagedProcess, http_request, kill_tierd
from kvtier.testing.tiny_model import write_llama
from kvtier.topology.models import HttpEndpoint, Topology
from kvtier_operator.api.documents import load_policy
from kvtier_operator.render.engine import environment

FILE_TIER = "disk"


@dataclass(frozen=True, slots=True)
class TierState:
    """What the daemon says about the file tier."""

    objects: int
    pending_bytes: int


class Workplace:
    """The demo's directories and processes. ``close`` ends every process and removes what need not be kept.

    ``keep``: a directory that stays, with policy, topology, tier directory and logs; None: everything is temporary.
    """

    def __init__(self, installation: Installation, keep: Path | None) -> None:
        self.installation = installation
        self.keep = keep
        # Short, because sockets live there and their paths may have 107 bytes.
        self.scratch = Path(tempfile.mkdtemp(prefix="kvtier-demo-"))
        self.root = keep.absolute() if keep is not None else self.scratch / "work"
        self.root.mkdir(parents=True, exist_ok=True)
        self.model = self.root / "model"
        self.payload = self.root / "payload"
        self.topology = self.root / "topology"
        self.tier = self.root / "tier"
        self.run_directory = Path(tempfile.mkdtemp(prefix="kvtier-demo-", dir=_memory_backed()))
        self._processes: list[ManagedProcess] = []
        self._attach: dict[str, str] = {}
        self._starts = 0

    def prepare(self, policy_file: Path) -> Topology:
        """Writes model, payload, policy and topology; what an earlier demo stored here is removed first."""
        for old in (self.tier, self.topology, self.root / "logs"):
            shutil.rmtree(old, ignore_errors=True)
        self.tier.mkdir()
        write_llama(self.model, self.installation.model)
        payload.write(self.payload)
        shutil.copyfile(policy_file, self.root / "policy.yaml")
        rendered, self._attach = self._render(self.root / "policy.yaml")
        (self.root / "environment.json").write_text(json.dumps(self._attach, indent=2) + "\n")
        return rendered

    def _render(self, policy_file: Path) -> tuple[Topology, dict[str, str]]:
        written = topology.write(
            load_policy(policy_file.read_text()),
            self.topology,
            tier_paths={FILE_TIER: str(self.tier)},
            run_directory=str(self.run_directory),
            http=HttpEndpoint(port=0),
        )
        inherited = {name: os.environ[name] for name in ("PYTHONPATH", "VLLM_PLUGINS") if name in os.environ}
        attach = environment(written.topology.structural, str(self.topology), str(self.payload), inherited)
        return written.topology, attach

    def start_server(self) -> EngineServer:
        """Starts the API server, attached by exactly the rendered environment. Returns before it is ready."""
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
        """Starts an engine without KVTier, in process. Returns before it is ready."""
        variables = engine_environment(self.installation, {}, self.payload, self.scratch)
        options = {"model": str(self.model), **self.installation.options()}
        engine = DrivenEngine(self.installation.python, options, variables, self.root / "logs" / "reference.log")
        self._processes.append(engine)
        return engine

    def kill_everything(self) -> None:
        """SIGKILL to every engine process and to the daemon, and the memory-backed directory goes, as when a container dies."""
        for process in self._processes:
            process.kill()
        self._processes.clear()
        kill_tierd(self.topology)
        shutil.rmtree(self.run_directory, ignore_errors=True)

    def _status(self) -> dict[str, Any]:
        """What the daemon says about itself; empty while it does not answer."""
        try:
            address = json.loads((self.run_directory / "http.json").read_text())
            status, text = http_request(address["port"], "GET", "/status", timeout_seconds=5, host=address["host"])
            document: dict[str, Any] = json.loads(text) if status == 200 else {}
        except (OSError, ValueError, KeyError):
            return {}
        return document

    def attached(self) -> bool:
        """Whether the engine's two sides share an open namespace and every tier knows what it holds."""
        status = self._status()
        roles = {session["role"] for session in status.get("sessions", ()) if session["ready"]}
        states = {tier["state"] for tier in status.get("tiers", ())}
        return roles == {"scheduler", "worker"} and states == {"Healthy"}

    def file_tier(self) -> TierState | None:
        """What the daemon says about its file tier; None while it does not answer."""
        for tier in self._status().get("tiers", ()):
            if tier["name"] == FILE_TIER:
                return TierState(int(tier["objects"]), int(tier["pendingStoreBytes"]))
        return None

    def files(self) -> list[Path]:
        """The objects in the file tier."""
        return sorted(self.tier.rglob("*.kv"))

    def close(self) -> None:
        """Ends everything and removes what is temporary. May be called twice."""
        try:
            self.kill_everything()
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)
            shutil.rmtree(self.run_directory, ignore_errors=True)


def _memory_backed() -> str | None:
    shared = Path("/dev/shm")  # noqa: S108
    return str(shared) if os.access(shared, os.W_OK) else None


def policy_file() -> Path:
    """The example policy of the checkout. Raises ``DemoError`` where the package stands alone."""
    path = Path(__file__).parents[3] / "examples" / "demo-policy.yaml"
    if not path.exists():
        raise DemoError(f"{path} is missing: the demo needs a checkout of the project")
    return path
