"""What a command runs: vLLM's server, or another program that is known. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum


class Program(StrEnum):
    """A program that is recognized. The value is its name in messages."""

    VLLM = "vLLM"
    DYNAMO_VLLM = "Dynamo (dynamo.vllm)"
    VLLM_TOOL = "a command of vLLM that serves no model"
    SGLANG = "SGLang"
    TGI = "Text Generation Inference"
    TEI = "Text Embeddings Inference"
    TENSORRT_LLM = "TensorRT-LLM"
    TRITON = "Triton"
    LMDEPLOY = "LMDeploy"
    OLLAMA = "Ollama"
    LLAMA_CPP = "llama.cpp"
    MLC = "MLC LLM"
    ATOM = "ATOM"
    DYNAMO = "Dynamo"
    IDLE = "a program that is no engine"


ENGINE_PROGRAMS = frozenset({Program.VLLM})
"""Programs that are vLLM's server, whatever else is known of the pod."""
NAMED_PROGRAMS = ENGINE_PROGRAMS | {Program.DYNAMO_VLLM}
"""Programs that run vLLM inside. They are its server if the policy names the container."""
VLLM_TOOLS = frozenset({"launch", "bench", "chat", "complete", "collect-env", "router"})
SERVING = frozenset({"serve", "run-batch"})
_MODULES = (
    (re.compile(r"^dynamo\.vllm(\.|$)"), Program.DYNAMO_VLLM),
    (re.compile(r"^dynamo\.sglang(\.|$)|^sglang(\.|$)"), Program.SGLANG),
    (re.compile(r"^dynamo\.trtllm(\.|$)|^tensorrt_llm(\.|$)"), Program.TENSORRT_LLM),
    (re.compile(r"^dynamo(\.|$)"), Program.DYNAMO),
    (re.compile(r"^lmdeploy(\.|$)"), Program.LMDEPLOY),
    (re.compile(r"^mlc_llm(\.|$)"), Program.MLC),
    (re.compile(r"^atom(\.|$)"), Program.ATOM),
    (re.compile(r"^llama_cpp(\.|$)"), Program.LLAMA_CPP),
    (re.compile(r"^http\.server$"), Program.IDLE),
)
_PROGRAMS = {
    "sglang": Program.SGLANG,
    "text-generation-launcher": Program.TGI,
    "text-generation-server": Program.TGI,
    "text-generation-router": Program.TGI,
    "text-embeddings-router": Program.TEI,
    "trtllm-serve": Program.TENSORRT_LLM,
    "trtllm-llmapi-launch": Program.TENSORRT_LLM,
    "tritonserver": Program.TRITON,
    "lmdeploy": Program.LMDEPLOY,
    "ollama": Program.OLLAMA,
    "llama-server": Program.LLAMA_CPP,
    "mlc_llm": Program.MLC,
    "sleep": Program.IDLE,
    "tail": Program.IDLE,
    "nginx": Program.IDLE,
    "envoy": Program.IDLE,
}
_IMAGES = (
    (re.compile(r"(^|[/_.-])sglang([/_.:@-]|$)"), Program.SGLANG),
    (re.compile(r"text-generation-inference"), Program.TGI),
    (re.compile(r"text-embeddings-inference"), Program.TEI),
    (re.compile(r"(^|[/_.-])(tensorrt-?llm|trtllm)([/_.:@-]|$)"), Program.TENSORRT_LLM),
    (re.compile(r"(^|/)tritonserver([/_.:@-]|$)"), Program.TRITON),
    (re.compile(r"(^|/)lmdeploy([/_.:@-]|$)"), Program.LMDEPLOY),
    (re.compile(r"(^|/)ollama([/_.:@-]|$)"), Program.OLLAMA),
    (re.compile(r"llama\.cpp"), Program.LLAMA_CPP),
)
_VLLM_IMAGE = re.compile(r"(^|[/_.-])vllm([/_.:@-]|$)")
_PYTHON = re.compile(r"(^|/)python[\d.]*$")
_VLLM_SCRIPT = re.compile(r"(^|/)vllm/entrypoints/[\w/]+\.py$")


def program_of(words: Sequence[str]) -> Program | None:
    """What a command runs, or None if that is not known. Programs that start others (``exec``,
    ``numactl``, ``tini``, ``env``) may precede it.
    """
    for index, word in enumerate(words):
        previous = words[index - 1] if index else ""
        following = words[index + 1 : index + 2]
        if previous.startswith("-") and previous not in ("-m", "--"):
            continue  # the value of an option
        base = word.rpartition("/")[2]
        if base == "vllm" and previous != "-m":
            subcommand = following[0] if following else ""
            if not index or subcommand in SERVING | VLLM_TOOLS:
                return _vllm(subcommand)
        elif previous == "-m" and _has_python(words[:index]):
            return _module(word, following)
        elif _VLLM_SCRIPT.search(word):
            return Program.VLLM
        elif base in _PROGRAMS and (not index or _PROGRAMS[base] is not Program.IDLE):
            return _PROGRAMS[base]
    return None


def program_of_image(image: str) -> Program | None:
    """What an image contains by its name, or None."""
    name = image.partition("@")[0]
    for pattern, program in _IMAGES:
        if pattern.search(name):
            return program
    return Program.VLLM if _VLLM_IMAGE.search(image) else None


def _has_python(words: Sequence[str]) -> bool:
    return any(_PYTHON.search(word) for word in words) or any(
        word.rpartition("/")[2] in ("torchrun", "accelerate", "uv") for word in words
    )


def _vllm(subcommand: str) -> Program:
    if subcommand in VLLM_TOOLS:
        return Program.VLLM_TOOL
    return Program.VLLM


def _module(module: str, following: Sequence[str]) -> Program | None:
    if module in ("vllm", "vllm.entrypoints.cli.main"):
        return _vllm(following[0] if following else "")
    if module.startswith("vllm.entrypoints."):
        return Program.VLLM
    return next((program for pattern, program in _MODULES if pattern.search(module)), None)
