"""Who is provably gone, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

from kvtier.harness.tierd_testbed import wait_for
from kvtier.processes import (
    Liveness,
    ProcessIdentity,
    liveness_of,
    own_identity,
    pid_namespace,
    process_start,
)


def identity(pid: int) -> ProcessIdentity:
    return ProcessIdentity(pid, process_start(pid), pid_namespace())


def test_this_process_is_alive() -> None:
    assert liveness_of(own_identity()) is Liveness.ALIVE


def test_another_start_time_is_another_process() -> None:
    assert liveness_of(replace(own_identity(), start=own_identity().start + 1)) is Liveness.GONE


def test_a_process_in_another_pid_namespace_is_unverifiable() -> None:
    assert liveness_of(replace(own_identity(), pid_namespace="1")) is Liveness.UNKNOWN
    assert liveness_of(replace(own_identity(), pid_namespace="")) is Liveness.UNKNOWN


def test_a_killed_child_is_gone_before_and_after_it_is_reaped() -> None:
    child = subprocess.Popen(["sleep", "60"])
    who = identity(child.pid)
    assert liveness_of(who) is Liveness.ALIVE
    child.kill()
    wait_for(lambda: liveness_of(who) is Liveness.GONE, "the zombie counts as gone")
    child.wait()
    assert liveness_of(who) is Liveness.GONE


def test_a_process_whose_first_thread_alone_has_ended_is_not_gone() -> None:
    program = (
        "import ctypes, sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print('x', flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        who = identity(child.pid)
        wait_for(lambda: _state(child.pid) == "Z", "the first thread has ended")
        assert liveness_of(who) is Liveness.ALIVE
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    assert liveness_of(who) is Liveness.GONE


def test_after_a_fork_the_child_is_itself() -> None:
    own_identity()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, str(own_identity().pid).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert int(os.read(reader, 100)) == pid
    os.close(reader)
    os.close(writer)


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
