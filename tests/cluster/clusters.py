"""Finding a real Kubernetes API server for tests, or starting one.

In this order: the cluster of ``KVTIER_TEST_KUBECONFIG``; a throw-away kind cluster where Docker
runs; a control plane from the binaries in ``KUBEBUILDER_ASSETS``; one from binaries that lie beside
the checkout; one built from source where Go is installed. Tests never use a cluster that was
not named for them: ``KUBECONFIG`` and ``~/.kube/config`` are ignored.

``cluster(home)`` needs an API server only; with ``Parts.CONTROLLERS`` Deployments become pods and
the scheduler binds them, and with ``Parts.NODE`` pods run: that node is this machine, because tests
look at its cgroups, mounts and processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

KUBECONFIG_VARIABLE = "KVTIER_TEST_KUBECONFIG"
CONTEXT_VARIABLE = "KVTIER_TEST_CONTEXT"
HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
STARTER = HERE / "kubernetes" / "start"
SOURCE = HERE / "kubernetes" / "source"
START_SECONDS = 180
KIND_SECONDS = 600
BUILD_SECONDS = 3600
GO_PLACES = ("/usr/local/go/bin/go",)
"""Where Go's own installer puts it; often not on PATH."""
CONTROL_PLANE = ("etcd", "kube-apiserver")
CONTROLLERS = ("kube-controller-manager", "kube-scheduler")
NODE = ("kubelet", "kubectl", "pause")
NODE_TOOLS = ("containerd", "ctr", "runc", "iptables", "ip", "openssl")
CNI_PLUGIN = Path("/usr/lib/cni/bridge")
NODE_LOCK = Path(tempfile.gettempdir()) / "kvtier-node.lock"
NODE_LINK = Path("/sys/class/net/kvt0")
"""The bridge that ``start --node`` creates. A machine has one node at a time."""
NODE_WAIT_SECONDS = 1_200


class Parts(Enum):
    """What a test needs: the API server, controllers and a scheduler, or also a node."""

    API = 0
    CONTROLLERS = 1
    NODE = 2


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that tests may write to. ``own``: it was created for the tests and is removed with
    them. ``home`` and ``assets``: its files and the binaries, if the starter created it.
    """

    kubeconfig: Path
    context: str
    own: bool
    origin: str
    home: Path | None = None
    assets: Path | None = None

    def kubectl(
        self, *arguments: str, check: bool = True, stdin: str | None = None, seconds: float = 60
    ) -> str:
        """Standard output of kubectl. With ``check``, a failure raises its output."""
        program = str(self.assets / "kubectl") if self.assets else shutil.which("kubectl")
        if program is None:
            raise ClusterBrokenError("kubectl is not installed")
        command = [
            program,
            f"--kubeconfig={self.kubeconfig}",
            f"--context={self.context}",
            *arguments,
        ]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=seconds, check=False
        )
        if check and done.returncode:
            raise ClusterBrokenError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def ctr(self, *arguments: str, check: bool = True, seconds: float = 120) -> str:
        """Standard output of containerd's command on the node (``Parts.NODE`` only)."""
        if self.home is None:
            raise ClusterBrokenError("this cluster has no containerd of ours")
        command = ["ctr", "-a", str(self.home / "containerd.sock"), "-n", "k8s.io", *arguments]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env=_with_system_path(),
        )
        if check and done.returncode:
            raise ClusterBrokenError(f"ctr {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def load(self, archive: Path) -> None:
        """Loads an archive of ``kubernetes/image`` on the node; use ``imagePullPolicy: Never``."""
        self.ctr("images", "import", str(archive), seconds=300)


class NoClusterError(Exception):
    """There is none, and why: tests are skipped."""


class ClusterBrokenError(Exception):
    """There should be one, and it did not start: tests fail."""


@contextlib.contextmanager
def cluster(home: Path, parts: Parts | None = None) -> Iterator[Cluster]:
    """A cluster for as long as the block runs; ``home`` is an empty directory for its files. Raises
    ``NoClusterError`` and ``ClusterBrokenError``. Without ``parts``: the API server only, unless
    ``KVTIER_TEST_FULL=1``.
    """
    if parts is None:
        parts = Parts.CONTROLLERS if os.environ.get("KVTIER_TEST_FULL") == "1" else Parts.API
    tried: list[str] = []
    if parts is Parts.NODE:
        _check_node_tools()
    else:
        named = _named(tried)
        if named is not None:
            yield named
            return
        if _kind_runs(tried):
            with _kind(home) as made:
                yield made
            return
    assets, origin = _assets(tried)
    if assets is None:
        raise NoClusterError("no Kubernetes for tests: " + "; ".join(tried))
    _check_binaries(assets, parts)
    with contextlib.ExitStack() as held:
        if parts is Parts.NODE:
            held.enter_context(_only_node())
        yield held.enter_context(_started(home, assets, origin, parts))


def _check_node_tools() -> None:
    if os.geteuid() != 0:
        raise NoClusterError("no node for tests: it needs root")
    path = _with_system_path()["PATH"]
    missing = [tool for tool in NODE_TOOLS if shutil.which(tool, path=path) is None]
    if not CNI_PLUGIN.exists():
        missing.append(str(CNI_PLUGIN))
    if missing:
        raise NoClusterError(
            f"no node for tests: missing {', '.join(missing)} (tools/debian-packages installs them)"
        )


def _check_binaries(assets: Path, parts: Parts) -> None:
    wanted = (
        ()
        if parts is Parts.API
        else CONTROLLERS
        if parts is Parts.CONTROLLERS
        else CONTROLLERS + NODE
    )
    missing = [name for name in wanted if not (assets / name).is_file()]
    if missing:
        raise NoClusterError(f"no Kubernetes for tests: {assets} lacks {', '.join(missing)}")


def _with_system_path() -> dict[str, str]:
    """The environment with the directories of runc and iptables, which are not on every PATH."""
    return {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}


@contextlib.contextmanager
def _only_node() -> Iterator[None]:
    """Held while this machine is a node: bridge and addresses have fixed names."""
    deadline = time.monotonic() + NODE_WAIT_SECONDS
    with NODE_LOCK.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ClusterBrokenError(
                        f"{NODE_LOCK} was held for {NODE_WAIT_SECONDS} s"
                    ) from None
                time.sleep(1)
        while NODE_LINK.exists():
            if time.monotonic() > deadline:
                raise ClusterBrokenError(
                    f"{NODE_LINK.name} is there: another node runs, or one ended without cleaning"
                )
            time.sleep(1)
        yield


def _named(tried: list[str]) -> Cluster | None:
    path, context = os.environ.get(KUBECONFIG_VARIABLE), os.environ.get(CONTEXT_VARIABLE)
    if not path:
        tried.append(f"{KUBECONFIG_VARIABLE} is not set")
        return None
    if not context:
        raise NoClusterError(
            f"{KUBECONFIG_VARIABLE} is set, but "
            f"{CONTEXT_VARIABLE} does not say which context tests may use"
        )
    return Cluster(Path(path), context, own=False, origin=KUBECONFIG_VARIABLE)


def _kind_runs(tried: list[str]) -> bool:
    if not shutil.which("kind") or not shutil.which("docker"):
        tried.append("kind or docker is not installed")
        return False
    try:
        answers = (
            subprocess.run(
                ["docker", "version"], capture_output=True, timeout=20, check=False
            ).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        answers = False
    if not answers:
        tried.append("docker does not answer")
    return answers


@contextlib.contextmanager
def _kind(home: Path) -> Iterator[Cluster]:
    name, config = f"kvtier-test-{secrets.token_hex(4)}", home / "kubeconfig"
    options = ["--name", name, "--kubeconfig", str(config)]
    try:
        subprocess.run(
            ["kind", "create", "cluster", *options, "--wait", "120s"],
            check=True,
            timeout=KIND_SECONDS,
        )
        yield Cluster(config, f"kind-{name}", own=True, origin="kind")
    finally:
        subprocess.run(["kind", "delete", "cluster", *options], check=False, timeout=KIND_SECONDS)


def _assets(tried: list[str]) -> tuple[Path | None, str]:
    given = os.environ.get("KUBEBUILDER_ASSETS")
    if given:
        if _complete(Path(given)):
            return Path(given), "KUBEBUILDER_ASSETS"
        tried.append(f"KUBEBUILDER_ASSETS={given} lacks one of {', '.join(CONTROL_PLANE)}")
    else:
        tried.append("KUBEBUILDER_ASSETS is not set")
    unpack = REPOSITORY.parent / "shared" / "k8s" / "assets"
    if unpack.is_file():
        done = subprocess.run(
            [str(unpack)], capture_output=True, text=True, timeout=START_SECONDS, check=False
        )
        if done.returncode == 0 and _complete(Path(done.stdout.strip())):
            return Path(done.stdout.strip()), "binaries beside the checkout"
        tried.append(f"binaries beside the checkout: {done.stderr.strip()}")
    go = shutil.which("go") or next((place for place in GO_PLACES if Path(place).exists()), None)
    if go is None:
        tried.append("Go, to build one from source, is not installed")
        return None, ""
    try:
        return _build(Path(go)), "built from source"
    except (OSError, subprocess.SubprocessError) as error:
        tried.append(f"building one from source failed: {error}")
        return None, ""


def _complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in CONTROL_PLANE)


def _build(go: Path) -> Path:
    """The binaries, built once per machine and state of the source; minutes the first time."""
    content = b"".join(path.read_bytes() for path in sorted(SOURCE.rglob("*")) if path.is_file())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"
    target = cache / f"kubernetes-{hashlib.sha256(content).hexdigest()[:12]}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "kubernetes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _complete(target):
            staging = target.with_suffix(".building")
            shutil.rmtree(staging, ignore_errors=True)
            environment = {
                **os.environ,
                "PATH": f"{go.parent}:{os.environ.get('PATH', '')}",
                "GOTOOLCHAIN": "local",
            }
            print(
                f"building Kubernetes for tests into {target}; about 8 minutes, once",
                file=sys.stderr,
            )
            subprocess.run(
                ["nice", str(SOURCE / "build"), str(staging)],
                env=environment,
                check=True,
                timeout=BUILD_SECONDS,
                capture_output=True,
            )
            staging.rename(target)
    return target


@contextlib.contextmanager
def _started(home: Path, assets: Path, origin: str, parts: Parts) -> Iterator[Cluster]:
    command = [
        sys.executable,
        str(STARTER),
        str(home),
        "--assets",
        str(assets),
        "--wait-seconds",
        str(START_SECONDS),
    ]
    if parts is Parts.API:
        command += ["--without", "controllers", "--without", "scheduler"]
    if parts is Parts.NODE:
        command.append("--node")
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=_with_system_path(),
    )
    try:
        _await_ready(process)
        yield Cluster(
            home / "kubeconfig", "test", own=True, origin=origin, home=home, assets=assets
        )
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(120 if parts is Parts.NODE else 30)
        except subprocess.TimeoutExpired:
            # The session is this starter's own: etcd and API server are in it and nothing else.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def _await_ready(process: subprocess.Popen[str]) -> None:
    if process.stdout is None or process.stderr is None:
        raise ClusterBrokenError("the starter has no output")
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        readable, _, _ = select.select([process.stdout], [], [], 1.0)
        if readable:
            line = process.stdout.readline()
            if line.startswith("ready "):
                return
            if not line:
                raise ClusterBrokenError(
                    f"the control plane did not start: {process.stderr.read().strip()}"
                )
    raise ClusterBrokenError(f"the control plane was not ready in {START_SECONDS} s")
