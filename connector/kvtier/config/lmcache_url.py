"""Which storage URLs an lmcache tier takes: a subset of what LMCache's own parser takes.

Used by the topology document and by the operator's policy, so that both reject the same URLs. Pure.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import SplitResult, parse_qsl, urlsplit

SCHEMES: Final = ("redis", "rediss", "lm", "fs")
REDIS_SCHEMES: Final = ("redis", "rediss")
"""Redis and Valkey, which speak the same protocol; ``rediss`` with TLS."""
REMOTE_SCHEMES: Final = ("redis", "rediss", "lm")
"""What the operator renders: a pod has no volume for the directory of ``fs``."""
CREDENTIAL_SCHEMES: Final = REDIS_SCHEMES
REDIS_OPTIONS: Final = frozenset(
    {"client_name", "protocol", "ssl_ca_certs", "ssl_cert_reqs", "ssl_check_hostname"}
)
_TLS_OPTION: Final = "ssl_"
_OPTION_VALUES: Final = {
    "protocol": ("2", "3"),
    "ssl_cert_reqs": ("none", "optional", "required"),
    "ssl_check_hostname": ("true", "false"),
}
"""What the Redis client takes of these, when it connects: it fails with others only then."""
REMOTE_PATTERN: Final = (
    r"^(rediss?://[^/?#@:]*[^/?#@]+(/[0-9]*)?([?][^#]*)?|lm://[^/?#@]+:[0-9]+/?)$"
)
"""What the API server checks of a URL with one of ``REMOTE_SCHEMES`` (RE2). ``requirement`` checks
more."""
_MAX_PORT = 65_535


def requirement(url: str, schemes: tuple[str, ...] = SCHEMES) -> str:
    """What ``url`` must be, if it is not valid; otherwise the empty string."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "must be a URL with a port between 1 and 65535"
    if parts.scheme not in schemes or not url.startswith(f"{parts.scheme}://"):
        return "must start with " + " or ".join(f"{scheme}://" for scheme in schemes)
    if parts.scheme in REMOTE_SCHEMES and any(each.isspace() for each in url):
        return "must not contain spaces"
    if "@" in parts.netloc:
        return "must not contain a user or a password; use credentials"
    if not parts.hostname:
        return "must name a host"
    if parts.fragment:
        return "must not have a fragment"
    if port is not None and not 1 <= port <= _MAX_PORT and parts.scheme != "fs":
        return "must be a URL with a port between 1 and 65535"
    if parts.scheme in REDIS_SCHEMES:
        return _redis(parts)
    if port is None:
        return f"must name a port: LMCache requires one with {parts.scheme}://"
    if parts.query:
        return f"must not have options: {parts.scheme}:// has none"
    if parts.scheme == "lm":
        return "" if parts.path in ("", "/") else "must not have a path with lm://"
    return _directory(parts.path)


def _redis(parts: SplitResult) -> str:
    database = parts.path.strip("/")
    if database and not (database.isascii() and database.isdigit()):
        return "must have the number of a database as its path, or none"
    options = parse_qsl(parts.query, keep_blank_values=True)
    for option, value in options:
        if option not in REDIS_OPTIONS:
            return "must have no options but " + ", ".join(sorted(REDIS_OPTIONS))
        if option.startswith(_TLS_OPTION) and parts.scheme != "rediss":
            return f"must start with rediss:// for the option {option}"
        values = _OPTION_VALUES.get(option)
        if values is not None and value not in values:
            return f"must have one of {', '.join(values)} as the option {option}"
        if not value or not value.isprintable() or " " in value:
            return f"must have a text without spaces as the option {option}"
    if len(dict(options)) < len(options):
        return "must have each option once"
    return ""


def _directory(path: str) -> str:
    if not path.startswith("/") or path.strip("/") == "" or ".." in path.split("/"):
        return "must name an absolute directory with fs://, without .."
    if "," in path or "%" in path:
        return "must name one directory, without , and %"
    return ""


def printable(url: str) -> str:
    """``url`` for messages, without what may be a password: users write one where none belongs."""
    if "@" in url:
        return f"{url.partition(':')[0]}://***" if "://" in url.partition("@")[0] else "***"
    for mark in "?#":
        before, found, _ = url.partition(mark)
        url = f"{before}{mark}***" if found else url
    return url


def takes_credentials(url: str) -> bool:
    """Whether the back end of a valid ``url`` has users and passwords."""
    return urlsplit(url).scheme in CREDENTIAL_SCHEMES
