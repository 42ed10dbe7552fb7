"""Records which functions of KVTier run, for `tools/figures.py --paths`.

Python imports a module of this name at start when its folder is on PYTHONPATH. Without
KVTIER_TRACE it does nothing. The phase is the content of the file `phase` in that folder; each
process writes what it saw in the phase `<name>` to `<name>.<pid>` when the phase ends.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

LOOKUP = "get_num_new_matched_tokens"


class Recorder:
    """Collects code objects by phase. ``call`` runs on every thread; sets only grow, so no lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._phase = ""
        self._seen: set[CodeType] = set()
        self._lookup: set[CodeType] = set()
        self._local = threading.local()

    def call(self, frame: FrameType, event: str, argument: object) -> None:
        """The profile function."""
        code = frame.f_code
        if event == "call":
            if not self._phase or "/kvtier/" not in code.co_filename:
                return
            self._seen.add(code)
            depth = getattr(self._local, "depth", 0)
            if depth or (code.co_name == LOOKUP and code.co_filename.endswith("/connector.py")):
                self._lookup.add(code)
                self._local.depth = depth + 1
        elif (
            event == "return"
            and getattr(self._local, "depth", 0)
            and "/kvtier/" in code.co_filename
        ):
            self._local.depth -= 1

    def follow(self) -> None:
        """Follows the phase until the process ends."""
        while True:
            try:
                phase = (self._folder / "phase").read_text()
            except OSError:
                phase = ""
            if phase != self._phase:
                self._write()
                self._seen, self._lookup = set(), set()
                self._phase = phase
                os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.02)

    def switch(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: the main thread is profiled during a phase only; imports stay fast."""
        sys.setprofile(self.call if self._phase else None)

    def _write(self) -> None:
        for name, seen in ((self._phase, self._seen), (f"{self._phase}-lookup", self._lookup)):
            if self._phase and seen:
                lines = sorted(
                    f"{each.co_filename.rpartition('/kvtier/')[2]}:{each.co_qualname}"
                    for each in seen
                )
                target = self._folder / f"{name}.{os.getpid()}"
                target.with_suffix(".new").write_text("\n".join(lines))
                target.with_suffix(".new").replace(target)


if folder := os.environ.get("KVTIER_TRACE"):
    recorder = Recorder(Path(folder))
    threading.setprofile(recorder.call)
    signal.signal(signal.SIGUSR2, recorder.switch)
    thread = threading.Thread(target=recorder.follow, name="trace", daemon=True)
    thread.start()
