"""A FUSE mount that passes calls through to a directory and injects the faults of a control file.

    python -m kvtier.scorecard.mount SOURCE MOUNTPOINT CONTROL [others]

With ``others``, users other than root may use it, and own what they create, as on a disk.

``CONTROL`` is JSON and is read before every call; without it there are no faults. It maps names of
calls (``open``, ``create``, ``read``, ``write``, ``getattr``, ``readdir``, ``rename``, ``unlink``,
``mkdir``, ``fsync``, ``flush`` (a file is closed), ``statfs``, ``utimens``, ``truncate``; ``*`` is
all of them) to any of

* ``errno``: a name such as ``EIO``; the call fails with it;
* ``delay_seconds``: the call takes that much longer;
* ``hang``: the call waits until the file says otherwise. The kernel has handed the call over, so
  not even SIGKILL ends the thread that made it.
* ``half`` (read): the file seems to end after the first half of the requested bytes;
* ``flip`` (read): "header" or "payload": one bit of the first 4 KiB, or of the rest, is inverted.

Several threads serve the calls, so a hanging call blocks no other.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtier.files import replace_file

HEADER_BYTES = 4096
POLL_SECONDS = 0.05
WAIT_SECONDS = 20.0
Control = dict[str, dict[str, Any]]


class ControlFile:
    """The current content of the control file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._content: Control = {}

    def of(self, call: str) -> dict[str, Any]:
        """The faults of a call."""
        with self._lock:
            try:
                found = self._path.stat()
                seen = (found.st_ino, found.st_mtime_ns)
                if seen != self._seen:
                    self._content, self._seen = json.loads(self._path.read_text()), seen
            except FileNotFoundError:
                self._content, self._seen = {}, None
            return self._content.get(call) or self._content.get("*") or {}


def _held(control: Path, call: str) -> Path:
    """The file whose existence says that a call of this name hangs."""
    return control.with_name(f"{control.name}.held-{call}")


def main(source: str, mountpoint: str, control: str, others: str = "") -> int:
    """Serves the mount until it is unmounted."""
    import mfusepy  # type: ignore[import-untyped]

    control_file = ControlFile(Path(control))

    def give_to_caller(made: str) -> None:
        if others:
            user, group, _ = mfusepy.fuse_get_context()
            above = os.stat(os.path.dirname(made))
            os.chown(made, user, above.st_gid if above.st_mode & stat.S_ISGID else group)

    def inject(call: str) -> dict[str, Any]:
        faults = control_file.of(call)
        if faults.get("hang"):
            _held(Path(control), call).touch()
        while faults.get("hang"):
            time.sleep(POLL_SECONDS)
            faults = control_file.of(call)
        time.sleep(float(faults.get("delay_seconds", 0)))
        if "errno" in faults:
            raise mfusepy.FuseOSError(getattr(errno, faults["errno"]))
        return faults

    class PassThrough(mfusepy.Operations):  # type: ignore[misc]
        """Each call on the same path below ``source``."""

        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            inject("getattr")
            found = os.lstat(source + path)
            names = ("st_mode", "st_nlink", "st_size", "st_blocks", "st_uid", "st_gid", "st_ino")
            times = {
                f"st_{each}": getattr(found, f"st_{each}_ns")
                for each in ("atime", "mtime", "ctime")
            }
            return {name: getattr(found, name) for name in names} | times

        def readdir(self, path: str, fh: int) -> list[str]:
            inject("readdir")
            return [".", "..", *os.listdir(source + path)]

        def access(self, path: str, mode: int) -> int:
            if not os.access(source + path, mode):
                raise mfusepy.FuseOSError(errno.EACCES)
            return 0

        def open(self, path: str, flags: int) -> int:
            inject("open")
            # Direct I/O above the mount does not require direct I/O below it.
            return os.open(source + path, flags & ~os.O_DIRECT)

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            inject("create")
            handle = os.open(source + path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
            os.fchmod(handle, stat.S_IMODE(mode))  # the caller's own mask has been applied
            give_to_caller(source + path)
            return handle

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            faults = inject("read")
            data = os.pread(fh, size, offset)
            if faults.get("half"):
                whole = os.fstat(fh).st_size
                return data[: max(0, whole // 2 - offset)]
            if data and faults.get("flip"):
                place = 8 if faults["flip"] == "header" else HEADER_BYTES + 5
                if offset <= place < offset + len(data):
                    changed = bytearray(data)
                    changed[place - offset] ^= 4
                    return bytes(changed)
            return data

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            inject("write")
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            inject("truncate")
            os.truncate(source + path, length)
            return 0

        def flush(self, path: str, fh: int) -> int:
            inject("flush")
            return 0

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            inject("fsync")
            os.fsync(fh)
            return 0

        def mkdir(self, path: str, mode: int) -> int:
            inject("mkdir")
            os.mkdir(source + path, mode)
            inherited = os.stat(source + path).st_mode & stat.S_ISGID
            give_to_caller(source + path)
            os.chmod(source + path, stat.S_IMODE(mode) | inherited)
            return 0

        def rmdir(self, path: str) -> int:
            inject("unlink")
            os.rmdir(source + path)
            return 0

        def unlink(self, path: str) -> int:
            inject("unlink")
            os.unlink(source + path)
            return 0

        def rename(self, old: str, new: str) -> int:
            inject("rename")
            os.rename(source + old, source + new)
            return 0

        def link(self, target: str, source_path: str) -> int:
            inject("rename")
            os.link(source + source_path, source + target)
            return 0

        def chmod(self, path: str, mode: int) -> int:
            os.chmod(source + path, mode)
            return 0

        def chown(self, path: str, uid: int, gid: int) -> int:
            os.chown(source + path, uid, gid)
            return 0

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            inject("utimens")
            if times is None:
                os.utime(source + path)
            else:
                os.utime(source + path, ns=times)
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            inject("statfs")
            found = os.statvfs(source + path)
            return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}

    def end_with_owner() -> None:
        # The owner holds the other end and never writes: end of file means that it has exited.
        # Hanging calls fail when the connection to the kernel is closed.
        while os.read(0, 64):
            continue
        subprocess.run(["umount", "-l", mountpoint], check=False, capture_output=True)
        os._exit(0)

    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=end_with_owner, daemon=True).start()
    options = {
        "foreground": True,
        "nothreads": False,
        "fsname": "kvtier-faults",
        "default_permissions": True,
    }
    if others:
        options["allow_other"] = True
    # No page cache: a fault must affect the next call.
    mfusepy.FUSE(
        PassThrough(), mountpoint, direct_io=True, attr_timeout=0, entry_timeout=0, **options
    )
    return 0


class FaultyMount:
    """The mount, in its own process. ``source`` and ``path`` must exist. ``close`` releases hanging
    calls and unmounts; so does the end of the owning process, however it ends.

    Raises ``OSError`` if no mount can be made: no /dev/fuse, no mfusepy, no permission.
    """

    def __init__(
        self, source: Path, path: Path, control: Path, log: Path, others: bool = False
    ) -> None:
        self.source, self.path, self._control = source, path, control
        reason = unavailable()
        if reason:
            raise OSError(errno.ENODEV, reason)
        command = [
            sys.executable,
            "-m",
            "kvtier.scorecard.mount",
            *map(str, (source, path, control)),
        ]
        command += ["others"] * others
        package = str(Path(__file__).resolve().parents[3])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]),
        }
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + WAIT_SECONDS
        while not os.path.ismount(path):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise OSError(
                    errno.ENODEV,
                    log.read_text(errors="replace").strip()[-300:] or "the mount is not ready",
                )
            time.sleep(POLL_SECONDS)

    def set(self, **faults: dict[str, Any]) -> None:
        """Replaces the faults; ``every`` stands for all calls."""
        for held in self._control.parent.glob(_held(self._control, "*").name):
            held.unlink()
        content = {("*" if name == "every" else name): value for name, value in faults.items()}
        replace_file(self._control, json.dumps(content).encode())

    def hang(self, *calls: str) -> None:
        """Makes these calls hang from now on; without names, every call."""
        self.set(**{name: {"hang": True} for name in calls or ("every",)})

    def holds(self, call: str) -> bool:
        """Whether a call of this name hangs, or has hung since the faults were last set."""
        return _held(self._control, call).exists()

    def release(self) -> None:
        """Removes all faults; hanging calls resume."""
        self.set()

    def close(self) -> None:
        """Releases hanging calls, unmounts and ends the process."""
        self.set()
        time.sleep(2 * POLL_SECONDS)
        subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(WAIT_SECONDS / 4)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(WAIT_SECONDS)
        if self._process.stdin is not None:
            self._process.stdin.close()


def unavailable() -> str:
    """Why no such mount can be made here, and what to install; empty if it can."""
    try:
        import mfusepy  # noqa: F401
    except ImportError:
        return "the Python package mfusepy is not installed; run: pip install mfusepy"
    except OSError:
        return (
            "the library libfuse is not installed; install the package libfuse3-3 or libfuse3-4 "
            "(Debian, Ubuntu) or fuse3-libs (Fedora, RHEL)"
        )
    if not Path("/dev/fuse").exists():
        return "/dev/fuse does not exist; load the kernel module fuse, or add the device"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is not accessible to this user"
    return ""


@contextlib.contextmanager
def faulty_mount(directory: Path, others: bool = False) -> Iterator[FaultyMount]:
    """A mount ``directory/mount`` over ``directory/below`` during the block.

    Raises ``OSError``.
    """
    source, path = directory / "below", directory / "mount"
    source.mkdir(parents=True)
    path.mkdir()
    mount = FaultyMount(source, path, directory / "faults.json", directory / "mount.log", others)
    try:
        yield mount
    finally:
        mount.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:5]))
