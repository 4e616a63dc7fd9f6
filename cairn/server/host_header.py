"""Check of the Host header, a defence against DNS rebinding.

A website can make its own name resolve to the address of this server; the browser then lets its
pages read responses of this server. Their requests still have the site's name in the Host header.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from cairn.server.auth import OPEN_PATHS
from cairn.server.options import ServerOptions

HOST = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]+)(?::\d*)?")
LONGEST_QUOTED = 200
"""Maximum number of characters of a refused Host value that the error quotes."""


@dataclass(frozen=True, slots=True)
class HostCheck:
    """The Host values that one listener accepts.

    Attributes:
        names: host names and addresses in lower case, without ports and brackets. localhost and the
            loopback addresses are always accepted. None accepts every Host.
    """

    names: frozenset[str] | None = None

    @classmethod
    def of(cls, options: ServerOptions, address: str) -> HostCheck:
        """The check for a listener.

        With `allowed_hosts`, those names, `host` and loopback are accepted. Without it, only a
        loopback listener that needs no API key checks the header: other sites do not have the
        key, and the names of this machine in its network are unknown.

        Args:
            options: options of the server.
            address: IP address that the listener is bound to.
        """
        if "*" in options.allowed_hosts:
            return cls()
        unprotected = is_loopback(address) and not options.api_keys
        if not options.allowed_hosts and not unprotected:
            return cls()
        return cls(frozenset(_canonical(host) for host in (options.host, *options.allowed_hosts)))

    def check(self, path: str, headers: Headers) -> None:
        """Check the Host header of a request.

        A request without a Host header is accepted, because browsers always send one. /health and
        /ready accept every Host, because load balancers use various addresses.

        Raises:
            HTTPException: 403 if the Host is not accepted.
        """
        value = headers.get("host")
        if self.names is None or value is None or path in OPEN_PATHS:
            return
        name = _name(value)
        if name in self.names or name == "localhost" or is_loopback(name):
            return
        raise HTTPException(
            403,
            f"this server does not answer to the Host {value[:LONGEST_QUOTED]!r}: use localhost or "
            "an address that it listens on, or start it with --allowed-hosts and this name",
        )


def is_loopback(address: str) -> bool:
    """Whether `address` is a loopback IP address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _name(value: str) -> str:
    """The name or address in a Host header, without port and brackets; empty if it is malformed."""
    match = HOST.fullmatch(value)
    return _canonical(match[1]) if match is not None else ""


def _canonical(host: str) -> str:
    """Normalize a host name or IP address for comparison."""
    host = host.strip("[]").lower().removesuffix(".")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host
