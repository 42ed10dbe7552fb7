"""A directory as a FUSE file system that can hang: every call then waits until it thaws, as on a frozen disk or a dead server.

Calls that the file system's process has already taken cannot be ended by SIGKILL, which is the case that matters: the kernel waits for
their answer. As a program (`hanging_mount.py BACKING MOUNT CONTROL`) it serves until it is unmounted; while the file CONTROL
exists it hangs.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOOK_SECONDS = 0.02
MOUNT_SECONDS = 20


class HangingMount:
    """One such file system over ``backing``, for as long as the ``with`` block of ``mounted`` runs."""

    def __init__(self, mount: Path, control: Path) -> None:
        self.path, self._control = mount, control

    def hang(self) -> None:
        """From now on every call waits."""
        self._control.touch()

    def thaw(self) -> None:
        """Calls go on, those that waited too."""
        self._control.unlink(missing_ok=True)


@contextlib.contextmanager
def mounted(home: Path) -> Iterator[HangingMount]:
    """The file system at ``home/mount``. Needs root, FUSE and mfusepy. Whatever happened, nothing of it is left."""
    backing, mount, control = home / "backing", home / "mount", home / "hang"
    for each in (backing, mount):
        each.mkdir(parents=True)
    found = HangingMount(mount, control)
    log = (home / "log").open("w")
    process = subprocess.Popen(
        [sys.executable, __file__, str(backing), str(mount), str(control)], stdout=log, stderr=log
    )
    try:
        deadline = time.monotonic() + MOUNT_SECONDS
        while not os.path.ismount(mount):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no FUSE file system: {(home / 'log').read_text()[-2000:]}")
            time.sleep(0.05)
        yield found
    finally:
        found.thaw()
        subprocess.run(["fusermount3", "-u", "-z", str(mount)], capture_output=True, check=False)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            # The kernel ends every call that still waits when the file system's process is gone.
            process.kill()
            process.wait(10)
        log.close()


def available() -> str:
    """Empty where such a file system can be had here, else what is missing."""
    try:
        import mfusepy  # noqa: F401
    except (ImportError, OSError) as error:
        return f"mfusepy: {error}"
    return "" if Path("/dev/fuse").exists() else "/dev/fuse is missing"


def serve(backing: str, mount: str, control: Path) -> None:
    """Serves until unmounted."""
    import mfusepy

    def place(path: str) -> str:
        """Where it lies, once the file system does not hang: every call comes through here."""
        while control.exists():
            time.sleep(LOOK_SECONDS)
        return backing + path

    def give_to_caller(path: str) -> None:
        user, group, _ = mfusepy.fuse_get_context()
        parent = os.stat(os.path.dirname(path))
        os.chown(path, user, parent.st_gid if parent.st_mode & 0o2000 else group)

    class Passing(mfusepy.Operations):
        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            path = place(path)
            found = os.lstat(path)
            names = "st_mode st_nlink st_size st_uid st_gid st_blocks st_ino".split()  # noqa: SIM905
            return {name: getattr(found, name) for name in names} | {
                name: getattr(found, f"{name}_ns") for name in ("st_atime", "st_mtime", "st_ctime")
            }

        def readdir(self, path: str, fh: int) -> list[str]:
            path = place(path)
            return [".", "..", *os.listdir(path)]

        def open(self, path: str, flags: int) -> int:
            path = place(path)
            return os.open(path, flags & ~os.O_DIRECT)

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            path = place(path)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
            os.fchmod(handle, mode)
            give_to_caller(path)
            return handle

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            path = place(path)
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            path = place(path)
            return os.pwrite(fh, data, offset)

        def flush(self, path: str, fh: int) -> int:
            path = place(path)
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            path = place(path)
            return 0

        def release(self, path: str, fh: int) -> int:
            path = place(path)
            os.close(fh)
            return 0

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            path = place(path)
            os.truncate(path, length)
            return 0

        def mkdir(self, path: str, mode: int) -> int:
            path = place(path)
            os.mkdir(path, mode)
            inherited = os.stat(os.path.dirname(path)).st_mode & 0o2000
            give_to_caller(path)
            os.chmod(path, (mode & 0o7777) | inherited)
            return 0

        def rmdir(self, path: str) -> int:
            path = place(path)
            os.rmdir(path)
            return 0

        def unlink(self, path: str) -> int:
            path = place(path)
            os.unlink(path)
            return 0

        def rename(self, old: str, new: str) -> int:
            os.rename(place(old), place(new))
            return 0

        def link(self, target: str, source: str) -> int:
            os.link(place(source), place(target))
            return 0

        def chmod(self, path: str, mode: int) -> int:
            path = place(path)
            os.chmod(path, mode)
            return 0

        def chown(self, path: str, uid: int, gid: int) -> int:
            path = place(path)
            os.chown(path, uid, gid)
            return 0

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            path = place(path)
            os.utime(path, ns=times)
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            path = place(path)
            found = os.statvfs(path)
            names = "f_bavail f_bfree f_blocks f_bsize f_favail f_ffree f_files f_flag f_frsize f_namemax".split()  # noqa: SIM905
            return {name: getattr(found, name) for name in names}

    mfusepy.FUSE(Passing(), mount, foreground=True, nothreads=False, allow_other=True, default_permissions=True)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
