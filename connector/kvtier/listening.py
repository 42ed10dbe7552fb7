"""Sockets that servers listen on, the same for tierd and the operator.

In a cluster with IPv6 only, a pod has no IPv4 address. "Every address" therefore means both
families, on one socket, so that a port that the kernel chooses is the same for both.
"""

from __future__ import annotations

import errno
import socket

EVERY_ADDRESS = "0.0.0.0"  # noqa: S104  (a name; each user says why)
"""The host that stands for every address of the machine or pod, of IPv4 and of IPv6."""
_NO_IPV6 = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT})


def listen(host: str, port: int, backlog: int = 128) -> socket.socket:
    """A TCP socket that listens on ``host``: an address, or ``EVERY_ADDRESS``. ``port`` 0: any free
    port.

    Where the kernel has no IPv6, ``EVERY_ADDRESS`` means those of IPv4. Raises ``OSError``.
    """
    if host == EVERY_ADDRESS and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)
