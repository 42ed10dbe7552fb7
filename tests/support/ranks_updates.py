"""Updates of the weights of an engine with several ranks, as a stage of ``ranks_run``.

The same updates are made to an engine without KVTier and to one with it. vLLM's own backends of
weight transfer need GPUs, so ``register`` adds one to vLLM that reads files: everything but the
transport is vLLM's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BACKEND = "files"


def register() -> None:
    """Registers the backend. Before ranks are forked."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    @dataclass
    class Init(WeightTransferInitInfo):
        pass

    @dataclass
    class Update(WeightTransferUpdateInfo):
        directory: str = ""

    class FileTransfer(WeightTransferEngine):  # type: ignore[type-arg]
        init_info_cls = Init
        update_info_cls = Update

        def init_transfer_engine(self, init_info: Init) -> None:
            pass

        def start_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Update) -> None:
            self.model.load_weights(_tensors(Path(update_info.directory)))

        def shutdown(self) -> None:
            pass

    WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)


def _tensors(directory: Path) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    with safe_open(str(directory / "model.safetensors"), "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file.get_tensor(name)


class Updates:
    """One engine, and what it answers after each update."""

    def __init__(self, engine: Any, tokens: list[int]) -> None:
        self._engine = engine
        self._core = engine.driver.core
        self._tokens = tokens
        self._kvtier = engine.driver.scheduler.connector is not None
        self.answers: list[dict[str, Any]] = []

    def reload(self, directory: Path) -> None:
        self._core.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})

    def transfer(self, directory: Path) -> None:
        self._core.collective_rpc("start_weight_update")
        self._core.collective_rpc(
            "update_weights", kwargs={"update_info": {"directory": str(directory)}}
        )
        self._core.collective_rpc("finish_weight_update")

    def sleep(self) -> None:
        """Level 1, and awake again with the same weights."""
        self._core.sleep(1)
        self._core.wake_up()

    def answer(self, name: str, *, reset: bool = True) -> None:
        """Resets vLLM's prefix cache only, and runs the prompt twice; the second time from a tier.

        Without ``reset`` the prompt runs once, with another beginning that no cache has.
        """
        if not reset:
            tokens = self._engine.run(list(reversed(self._tokens)))
            usable = self._kvtier and self._engine.scheduler.weights.usable
            self.answers.append({"name": name, "tokens": tokens, "usable": usable})
            return
        self._reset()
        answer: dict[str, Any] = {"name": name, "tokens": self._engine.run(self._tokens)}
        if self._kvtier:
            self._engine.wait("not stored", self._engine.stored)
        self._reset()
        before = self._loaded()
        answer["again"] = self._engine.run(self._tokens)
        answer["loaded"] = self._loaded() - before
        if self._kvtier:
            self._engine.driver.settle()
            answer["namespace"] = self._engine.scheduler.session.ready.namespace
        self.answers.append(answer)

    def _reset(self) -> None:
        self._engine.driver.settle()
        if not self._core.reset_prefix_cache():
            raise RuntimeError("vLLM's prefix cache was not reset")

    def _loaded(self) -> int:
        if not self._kvtier:
            return 0
        return sum(self._engine.scheduler.loads.in_flight.loaded_tokens.values())


def run(engine: Any, tokens: list[int], a: Path, b: Path) -> list[dict[str, Any]]:
    """From A to B to A by both ways, a sleep, and an update that keeps the cache.

    No failed update: after one, the executor of vLLM 0.32 takes the answer of the second rank for
    that of the next call.
    """
    updates = Updates(engine, tokens)
    updates.answer("A")
    for name, update, directory in (
        ("B by reload", updates.reload, b),
        ("A by transfer", updates.transfer, a),
        ("B by transfer", updates.transfer, b),
        ("A by reload", updates.reload, a),
    ):
        update(directory)
        updates.answer(name)
    updates.transfer(b)
    updates.answer("B by transfer, again")
    updates.sleep()
    updates.answer("B after a sleep")
    updates.reload(a)
    updates.answer("A with B's cache", reset=False)
    updates.answer("A after the reset")
    json.dumps(updates.answers)
    return updates.answers
