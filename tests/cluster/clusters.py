"""Finding a real Kubernetes API server for tests, or starting one.

In this order: the cluster of ``KVTIER_TEST_KUBECONFIG``; a throw-away kind cluster where Docker runs; a control plane
from the binaries in ``KUBEBUILDER_ASSETS``; one from binaries that lie beside the checkout; one built from source where
Go is installed. A cluster that nobody named is never touched: ``KUBECONFIG`` and ``~/.kube/config`` are not looked at.
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
import time
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that tests may write to. ``own``: it was made for them and goes with them."""

    kubeconfig: Path
    context: str
    own: bool
    origin: str


class NoClusterError(Exception):
    """There is none, and why: tests are skipped."""


class ClusterBrokenError(Exception):
    """There should be one, and it did not start: tests fail."""


@contextlib.contextmanager
def cluster(home: Path) -> Iterator[Cluster]:
    """A cluster for as long as the block runs; ``home`` is an empty directory for its files. Raises
    ``NoClusterError`` and ``ClusterBrokenError``.
    """
    tried: list[str] = []
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
    with _control_plane(home, assets, origin) as started:
        yield started


def _named(tried: list[str]) -> Cluster | None:
    path, context = os.environ.get(KUBECONFIG_VARIABLE), os.environ.get(CONTEXT_VARIABLE)
    if not path:
        tried.append(f"{KUBECONFIG_VARIABLE} is not set")
        return None
    if not context:
        raise NoClusterError(
            f"{KUBECONFIG_VARIABLE} is set, but {CONTEXT_VARIABLE} does not say which context tests may use"
        )
    return Cluster(Path(path), context, own=False, origin=KUBECONFIG_VARIABLE)


def _kind_runs(tried: list[str]) -> bool:
    if not shutil.which("kind") or not shutil.which("docker"):
        tried.append("kind or docker is not installed")
        return False
    try:
        answers = subprocess.run(["docker", "version"], capture_output=True, timeout=20, check=False).returncode == 0
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
        subprocess.run(["kind", "create", "cluster", *options, "--wait", "120s"], check=True, timeout=KIND_SECONDS)
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
        done = subprocess.run([str(unpack)], capture_output=True, text=True, timeout=START_SECONDS, check=False)
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
            environment = {**os.environ, "PATH": f"{go.parent}:{os.environ.get('PATH', '')}", "GOTOOLCHAIN": "local"}
            print(f"building Kubernetes for tests into {target}; about 8 minutes, once", file=sys.stderr)
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
def _control_plane(home: Path, assets: Path, origin: str) -> Iterator[Cluster]:
    command = [sys.executable, str(STARTER), str(home), "--assets", str(assets), "--wait-seconds", str(START_SECONDS)]
    for part, binary in (("controllers", "kube-controller-manager"), ("scheduler", "kube-scheduler")):
        command += (
            ["--without", part] if os.environ.get("KVTIER_TEST_FULL") != "1" or not (assets / binary).exists() else []
        )
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _await_ready(process)
        yield Cluster(home / "kubeconfig", "test", own=True, origin=origin)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
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
                raise ClusterBrokenError(f"the control plane did not start: {process.stderr.read().strip()}")
    raise ClusterBrokenError(f"the control plane was not ready in {START_SECONDS} s")
