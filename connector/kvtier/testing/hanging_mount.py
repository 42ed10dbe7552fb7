"""A FUSE mount that passes everything on to a directory, and whose reads and writes do not come back while a file says so.

    python -m kvtier.testing.hanging_mount SOURCE MOUNTPOINT CONTROL

While ``CONTROL`` holds ``read``, ``write`` or both words, such calls wait; they go on when it does not any more. The kernel has handed the
call over by then, so it waits for the answer uninterruptibly: even SIGKILL does not end the thread that made it. A mount of this kind
is as hung as a mount can be.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOOK_SECONDS = 0.05
_WAIT_SECONDS = 20.0


def main(source: str, mountpoint: str, control: str) -> int:
    """Serves the mount until it is unmounted."""
    import mfusepy  # type: ignore[import-untyped]

    def hang(word: str) -> None:
        while True:
            try:
                if word not in Path(control).read_text().split():
                    return
            except FileNotFoundError:
                return
            time.sleep(LOOK_SECONDS)

    class PassThrough(mfusepy.Operations):  # type: ignore[misc]
        """Each call on the same path below ``source``."""

        use_ns = True

        def _at(self, path: str) -> str:
            return source + path

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            found = os.lstat(self._at(path))
            names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino")
            times = {f"st_{each}": getattr(found, f"st_{each}_ns") for each in ("atime", "mtime", "ctime")}
            return {name: getattr(found, name) for name in names} | times

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(self._at(path))]

        def access(self, path: str, mode: int) -> int:
            if not os.access(self._at(path), mode):
                raise mfusepy.FuseOSError(errno.EACCES)
            return 0

        def open(self, path: str, flags: int) -> int:
            # What is direct above the mount need not be below it.
            return os.open(self._at(path), flags & ~os.O_DIRECT)

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            hang("read")
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            hang("write")
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            os.truncate(self._at(path), length)
            return 0

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            os.fsync(fh)
            return 0

        def mkdir(self, path: str, mode: int) -> int:
            os.mkdir(self._at(path), mode)
            return 0

        def rmdir(self, path: str) -> int:
            os.rmdir(self._at(path))
            return 0

        def unlink(self, path: str) -> int:
            os.unlink(self._at(path))
            return 0

        def rename(self, old: str, new: str) -> int:
            os.rename(self._at(old), self._at(new))
            return 0

        def link(self, target: str, source_path: str) -> int:
            os.link(self._at(source_path), self._at(target))
            return 0

        def chmod(self, path: str, mode: int) -> int:
            os.chmod(self._at(path), mode)
            return 0

        def chown(self, path: str, uid: int, gid: int) -> int:
            os.chown(self._at(path), uid, gid)
            return 0

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            if times is None:
                os.utime(self._at(path))
            else:
                os.utime(self._at(path), ns=times)
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            found = os.statvfs(self._at(path))
            return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}

    mfusepy.FUSE(
        PassThrough(), mountpoint, foreground=True, nothreads=False, fsname="hanging", default_permissions=True
    )
    return 0


class HangingMount:
    """The mount in a process of its own. ``hang`` and ``release`` say what waits; ``close`` lets everything go and unmounts."""

    def __init__(self, directory: Path) -> None:
        self.source, self.path, self._control = directory / "below", directory / "mount", directory / "hangs"
        self.source.mkdir(parents=True)
        self.path.mkdir()
        command = [
            sys.executable,
            "-m",
            "kvtier.testing.hanging_mount",
            *map(str, (self.source, self.path, self._control)),
        ]
        package = str(Path(__file__).resolve().parents[2])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}
        with (directory / "mount.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + _WAIT_SECONDS
        while not os.path.ismount(self.path):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise OSError(errno.ENODEV, (directory / "mount.log").read_text(errors="replace")[-500:])
            time.sleep(LOOK_SECONDS)

    def hang(self, *operations: str) -> None:
        """``read`` and ``write`` wait from now on, if they are named."""
        fresh = self._control.with_suffix(".new")
        fresh.write_text(" ".join(operations))
        fresh.replace(self._control)

    def release(self) -> None:
        """Everything that waits goes on."""
        self.hang()

    def close(self) -> None:
        """Lets everything go, unmounts and ends the process."""
        self.release()
        subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_WAIT_SECONDS / 4)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(_WAIT_SECONDS)


@contextlib.contextmanager
def hanging_mount(directory: Path) -> Iterator[HangingMount]:
    """A mount for the time of a block. Raises ``OSError`` where none can be made."""
    mount = HangingMount(directory)
    try:
        yield mount
    finally:
        mount.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
