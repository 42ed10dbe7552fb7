"""The engine of a policy, and how the connector is delivered to it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from kvtier.config.models import Daemon
from kvtier_operator.api.base import STRUCTURAL, Accepts, Integer, Model, Name, Scalar


class EngineType(StrEnum):
    """The engine that the pods run."""

    VLLM = "VLLM"
    ATOM = "ATOM"


class Connector(StrEnum):
    """KV connector that the engine is configured for."""

    KVTIER = "KVTier"
    OFFLOADING = "Offloading"
    LMCACHE = "LMCache"


class Delivery(StrEnum):
    """How the connector is delivered."""

    INIT_CONTAINER = "InitContainer"
    IMAGE = "Image"
    IMAGE_VOLUME = "ImageVolume"


HASH_SEED_WORDS = "a decimal number from 0 to 4294967295, in quotes"


def _hash_seed(seed: str) -> str:
    if not (seed.isascii() and seed.isdigit() and len(seed) <= 10 and int(seed) < 1 << 32):
        raise PydanticCustomError("hash_seed", "not a seed")
    return seed


class Engine(Model):
    """The engine, and how the connector is delivered to it."""

    type: Annotated[EngineType, STRUCTURAL, Field(description="Engine that the pods run.")] = (
        EngineType.VLLM
    )
    container_name: Annotated[
        Name | None,
        STRUCTURAL,
        Field(
            description=(
                "Name of the engine's container. If not set, it is the only container with a GPU, "
                "else it is found by command or image."
            )
        ),
    ] = None
    connector: Annotated[
        Connector, STRUCTURAL, Field(description="KV connector that the engine is configured for.")
    ] = Connector.KVTIER
    delivery: Annotated[
        Delivery,
        STRUCTURAL,
        Field(
            description=(
                "How the connector is delivered: InitContainer copies it into a volume, Image "
                "expects it in the engine's image, ImageVolume mounts an image."
            )
        ),
    ] = Delivery.INIT_CONTAINER
    python_path: Annotated[
        str,
        STRUCTURAL,
        Field(
            max_length=4096,
            description=(
                "Value of PYTHONPATH in the engine's image, if any. The variable in the pod "
                "replaces it and must include it."
            ),
        ),
    ] = ""
    daemon: Annotated[
        Daemon,
        STRUCTURAL,
        Field(
            description=(
                "Where tierd runs. Sidecar: in a native sidecar, which mounts the storage. Engine: "
                "in the engine's container, started by the engine."
            )
        ),
    ] = Daemon.SIDECAR
    local_ranks: Annotated[
        Integer | None,
        STRUCTURAL,
        Field(
            ge=1,
            le=64,
            description=(
                "Worker ranks in a pod. If not set, it is derived from the engine's parallel "
                "sizes, else from the GPU limit."
            ),
        ),
    ] = None
    hash_seed: Annotated[
        str,
        STRUCTURAL,
        Field(
            max_length=10,
            pattern=r"^[0-9]+$",
            description=(
                "Value of PYTHONHASHSEED if the pod does not set it. A different value in the pod "
                "is reported."
            ),
        ),
        AfterValidator(_hash_seed),
        Accepts(HASH_SEED_WORDS),
        Scalar(
            cel="self.size() == 0 || int(self) <= 4294967295",
            message=f"must be {HASH_SEED_WORDS}",
            expression=f"'must be {HASH_SEED_WORDS}, got ' + self",
        ),
    ] = "0"
