"""The part of a policy about the engine and how the connector gets into it."""

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
    """Whose configuration the engine is given."""

    KVTIER = "KVTier"
    OFFLOADING = "Offloading"
    LMCACHE = "LMCache"


class Delivery(StrEnum):
    """How the connector reaches the engine's image."""

    INIT_CONTAINER = "InitContainer"
    IMAGE = "Image"
    IMAGE_VOLUME = "ImageVolume"


HASH_SEED_WORDS = "a decimal number from 0 to 4294967295, in quotes"


def _hash_seed(seed: str) -> str:
    if not (seed.isascii() and seed.isdigit() and len(seed) <= 10 and int(seed) < 1 << 32):
        raise PydanticCustomError("hash_seed", "not a seed")
    return seed


class Engine(Model):
    """The engine and how the connector gets into it."""

    type: Annotated[EngineType, STRUCTURAL, Field(description="The engine.")] = EngineType.VLLM
    container_name: Annotated[
        Name | None,
        STRUCTURAL,
        Field(
            description=(
                "The engine's container; if not set, the only one with a GPU, else by command or "
                "image."
            )
        ),
    ] = None
    connector: Annotated[
        Connector, STRUCTURAL, Field(description="Whose configuration the engine is given.")
    ] = Connector.KVTIER
    delivery: Annotated[
        Delivery,
        STRUCTURAL,
        Field(
            description="How the connector reaches the engine's image: copied in by an init container, "
            "part of "
            "it, or an image volume."
        ),
    ] = Delivery.INIT_CONTAINER
    python_path: Annotated[
        str,
        STRUCTURAL,
        Field(
            max_length=4096,
            description="What the image's own PYTHONPATH holds, if it has one: setting the variable in a "
            "pod "
            "replaces it.",
        ),
    ] = ""
    daemon: Annotated[
        Daemon,
        STRUCTURAL,
        Field(
            description="Where tierd runs: in a sidecar with the storage in its mounts, or started by the "
            "engine in its own container."
        ),
    ] = Daemon.SIDECAR
    local_ranks: Annotated[
        Integer | None,
        STRUCTURAL,
        Field(
            ge=1,
            le=64,
            description=(
                "Worker ranks in a pod; if not set, from the engine's parallel sizes, else the GPU "
                "limit."
            ),
        ),
    ] = None
    hash_seed: Annotated[
        str,
        STRUCTURAL,
        Field(
            max_length=10,
            pattern=r"^[0-9]+$",
            description="PYTHONHASHSEED, set where absent; another value in the pod is reported.",
        ),
        AfterValidator(_hash_seed),
        Accepts(HASH_SEED_WORDS),
        Scalar(
            cel="self.size() == 0 || int(self) <= 4294967295",
            message=f"must be {HASH_SEED_WORDS}",
            expression=f"'must be {HASH_SEED_WORDS}, got ' + self",
        ),
    ] = "0"
