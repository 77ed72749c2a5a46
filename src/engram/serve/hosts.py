"""Names and addresses: which names a service answers to, and who is a proxy.

A page of another site can let its own name resolve to this machine, and then the browser lets it
read every answer (DNS rebinding). Such a request names that site in its Host header.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

THIS_MACHINE = ("127.0.0.1", "::1")  # where a proxy on this machine connects from


def host_name(header: str) -> str:
    """The name or address in a Host header, without the port."""
    header = header.strip().lower()
    if header.startswith("["):  # an IPv6 address, which has colons of its own
        return header[1:].partition("]")[0]
    return header.partition(":")[0].rstrip(".")


def is_loopback(host: str) -> bool:
    """Whether a name or an address means this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def in_networks(address: str, networks: Iterable[str]) -> bool:
    """Whether an address is one of these, or in one of these networks, such as 10.0.0.0/24."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # of a socket without addresses
        return False
    return any(found in ipaddress.ip_network(network) for network in networks)


class AllowedHosts:
    """The names of this machine for itself, the address that is listened on, and more names."""

    def __init__(self, listened: str, more: Iterable[str] = ()) -> None:
        self._all_interfaces = listened in ("0.0.0.0", "::")
        self._names = {listened.lower(), *(name.strip("[]").lower() for name in more)}

    def allows(self, header: str, reached: str = "") -> bool:
        """Whether a Host header is one of them.

        `reached` is the address of this machine at which the connection arrived. Where all
        addresses of the machine are listened on, it may be named, too.
        """
        name = host_name(header)
        reachable = self._all_interfaces and name == reached
        return is_loopback(name) or name in self._names or (reachable and bool(name))
