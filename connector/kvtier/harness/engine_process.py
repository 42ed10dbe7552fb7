"""Real engines in child processes, for the demo, the scorecard and tests.

``EngineServer`` is vLLM's API server. ``DrivenEngine`` is an in-process engine in a child that
obeys single commands (``kvtier.harness.engine_driver``), so that a test decides when a step
happens. Both write a log, have a deadline for every wait, and end their whole process group when
stopped.

Nothing here is thread-safe: one owner per object.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

START_SECONDS = 240.0
"""How long an engine may take to start: 20 s on an idle machine, many times that on a busy one."""
SILENT_RESETS = 5


class EngineProcessError(RuntimeError):
    """An engine process has exited, returned an error, or did not respond in time."""


def free_port() -> int:
    """A TCP port on loopback that is not in use now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_environment() -> dict[str, str]:
    """Variables for the CPU engine on a small machine: no thread pinning, one OpenMP thread."""
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def quiet_environment() -> dict[str, str]:
    """Variables that keep an engine from accessing the network."""
    return {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def prepare_cpu_engine() -> None:
    """Sets the variables of a process that runs a CPU engine itself. Before vLLM is imported."""
    os.environ.update({**quiet_environment(), **cpu_environment()})
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["PYTHONHASHSEED"] = "0"


def json_answers() -> Callable[[object], None]:
    """Reserves this process's standard output for answers; returns what writes one, as a line of
    JSON. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: object) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    return answer


class ManagedProcess:
    """One child process in its own session, with its output in a file."""

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], log: Path, **pipes: Any
    ) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            pipes.setdefault("stdin", subprocess.DEVNULL)
            pipes.setdefault("stdout", output)
            self.process = subprocess.Popen(
                argv, env=dict(environment), stderr=output, start_new_session=True, **pipes
            )

    @property
    def pid(self) -> int:
        """Process id of the child, also that of its group and session."""
        return self.process.pid

    def alive(self) -> bool:
        """Whether the child still runs."""
        return self.process.poll() is None

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def signal_group(self, number: int) -> None:
        """Sends a signal to every process of the child's group."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass

    def stop(self, grace_seconds: float = 15.0) -> None:
        """Sends SIGTERM to the child, and SIGKILL to its group after ``grace_seconds``."""
        segments = _shared_segments(self.pid)
        if self.alive():
            self.process.terminate()
            try:
                self.process.wait(grace_seconds)
            except subprocess.TimeoutExpired:
                pass
        self.kill()
        _unlink(segments)

    def kill(self) -> None:
        """Kills the whole group and waits for the child."""
        segments = _shared_segments(self.pid)
        self.signal_group(signal.SIGKILL)
        self.process.wait(30)
        # Python's resource tracker is in the same group and is killed with it.
        _unlink(segments)


def _unlink(segments: set[Path]) -> None:
    for segment in segments:
        segment.unlink(missing_ok=True)


def _shared_segments(group: int) -> set[Path]:
    """Shared memory and semaphores of Python libraries that the processes of a group have mapped.

    Identified by inode: a semaphore is mapped under a temporary name that it had before it was
    linked to its own.
    """
    inodes: set[int] = set()
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group:
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                inodes |= {
                    int(line.split()[4]) for line in maps.splitlines() if " /dev/shm/" in line
                }
        except OSError:
            continue
    with os.scandir("/dev/shm") as entries:
        return {
            Path(entry.path)
            for entry in entries
            if entry.name.startswith(("psm_", "sem.")) and entry.inode() in inodes
        }


def tierd_processes(topology: Path) -> list[psutil.Process]:
    """The tier daemons that serve the topology in directory ``topology``."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        if (
            process.info["status"] != psutil.STATUS_ZOMBIE
            and str(topology) in command
            and any("tierd" in word for word in command)
        ):
            found.append(process)
    return found


def kill_tierd(topology: Path) -> list[int]:
    """Kills every daemon of ``topology``. Returns their process ids once they have exited."""
    victims = tierd_processes(topology)
    for process in victims:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(victims, timeout=30)
    return [process.pid for process in victims]


@dataclass(frozen=True, slots=True)
class Completion:
    """A completed request: token ids, seconds from sending it to the first token and to the end,
    and the prompt tokens taken from caches (-1 unless the server has
    ``--enable-prompt-tokens-details``).
    """

    tokens: tuple[int, ...]
    first_token_seconds: float
    seconds: float
    cached_tokens: int = -1


class EngineClient:
    """A client of an OpenAI-compatible vLLM server. ``model``: its name on the server."""

    def __init__(self, host: str, port: int, model: str) -> None:
        self.host = host
        self.port = port
        self.model = model

    def request(self, method: str, path: str, timeout_seconds: float = 60) -> tuple[int, str]:
        """Sends one HTTP request without a body; returns the status and the response's body."""
        return http_request(self.port, method, path, timeout_seconds, self.host)

    def metrics(self) -> dict[str, float]:
        """The samples of ``/metrics``; see ``parse_metrics``."""
        return parse_metrics(self.request("GET", "/metrics")[1])

    def reset_prefix_cache(self, timeout_seconds: float = 30) -> None:
        """Empties the GPU prefix cache (the server needs ``VLLM_SERVER_DEV_MODE=1``).

        The engine rejects a reset while a store uses blocks, and it steps only when it has
        requests: requests too short to be cached keep it stepping until it accepts. Servers before
        about 0.30 do not report whether they accepted: several resets are sent.
        """
        deadline = time.monotonic() + timeout_seconds
        silent = 0
        while time.monotonic() < deadline:
            self.complete([5, 6, 7], 2)
            status, text = self.request("POST", "/reset_prefix_cache")
            silent += status == 200 and not text
            if (status == 200 and "true" in text.lower()) or silent == SILENT_RESETS:
                return
            time.sleep(0.1)
        raise EngineProcessError("cannot reset the prefix cache: blocks are still in use")

    def complete(
        self, prompt: Sequence[int], max_tokens: int, timeout_seconds: float = 120, **extra: object
    ) -> Completion:
        """Greedy tokens for a prompt of token ids, streamed. Raises ``EngineProcessError``."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **extra,
        }
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_seconds)
        tokens: list[int] = []
        first: float | None = None
        cached = -1
        started = time.monotonic()
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != 200:
                raise EngineProcessError(
                    f"status {response.status}: {response.read().decode(errors='replace')[:500]}"
                )
            for line in response:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise EngineProcessError(f"the engine returned an error: {event['error']}")
                for choice in event.get("choices", ()):
                    piece = choice.get("token_ids") or ()
                    if piece and first is None:
                        first = time.monotonic() - started
                    tokens.extend(piece)
                details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
                cached = details.get("cached_tokens", cached)
        except (OSError, http.client.HTTPException) as error:
            raise EngineProcessError(f"no response from the engine: {error}") from error
        finally:
            connection.close()
        if first is None:
            raise EngineProcessError("the response of the engine has no token")
        return Completion(tuple(tokens), first, time.monotonic() - started, cached)


class EngineServer(ManagedProcess, EngineClient):
    """vLLM's API server on a loopback port.

    ``arguments`` are vLLM's flags; host and port are added. The constructor does not wait;
    ``wait_ready`` does.
    """

    def __init__(
        self,
        python: str,
        model: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        EngineClient.__init__(self, "127.0.0.1", free_port(), str(model))
        argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        argv += ["--host", "127.0.0.1", "--port", str(self.port), *arguments]
        ManagedProcess.__init__(self, argv, environment, log)

    def wait_ready(self, timeout_seconds: float = START_SECONDS) -> None:
        """Waits until the server is healthy. Raises ``EngineProcessError``."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if not self.alive():
                raise EngineProcessError(
                    f"the engine exited with status {self.process.returncode}:\n{self.log_tail()}"
                )
            try:
                if self.request("GET", "/health", timeout_seconds=5)[0] == 200:
                    return
            except OSError:
                time.sleep(0.1)
        raise EngineProcessError(
            f"the engine was not ready after {timeout_seconds:.0f} s:\n{self.log_tail()}"
        )


def http_request(
    port: int,
    method: str,
    path: str,
    timeout_seconds: float = 60,
    host: str = "127.0.0.1",
    headers: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Sends one HTTP request without a body; returns the status and the response's body. Raises
    ``OSError``.
    """
    connection = http.client.HTTPConnection(host, port, timeout=timeout_seconds)
    try:
        connection.request(method, path, headers=dict(headers or {}))
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()


def parse_metrics(text: str) -> dict[str, float]:
    """The samples of a Prometheus text: each by its name with labels, and their sum by the bare
    name.
    """
    values: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, number = line.rpartition(" ")
        try:
            value = float(number)
        except ValueError:
            continue
        values[name] = value
        bare, brace, _ = name.partition("{")
        if brace:
            values[bare] = values.get(bare, 0.0) + value
    return values


class DrivenEngine(ManagedProcess):
    """An in-process vLLM engine in a child that does one command at a time.

    ``options`` are the keyword arguments of ``vllm.LLM``. The constructor does not wait;
    ``wait_ready`` does.
    """

    def __init__(
        self, python: str, options: Mapping[str, object], environment: Mapping[str, str], log: Path
    ) -> None:
        argv = [python, "-m", "kvtier.harness.engine_driver", json.dumps(dict(options))]
        super().__init__(argv, environment, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._pending = b""

    def wait_ready(self, timeout_seconds: float = START_SECONDS) -> DrivenEngine:
        """Waits until the engine has started; returns itself."""
        self._answer(timeout_seconds)
        return self

    def call(self, do: str, timeout_seconds: float = 120, **arguments: object) -> Any:
        """One command (see ``engine_driver``) and its answer. Raises ``EngineProcessError``."""
        if self.process.stdin is None:
            raise EngineProcessError("the engine has no standard input")
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise EngineProcessError(
                f"cannot write to the engine: {error}\n{self.log_tail()}"
            ) from error
        return self._answer(timeout_seconds)

    def _answer(self, timeout_seconds: float) -> Any:
        if self.process.stdout is None:
            raise EngineProcessError("the engine has no standard output")
        deadline = time.monotonic() + timeout_seconds
        descriptor = self.process.stdout.fileno()
        while b"\n" not in self._pending:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise EngineProcessError(
                    f"no response from the engine within {timeout_seconds:.0f} s:\n"
                    f"{self.log_tail()}"
                )
            piece = os.read(descriptor, 1 << 20)
            if not piece:
                raise EngineProcessError(
                    f"the engine exited with status {self.process.wait(30)}:\n{self.log_tail()}"
                )
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineProcessError(f"{answer['error']}\n{self.log_tail(20)}")
        return answer["result"]
