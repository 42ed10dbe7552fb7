"""Shell texts: the engine's arguments are those that a shell would pass."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.support.steps import executed_lines

from kvtier_operator.api.pods import Container, decode
from kvtier_operator.injection.command_line import CommandLine, parse_command_line
from kvtier_operator.injection.programs import Program

TEXTS = [
    "vllm serve m --a 1",
    "exec vllm serve m --a 1 # --b 2",
    "# --kv-transfer-config needs another version\nvllm serve m --a 1",
    "   # a comment\n\n# another: 'with a quote\nexec vllm serve m",
    "vllm serve m \\\n  --a 1 \\\n  --b 2",
    "vllm serve m --a 'x y' --b \"x  y\" --c x\\ y",
    "vllm serve m#1 --a '#2' \"#3\" \\#4 --b=#5 # 6",
    'vllm serve m --a \'{"k": "v w"}\' --b "{\\"k\\": 1}"',
    'A="--a 1 --b 2"; vllm serve m $A',
    'A="--a 1 --b 2"\nvllm serve m "$A"',
    "A='--a 1'\nB=\"$A --b 2\"\nvllm serve m ${B} ${C:---c 3} ${D-} $E",
    'A=x\nA="$A y"\nvllm serve "${A}" ${A:+--set} ${UNSET:+--unset}',
    "export A=1 B='2 3'; vllm serve m --a $A --b $B",
    'args=(--a 1 "x y")\nargs+=(--b)\nvllm serve m "${args[@]}"',
    'eval "exec vllm serve m --a 1 \\\n  ${UNSET_EMPTY-} \\\n  $@"',
    'eval "vllm serve m --a \\"x y\\" # no comment $1"',
    'vllm serve m "$@"',
    "exec vllm serve m --first $1 --all $@",
    "echo 'vllm serve --a 1'; vllm serve m",
    'echo "vllm serve m --b" >&2; vllm serve m 2>/dev/null',
    "vllm serve m > /dev/null --a 1 2>&1 --b",
    "cat <<EOF >/dev/null\nvllm serve no --kv-transfer-config x\nEOF\nvllm serve m",
    "cat <<-'END' >/dev/null\n\tvllm serve no\n\tEND\nvllm serve m",
    "if true; then vllm serve m --a; fi",
    "for i in 1; do\n  vllm serve m\ndone",
    "case x in *--b*) vllm serve no;; x) vllm serve m --a;; esac",
    "{ vllm serve m --a; }",
    "(vllm serve m --a)",
    "true && vllm serve m --a || false",
    "A=$(printf '%s)' \"(\") vllm serve m --a",
    "A=`printf x`; vllm serve m --a",
    "exec $(which vllm) serve m --a",
    "bash -c \"vllm serve m --a 'x y'\"",
    "bash -euo pipefail -c 'vllm serve m $1 \"$2\"' zero one 'two words'",
    "sh -c 'exec vllm serve m \"$@\"' -- --x 'y z'",
    "A=1 B='2 3' exec vllm serve m",
    "env A=1 vllm serve m --a",
    "time vllm serve m",
    "! vllm serve m",
    "vllm serve m --a $'x y'",
    "vllm serve m --a 1 & wait",
    "serve() { vllm serve m --a; }; serve",
    "vllm serve m --a < /dev/null",
    "vllm serve m\\\n--a 1",
    "\\vllm serve m",
    "vllm 'ser've \"m\"'n'",
]
POSITIONAL = ["--p", "q r"]


def command_line(container: dict[str, Any]) -> CommandLine:
    return parse_command_line(decode(container, Container))


def run(directory: Path, text: str) -> list[list[str]]:
    """The arguments of each ``vllm`` that bash starts, without starting a model."""
    directory.mkdir(exist_ok=True)
    program = directory / "vllm"
    program.write_text("#!/bin/sh\n{ printf '%s\\0' vllm \"$@\"; printf '\\n\\0'; } >> $OUT\n")
    program.chmod(0o755)
    out = directory / "out"
    out.write_bytes(b"")
    path = f"{directory}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-c", text, "--", *POSITIONAL],
        env={"PATH": path, "OUT": str(out)},
        timeout=60,
        capture_output=True,
    )
    calls: list[list[str]] = [[]]
    for word in out.read_text().split("\0"):
        if word == "\n":
            calls.append([])
        else:
            calls[-1].append(word)
    return calls[:-1]


@pytest.mark.parametrize("text", TEXTS)
def test_the_engine_gets_the_arguments_that_bash_passes(tmp_path: Path, text: str) -> None:
    executed = run(tmp_path, text)
    assert executed
    read = command_line({"command": ["bash", "-c", text, "--"], "args": POSITIONAL}).commands
    engines = [list(words[words.index("vllm") :]) for words in read if "vllm" in words]
    references = {"$E"}  # unknown to a reader, empty to this bash
    engines = [[word for word in words if word not in references] for words in engines]
    for arguments in executed:
        assert arguments in engines, engines


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("# --kv-transfer-config x\nvllm serve m --a 1", {"a": "1"}),
        ("vllm serve --help | grep -q -- --kv-transfer-config; vllm serve m", {}),
        ("echo --nnodes 2; vllm serve m", {}),
        ("case $X in --nnodes) N=2;; esac; vllm serve m", {}),
        ("A=''\nif new; then A='--a 1'; fi\nvllm serve m $A --b 2", {"a": "1", "b": "2"}),
        ("A='--a 1'\nif old; then A=''; fi\nvllm serve m $A --b 2", {"a": "1", "b": "2"}),
        ("other --a 1; vllm serve m --b 2", {"b": "2"}),
        ("/launch --a 1", {"a": "1"}),
    ],
)
def test_options_are_those_that_the_engine_could_get(text: str, options: dict[str, str]) -> None:
    assert dict(command_line({"command": ["sh", "-c", text]}).options) == options


@pytest.mark.parametrize(
    ("argv", "program"),
    [
        (["vllm", "serve", "m"], Program.VLLM),
        (["/opt/venv/bin/vllm", "serve", "m"], Program.VLLM),
        (["tini", "--", "vllm", "serve", "m"], Program.VLLM),
        (["numactl", "--membind", "0", "python3", "-m", "vllm", "serve"], Program.VLLM),
        (["torchrun", "--nnodes", "2", "-m", "vllm.entrypoints.openai.api_server"], Program.VLLM),
        (["python", "/opt/vllm/entrypoints/openai/api_server.py"], Program.VLLM),
        (["vllm", "launch", "render", "m"], Program.VLLM_TOOL),
        (["vllm", "bench", "serve"], Program.VLLM_TOOL),
        (["python3", "-m", "sglang.launch_server"], Program.SGLANG),
        (["python3", "-m", "dynamo.vllm"], Program.DYNAMO_VLLM),
        (["text-generation-launcher", "--model-id", "m"], Program.TGI),
        (["trtllm-serve", "m"], Program.TENSORRT_LLM),
        (["sleep", "infinity"], Program.IDLE),
        (["python3", "serve.py", "--name", "vllm"], None),
        (["/launch", "--model", "/models/vllm"], None),
        (["cp", "-r", "/a/vllm", "/b"], None),
    ],
)
def test_programs_are_recognized(argv: list[str], program: Program | None) -> None:
    assert command_line({"command": argv}).programs == (() if program is None else (program,))


@pytest.mark.parametrize(
    "unit", ["$(", "'", '"', '"$(', "${a:-", "`", "<<E\n", "((", "a=(", "\\", "$'", "#\n", ";'\""]
)
def test_texts_that_end_nowhere_take_linear_time(unit: str) -> None:
    def steps(repetitions: int) -> int:
        container = decode({"command": ["sh", "-c", unit * repetitions]}, Container)
        return executed_lines(lambda: parse_command_line(container))

    assert steps(4 << 10) < 5 * steps(1 << 10)
