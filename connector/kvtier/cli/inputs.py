"""Input of the commands: policy files and the values of options.

Needs neither typer nor rich, so that the demo can use it.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from kvtier.config.models import HttpEndpoint
from kvtier.errors import ConfigurationError, KVTierError
from kvtier_operator.api.documents import MAX_FILE_BYTES, parse
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.quantity import Quantity, QuantityError
from kvtier_operator.api.validation import InvalidDocumentError

STANDARD_INPUT = "-"
MAX_PORT = 65_535


class CommandError(KVTierError):
    """A command could not do its work, although its input is valid: exit status 1."""


class OptionError(ConfigurationError):
    """An option with an invalid value. ``requirement`` is a clause such as "must be positive"."""

    def __init__(self, option: str, value: object, requirement: str) -> None:
        super().__init__(option, value, requirement)
        self.args = (f'{option}: Invalid value: "{value}": {requirement}',)


def read(name: str) -> bytes:
    """The content of a file, or of standard input for ``-``. Raises ``OSError``.

    Reads at most one byte more than the limit, which ``parse`` then reports.
    """
    if name == STANDARD_INPUT:
        return sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    with Path(name).open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)


def display_name(name: str) -> str:
    """The file's name in messages."""
    return "standard input" if name == STANDARD_INPUT else name


def load_policies(file: str, name: str | None = None) -> list[KVTierPolicy]:
    """The policies of a file, or the one with that name.

    Raises ``ConfigurationError`` if a policy is invalid or the name is unknown, and ``OSError``.
    """
    checked = parse(read(file))
    errors = [error for entry in checked for error in entry.errors]
    if errors:
        raise InvalidDocumentError(errors)
    policies = [entry.policy for entry in checked if entry.policy is not None]
    if name is None:
        return policies
    named = [policy for policy in policies if policy.metadata.name == name]
    if not named:
        raise OptionError("--policy", name, f"must be one of: {_names(policies)}")
    return named


def load_policy(file: str, name: str | None = None) -> KVTierPolicy:
    """The only policy of a file, or the one with that name. Raises as ``load_policies``."""
    return only_policy(file, load_policies(file, name))


def only_policy(file: str, policies: list[KVTierPolicy]) -> KVTierPolicy:
    """The policy in a list of one. Raises ``OptionError``."""
    if len(policies) != 1:
        requirement = "must hold one policy; select a policy with --policy NAME"
        raise OptionError(display_name(file), _names(policies), requirement)
    return policies[0]


def parse_assignment(option: str, text: str, form: str) -> tuple[str, str]:
    """The two sides of ``NAME=VALUE``. Raises ``OptionError``."""
    name, separator, value = text.partition("=")
    if not separator or not name or not value:
        raise OptionError(option, text, f"must have the form {form}")
    return name, value


def parse_number(option: str, text: str, form: str = "") -> float:
    """A finite number. Raises ``OptionError``."""
    suffix = f", in the form {form}" if form else ""
    try:
        number = float(text)
    except ValueError:
        raise OptionError(option, text, f"must be a number{suffix}") from None
    if not math.isfinite(number):
        raise OptionError(option, text, f"must be a finite number{suffix}")
    return number


def parse_size(option: str, text: str) -> int:
    """A size in bytes, such as ``500Gi``. Raises ``OptionError``."""
    requirement = "must be a size above zero, such as 500Gi, 2T or 4096"
    try:
        size = Quantity.parse(text).size_bytes
    except QuantityError as error:
        raise OptionError(option, text, f"{requirement} ({error})") from error
    if size <= 0:
        raise OptionError(option, text, requirement)
    return size


def parse_endpoint(option: str, text: str) -> HttpEndpoint:
    """``HOST:PORT``. Raises ``OptionError``."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= MAX_PORT
    if not separator or not host or not is_port:
        raise OptionError(
            option, text, "must have the form HOST:PORT, such as 127.0.0.1:9400 or [::1]:0"
        )
    return HttpEndpoint(host=host, port=int(port))


def _names(policies: list[KVTierPolicy]) -> str:
    return ", ".join(policy.metadata.name for policy in policies)
