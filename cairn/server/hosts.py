"""Which Host headers are answered: a defence against DNS rebinding.

A page of any site can have its own name resolve to the address of this server; the browser then
lets the page read the answers. Its requests still name the site in the Host header.
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
"""Characters of a refused Host value that its error shows."""


@dataclass(frozen=True, slots=True)
class HostCheck:
    """The names under which one listener answers.

    Attributes:
        names: host names and addresses, lower case, without ports and brackets; localhost and the
            loopback addresses always belong to them. None: every name.
    """

    names: frozenset[str] | None = None

    @classmethod
    def of(cls, options: ServerOptions, address: str) -> HostCheck:
        """The check of a listener.

        With `allowed_hosts` they, the configured host and loopback are answered. Otherwise only a
        listener on loopback that asks for no key checks: no page of another site has the key, and
        which names a network has for this machine cannot be known here.

        Args:
            options: of the server.
            address: the IP address that the listener is bound to.
        """
        if "*" in options.allowed_hosts:
            return cls()
        unprotected = is_loopback(address) and not options.api_keys
        if not options.allowed_hosts and not unprotected:
            return cls()
        return cls(frozenset(_canonical(host) for host in (options.host, *options.allowed_hosts)))

    def check(self, path: str, headers: Headers) -> None:
        """Accept or refuse a request.

        A request without a Host header passes: browsers always send one. So do /health and /ready:
        load balancers call them by various addresses, and they reveal nothing else.

        Raises:
            HTTPException: 403, the Host header names something else.
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
    """Whether a text is an IP address that only this machine reaches."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _name(value: str) -> str:
    """The name or address of a Host header, without port and brackets; empty for another form."""
    match = HOST.fullmatch(value)
    return _canonical(match[1]) if match is not None else ""


def _canonical(host: str) -> str:
    """A name or an address in the form in which it is compared."""
    host = host.strip("[]").lower().removesuffix(".")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host
