"""What KVTier uses of vLLM, by release: hooks with their parameters, and names.

``vllm_contract.json`` beside this file says since and until which release each exists. It holds
facts that this tool reads in the sources of each release, and no source. Tests compare the
connector with it, and it with the vLLM that is installed.

    python tools/vllm_contract.py --files
        prints the files of vLLM that are read
    python tools/vllm_contract.py 0.24.0=DIRECTORY 0.25.0=FILE.whl ...
        replaces the table; each directory or wheel holds ``vllm/`` of one release
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import zipfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".json")
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
CLASSES = (
    f"{BASE}:KVConnectorBase_V1",
    f"{BASE}:SupportsHMA",
    f"{BASE}:KVConnectorWorkerMetadata",
    f"{METRICS}:KVConnectorStats",
    f"{METRICS}:KVConnectorPromMetrics",
)
"""Bases of KVTier's classes: all their methods are in the table."""
CONFIGS = {
    "VllmConfig": "vllm.config.vllm",
    "ModelConfig": "vllm.config.model",
    "CacheConfig": "vllm.config.cache",
    "ParallelConfig": "vllm.config.parallel",
    "SpeculativeConfig": "vllm.config.speculative",
    "LoRAConfig": "vllm.config.lora",
    "MultiModalConfig": "vllm.config.multimodal",
    "AttentionConfig": "vllm.config.attention",
    "PoolerConfig": "vllm.config.pooler",
    "MambaConfig": "vllm.config.mamba",
    "OffloadConfig": "vllm.config.offload",
    "KernelConfig": "vllm.config.kernel",
    "DiffusionConfig": "vllm.config.diffusion",
}
"""Classes of vLLM's configuration by name, with their module: all their fields are in the table."""
_REQUEST = (
    "request_id", "num_tokens", "num_prompt_tokens", "num_computed_tokens", "block_hashes",
    "lora_request", "status", "prompt_embeds", "resumable", "skip_reading_prefix_cache",
    "kv_transfer_params", "kv_hints",
)  # fmt: skip
_OUTPUT = (
    "num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs", "preempted_req_ids",
    "kv_connector_block_state",
)  # fmt: skip
_SPECS = (
    "FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec",
    "MambaSpec", "UniformTypeKVCacheSpecs", "KVCacheConfig",
)  # fmt: skip
NAMES: dict[str, tuple[str, ...]] = {
    BASE: (
        "KVConnectorMetadata", "KVConnectorRole.SCHEDULER", "KVConnectorRole.WORKER",
        "KVConnectorTransferResults", "KVConnectorTransferResults.failed_recving",
        "KVConnectorTransferResults.finished_recving",
    ),
    "vllm.distributed.kv_transfer.kv_connector.factory": (
        "KVConnectorFactory.get_connector_class",
    ),
    "vllm.config.kv_transfer": (
        "KVTransferConfig.kv_connector", "KVTransferConfig.kv_connector_extra_config",
        "KVTransferConfig.kv_connector_module_path", "KVTransferConfig.kv_load_failure_policy",
        "KVTransferConfig.engine_id",
    ),
    "vllm.engine.arg_utils": ("EngineArgs.create_engine_config", "EngineArgs.kv_transfer_config"),
    "vllm.v1.request": (
        *(f"Request.{name}" for name in _REQUEST),
        "RequestStatus.FINISHED_STOPPED", "RequestStatus.FINISHED_LENGTH_CAPPED",
        "RequestStatus.FINISHED_REPETITION",
    ),
    "vllm.v1.core.sched.output": tuple(f"SchedulerOutput.{name}" for name in _OUTPUT),
    "vllm.v1.core.block_pool": tuple(
        f"BlockPool.{name}"
        for name in (
            "blocks", "touch", "free_blocks", "get_num_free_blocks", "reset_prefix_cache",
            "cached_block_hash_to_block",
        )
    ),
    "vllm.v1.core.kv_cache_manager": ("KVCacheBlocks.get_block_ids",),
    "vllm.v1.core.kv_cache_utils": (
        "NONE_HASH", "DEFAULT_NONE_HASH_SEED", "resolve_kv_cache_block_sizes",
    ),
    "vllm.v1.kv_cache_interface": (*_SPECS, "KVCacheConfig.kv_cache_groups"),
    "vllm.v1.metrics.cache_hit_source": (
        "CacheHitSource.HOST", "CacheHitSource.DISK", "CacheHitSource.EXTERNAL_UNSPECIFIED",
    ),
    "vllm.v1.outputs": ("KVConnectorOutput.kv_connector_worker_meta",),
    "vllm.v1.engine.core": (
        "EngineCore.collective_rpc", "EngineCore.resume_scheduler", "EngineCore.wake_up",
    ),
    "vllm.model_executor.model_loader.utils": (
        "record_metadata_for_reloading", "initialize_model",
    ),
    "vllm.v1.worker.worker_base": ("WorkerBase",),
}  # fmt: skip
"""By module: what KVTier uses apart from the bases of its classes."""

Read = Callable[[str], str | None]
Hook = dict[str, Any]


def files() -> list[str]:
    """The files of vLLM that are read; a module may be a package."""
    return sorted(path for module in _modules() for path in _paths(module))


def _modules() -> set[str]:
    return {owner.partition(":")[0] for owner in CLASSES} | set(NAMES) | set(CONFIGS.values())


def _paths(module: str) -> tuple[str, str]:
    path = module.replace(".", "/")
    return f"{path}.py", f"{path}/__init__.py"


def reader(source: Path) -> Read:
    """Reads files of a directory or a wheel by their path in it; None for one that is not there."""
    if source.is_dir():
        return lambda path: (source / path).read_text() if (source / path).is_file() else None
    wheel = zipfile.ZipFile(source)
    present = frozenset(wheel.namelist())
    return lambda path: wheel.read(path).decode() if path in present else None


def contract(read: Read) -> dict[str, Hook | None]:
    """What one release has: for a method its kind and parameters, for other names None."""
    found: dict[str, Hook | None] = {}
    for module in sorted(_modules()):
        text = next((text for path in _paths(module) if (text := read(path)) is not None), None)
        if text is None:
            continue
        tree = ast.parse(text)
        for owner in CLASSES:
            if owner.startswith(f"{module}:"):
                found.update(_methods(owner, _class(tree, owner.partition(":")[2])))
        for name, where in CONFIGS.items():
            if where == module:
                found.update(dict.fromkeys(_fields(where, _class(tree, name))))
        present = set(_defined(tree))
        found.update(
            {f"{module}:{name}": None for name in NAMES.get(module, ()) if name in present}
        )
    return found


def _class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    return next(
        (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None
    )


def _methods(owner: str, node: ast.ClassDef | None) -> Iterator[tuple[str, Hook]]:
    for each in node.body if node is not None else ():
        if isinstance(each, ast.FunctionDef):
            decorators = {ast.unparse(decorator) for decorator in each.decorator_list}
            kinds = decorators & {"property", "classmethod", "staticmethod"}
            yield (
                f"{owner}.{each.name}",
                {
                    "kind": next(iter(kinds), "method"),
                    "required": "abstractmethod" in decorators,
                    "parameters": _parameters(each.args),
                },
            )


def _fields(module: str, node: ast.ClassDef | None) -> Iterator[str]:
    """The fields of a dataclass, without those that only its constructor takes."""
    if node is None:
        return
    for each in node.body:
        if (
            isinstance(each, ast.AnnAssign)
            and isinstance(each.target, ast.Name)
            and not ast.unparse(each.annotation).startswith(("ClassVar", "InitVar"))
        ):
            yield f"{module}:{node.name}.{each.target.id}"


def config_fields(found: Mapping[str, Hook | None]) -> dict[str, set[str]]:
    """The fields of each class of ``CONFIGS`` in one release."""
    return {
        name: {each.rpartition(".")[2] for each in found if each.startswith(f"{module}:{name}.")}
        for name, module in CONFIGS.items()
    }


def _parameters(arguments: ast.arguments) -> list[str]:
    """Names in order without ``self`` or ``cls``; ``=`` after a name: it has a default."""
    ordered = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    required = len(ordered) - len(arguments.defaults)
    found = [name + ("=" if number >= required else "") for number, name in enumerate(ordered)]
    found = [name for name in found if name not in ("self", "cls")]
    if arguments.vararg is not None:
        found.append(f"*{arguments.vararg.arg}")
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(f"{each.arg}" + ("" if default is None else "="))
    if arguments.kwarg is not None:
        found.append(f"**{arguments.kwarg.arg}")
    return found


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names of a module, and ``Class.name`` of attributes and methods of its classes."""
    for node in tree.body:
        yield from _bound(node)
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                yield from (f"{node.name}.{name}" for name in _bound(inner))
                for each in ast.walk(inner):
                    if (
                        isinstance(each, ast.Attribute)
                        and isinstance(each.ctx, ast.Store)
                        and isinstance(each.value, ast.Name)
                        and each.value.id == "self"
                    ):
                        yield f"{node.name}.{each.attr}"


def _bound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (each.asname or each.name for each in node.names)


def merge(releases: dict[str, dict[str, Hook | None]]) -> dict[str, Any]:
    """The table of several releases, given in order: for each name the ranges of releases in which
    it is the same."""
    names: dict[str, list[dict[str, Any]]] = {}
    for name in sorted({name for found in releases.values() for name in found}):
        ranges: list[dict[str, Any]] = []
        previous = ""
        for release, found in releases.items():
            if name in found:
                what = found[name] or {}
                if ranges and ranges[-1]["last"] == previous and _same(ranges[-1], what):
                    ranges[-1]["last"] = release
                else:
                    ranges.append({"first": release, "last": release, **what})
            previous = release
        names[name] = ranges
    return {"releases": list(releases), "names": names}


def _same(known: dict[str, Any], what: Hook) -> bool:
    return {name: value for name, value in known.items() if name not in ("first", "last")} == what


def load() -> dict[str, Any]:
    """The table."""
    table: dict[str, Any] = json.loads(TABLE.read_text())
    return table


def at(table: dict[str, Any], release: str) -> dict[str, Hook | None]:
    """What the table says of one of its releases, in the form of ``contract``."""
    releases = table["releases"]
    position = releases.index(release)
    found: dict[str, Hook | None] = {}
    for name, ranges in table["names"].items():
        for each in ranges:
            if releases.index(each["first"]) <= position <= releases.index(each["last"]):
                what = {key: value for key, value in each.items() if key not in ("first", "last")}
                found[name] = what or None
    return found


def used_methods(ours: type) -> dict[str, Any]:
    """The public methods that a class of KVTier defines itself, or in bases of KVTier."""
    found: dict[str, Any] = {}
    for each in reversed(ours.__mro__):
        if each.__module__.startswith("kvtier."):
            found.update(
                {
                    name: value
                    for name, value in vars(each).items()
                    if (name == "__init__" or not name.startswith("_"))
                    and (callable(value) or isinstance(value, property | classmethod))
                }
            )
    return found


def problems(
    ours: type, owners: Iterable[str], found: Mapping[str, Hook | None], absent: Container[str] = ()
) -> list[str]:
    """Why a class does not fit the bases ``owners`` of one release; empty if it fits.

    ``found``: what the release has. ``absent``: methods of the class that are no hooks there.
    """
    result = []
    hooks = {
        name.rpartition(".")[2]: hook
        for name, hook in found.items()
        if hook is not None and name.rpartition(".")[0] in owners
    }
    used = used_methods(ours)
    for name, value in used.items():
        if name in hooks:
            result += [f"{name}: {each}" for each in _misfits(value, hooks[name])]
        elif name not in absent and name != "__init__":
            result.append(f"{name}: is no hook of this release")
    result += [
        f"{name}: is required and missing"
        for name, hook in hooks.items()
        if hook["required"] and name not in used
    ]
    return result


def _misfits(value: Any, hook: Hook) -> Iterator[str]:
    kinds = {property: "property", classmethod: "classmethod", staticmethod: "staticmethod"}
    kind = kinds.get(type(value), "method")
    if kind != hook["kind"]:
        yield f"is a {kind}, and a {hook['kind']} in vLLM"
        return
    if kind == "property":
        return
    ours = list(inspect.signature(getattr(value, "__func__", value)).parameters.values())
    if kind != "staticmethod":
        ours = ours[1:]
    signature = inspect.Signature(ours)
    theirs = [name.rstrip("=") for name in hook["parameters"]]
    named = [name for name in theirs if not name.startswith("*")]
    try:
        signature.bind(*named)
        signature.bind(**dict.fromkeys(named))
    except TypeError as error:
        yield f"vLLM passes {', '.join(theirs)}: {error}"
        return
    positional = [each.name for each in ours if each.kind is not inspect.Parameter.VAR_KEYWORD]
    if positional[: len(named)] != named:
        yield f"has {', '.join(positional)}, and vLLM passes {', '.join(named)}"
    for stars, form in (
        ("*", inspect.Parameter.VAR_POSITIONAL),
        ("**", inspect.Parameter.VAR_KEYWORD),
    ):
        expected = any(name.count("*") == len(stars) for name in theirs)
        if expected and form not in {each.kind for each in ours}:
            yield f"must take {stars} arguments"


def _text(table: dict[str, Any]) -> str:
    """JSON with one line for each range."""
    lines = ["{", f'"releases": {json.dumps(table["releases"])},', '"names": {']
    entries = []
    for name, ranges in table["names"].items():
        rows = ",\n".join("  " + json.dumps(each) for each in ranges)
        entries.append(f" {json.dumps(name)}: [\n{rows}\n ]")
    return "\n".join([*lines, ",\n".join(entries), "}", "}"]) + "\n"


def main(arguments: list[str]) -> int:
    """Command line: see the module's text."""
    if arguments == ["--files"]:
        print("\n".join(files()))
        return 0
    pairs = [argument.partition("=") for argument in arguments]
    if not pairs or not all(release and path for release, _, path in pairs):
        print(__doc__, file=sys.stderr)
        return 2
    ordered = sorted(pairs, key=lambda pair: [int(part) for part in pair[0].split(".")])
    table = merge({release: contract(reader(Path(path))) for release, _, path in ordered})
    TABLE.write_text(_text(table))
    print(f"{TABLE}: {len(table['names'])} names of {len(ordered)} releases")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
