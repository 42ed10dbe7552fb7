"""A FUSE mount that passes everything on to a directory, and does wrong what a control file says.

    python -m kvtier.scorecard.mount SOURCE MOUNTPOINT CONTROL [others]

With ``others``, other users than root may use it, and what they make is theirs, as on a disk.

``CONTROL`` is JSON and looked at before every call; it may be absent (no faults). It maps names of calls (``open``, ``create``, ``read``, ``write``,
``getattr``, ``readdir``, ``rename``, ``unlink``, ``mkdir``, ``fsync``, ``flush`` (a file is closed), ``statfs``, ``utimens``, ``truncate``; ``*`` is all of
these) to any of

* ``errno``: a name such as ``EIO``; the call fails with it;
* ``delay_seconds``: the call takes that much longer;
* ``hang``: the call waits until the file says otherwise. The kernel has handed it over by then: not even SIGKILL ends the thread that made it.
* ``half`` (read): only the first half of what was asked for is there, and then the file ends;
* ``flip`` (read): "header" or "payload": one bit of the first 4 KiB, or of what follows, comes back inverted.

Calls are served by several threads, so one that hangs holds up no other.
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

HEADER_BYTES = 4096
LOOK_SECONDS = 0.05
WAIT_SECONDS = 20.0
Control = dict[str, dict[str, Any]]


class ControlFile:
    """What the file says at this moment. May be used by any thread."""

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
    """The file that says that such a call is held."""
    return control.with_name(f"{control.name}.held-{call}")


def main(source: str, mountpoint: str, control: str, others: str = "") -> int:
    """Serves the mount until it is unmounted."""
    import mfusepy  # type: ignore[import-untyped]

    told = ControlFile(Path(control))

    def give_to_caller(made: str) -> None:
        if others:
            user, group, _ = mfusepy.fuse_get_context()
            above = os.stat(os.path.dirname(made))
            os.chown(made, user, above.st_gid if above.st_mode & stat.S_ISGID else group)

    def strike(call: str) -> dict[str, Any]:
        faults = told.of(call)
        if faults.get("hang"):
            _held(Path(control), call).touch()
        while faults.get("hang"):
            time.sleep(LOOK_SECONDS)
            faults = told.of(call)
        time.sleep(float(faults.get("delay_seconds", 0)))
        if "errno" in faults:
            raise mfusepy.FuseOSError(getattr(errno, faults["errno"]))
        return faults

    class PassThrough(mfusepy.Operations):  # type: ignore[misc]
        """Each call on the same path below ``source``."""

        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            strike("getattr")
            found = os.lstat(source + path)
            names = ("st_mode", "st_nlink", "st_size", "st_blocks", "st_uid", "st_gid", "st_ino")
            times = {
                f"st_{each}": getattr(found, f"st_{each}_ns")
                for each in ("atime", "mtime", "ctime")
            }
            return {name: getattr(found, name) for name in names} | times

        def readdir(self, path: str, fh: int) -> list[str]:
            strike("readdir")
            return [".", "..", *os.listdir(source + path)]

        def access(self, path: str, mode: int) -> int:
            if not os.access(source + path, mode):
                raise mfusepy.FuseOSError(errno.EACCES)
            return 0

        def open(self, path: str, flags: int) -> int:
            strike("open")
            # What is direct above the mount need not be below it.
            return os.open(source + path, flags & ~os.O_DIRECT)

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            strike("create")
            handle = os.open(source + path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
            os.fchmod(handle, stat.S_IMODE(mode))  # the caller's own mask has been applied
            give_to_caller(source + path)
            return handle

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            faults = strike("read")
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
            strike("write")
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            strike("truncate")
            os.truncate(source + path, length)
            return 0

        def flush(self, path: str, fh: int) -> int:
            strike("flush")
            return 0

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            strike("fsync")
            os.fsync(fh)
            return 0

        def mkdir(self, path: str, mode: int) -> int:
            strike("mkdir")
            os.mkdir(source + path, mode)
            inherited = os.stat(source + path).st_mode & stat.S_ISGID
            give_to_caller(source + path)
            os.chmod(source + path, stat.S_IMODE(mode) | inherited)
            return 0

        def rmdir(self, path: str) -> int:
            strike("unlink")
            os.rmdir(source + path)
            return 0

        def unlink(self, path: str) -> int:
            strike("unlink")
            os.unlink(source + path)
            return 0

        def rename(self, old: str, new: str) -> int:
            strike("rename")
            os.rename(source + old, source + new)
            return 0

        def link(self, target: str, source_path: str) -> int:
            strike("rename")
            os.link(source + source_path, source + target)
            return 0

        def chmod(self, path: str, mode: int) -> int:
            os.chmod(source + path, mode)
            return 0

        def chown(self, path: str, uid: int, gid: int) -> int:
            os.chown(source + path, uid, gid)
            return 0

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            strike("utimens")
            if times is None:
                os.utime(source + path)
            else:
                os.utime(source + path, ns=times)
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            strike("statfs")
            found = os.statvfs(source + path)
            return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}

    def end_with_owner() -> None:
        # The owner holds the other end and writes nothing: it is gone, however it ended. What hangs fails when the kernel's connection goes.
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
    # Nothing may come from the page cache: a fault is about the next call.
    mfusepy.FUSE(
        PassThrough(), mountpoint, direct_io=True, attr_timeout=0, entry_timeout=0, **options
    )
    return 0


class FaultyMount:
    """The mount in a process of its own. ``source`` and ``path`` exist; ``close`` lets everything go and unmounts, and so does the end of the process
    that made it, however that ends.

    Raises ``OSError`` where none can be made: no /dev/fuse, no mfusepy, no rights.
    """

    def __init__(
        self, source: Path, path: Path, control: Path, log: Path, others: bool = False
    ) -> None:
        self.source, self.path, self._control = source, path, control
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
                    log.read_text(errors="replace").strip()[-300:] or "no mount came up",
                )
            time.sleep(LOOK_SECONDS)

    def set(self, **faults: dict[str, Any]) -> None:
        """Replaces what the mount does wrong; ``every`` stands for all calls."""
        for held in self._control.parent.glob(_held(self._control, "*").name):
            held.unlink()
        content = {("*" if name == "every" else name): value for name, value in faults.items()}
        fresh = self._control.with_suffix(".new")
        fresh.write_text(json.dumps(content))
        fresh.replace(self._control)

    def hang(self, *calls: str) -> None:
        """From now on these calls wait, without names every call."""
        self.set(**{name: {"hang": True} for name in calls or ("every",)})

    def holds(self, call: str) -> bool:
        """Whether a call of this name has reached the mount and hangs, or has hung since faults were last set."""
        return _held(self._control, call).exists()

    def release(self) -> None:
        """Nothing is done wrong any more, and what waits goes on."""
        self.set()

    def close(self) -> None:
        """Lets everything go, unmounts and ends the process."""
        self.set()
        time.sleep(2 * LOOK_SECONDS)
        subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(WAIT_SECONDS / 4)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(WAIT_SECONDS)
        if self._process.stdin is not None:
            self._process.stdin.close()


def unavailable() -> str:
    """What is missing here for such a mount; empty if nothing is."""
    try:
        import mfusepy  # noqa: F401
    except (ImportError, OSError) as error:
        return f"mfusepy: {error}"
    return (
        ""
        if os.access("/dev/fuse", os.R_OK | os.W_OK)
        else "/dev/fuse is missing or not open to this user"
    )


@contextlib.contextmanager
def faulty_mount(directory: Path, others: bool = False) -> Iterator[FaultyMount]:
    """A mount ``directory/mount`` over ``directory/below`` for the time of a block. Raises ``OSError``."""
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
