"""A process that is nobody's child.

vLLM ends an engine by killing it with all its descendants, so a daemon that is one of them dies with its first engine: whatever it
had to write is lost, its run directory stays, and other engines lose their RAM tier. A shell starts the program and
ends at once, so that the kernel gives the program to the machine's or container's first process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from kvtier.tierd.process import ProcessIdentity, leader_is_dead, pid_namespace, process_start

START_SECONDS = 5.0
"""A shell takes milliseconds to say which process it started."""
_POLL_SECONDS = 0.02
_TO_STANDARD_ERROR = '"$@" >&2 & echo $!'
_TO_NOWHERE = '"$@" >/dev/null & echo $!'


class DetachedProcess:
    """A program in a session of its own. Raises ``OSError`` where it cannot be started.

    ``to_standard_error``: what it prints goes to this process's standard error, otherwise nowhere.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], to_standard_error: bool = True) -> None:
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(None, "no such program", command[0])
        shell = subprocess.Popen(
            ["/bin/sh", "-c", _TO_STANDARD_ERROR if to_standard_error else _TO_NOWHERE, "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            cwd="/",
            env=dict(environment),
            start_new_session=True,
        )
        try:
            answer, _ = shell.communicate(timeout=START_SECONDS)
            self.pid = int(answer)
        except (subprocess.TimeoutExpired, ValueError) as error:
            shell.kill()
            shell.wait()
            raise OSError(None, f"the shell did not start it: {error}", command[0]) from error
        self._identity = ProcessIdentity(self.pid, process_start(self.pid), pid_namespace())
        self.ended = False
        """Whether ``poll`` has seen its end."""

    def poll(self) -> bool:
        """Whether it has ended. A thread that hangs in the kernel is not waited for: nothing of the program runs any more."""
        if not self.ended:
            self.ended = leader_is_dead(self._identity)
            if self.ended:
                self._reap()
        return self.ended

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if not self.poll():
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    def wait(self, timeout_seconds: float) -> bool:
        """Waits for its end; whether it came within the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while not self.poll() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return self.ended

    def _reap(self) -> None:
        """Where this process is the first one of its container, the program has become its child after all."""
        try:
            os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return
