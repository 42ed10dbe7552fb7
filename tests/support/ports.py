"""Ports that tests give to servers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of loopback that the kernel gives to no other program meanwhile. A server that reuses
    addresses can listen on it, because this socket does not listen."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def loopbacks() -> list[str]:
    """The loopback addresses of this machine: that of IPv4, and of IPv6 if it has that."""
    found = ["127.0.0.1"]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as tried:
        tried.bind(("::1", 0))
        found.append("::1")
    return found
