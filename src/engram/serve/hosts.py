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


def is_own_name(header: str, listened: str, more: Iterable[str] = (), reached: str = "") -> bool:
    """Whether a Host header has a name of this machine: the address listened on, or one of `more`.

    `reached` is the address of this machine at which the connection arrived. Where all addresses of
    the machine are listened on, it may be named, too.
    """
    name = host_name(header)
    known = {listened.lower(), *(one.strip("[]").lower() for one in more)}
    if listened in ("0.0.0.0", "::") and reached:
        known.add(reached)
    return is_loopback(name) or name in known
