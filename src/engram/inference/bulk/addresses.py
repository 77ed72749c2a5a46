"""Addresses that a list or table names: read only where the caller allowed it.

A list may come from a stranger, so an address in it is an attempt to make this machine fetch
something. `Allowed` says which schemes may be read; `fetch` reads one address within limits. What
is fetched over HTTP never comes from this machine or a private network unless that host was named:
the address is checked where the connection is made, so neither a redirect nor a changed name gets
around it. Decoders import it, and wait for no torch.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import string
import threading
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import IO, Any
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from engram.errors import EngramError, flag
from engram.images.decode import BadImage, check_bytes, read_encoded
from engram.util.files import open_regular
from engram.util.optional import require
from engram.util.text import words

_PORTS = {"http": 80, "https": 443}
_WEB = tuple(_PORTS)
# Schemes whose address names a bucket, and no machine that a list could choose.
_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "hf")
_SCHEMES = (*_WEB, *_STORES)
_FLAG = "--allow-url {} (allow_url in Python)"  # the same in all processes: it is in the table
_SECONDS = 60.0  # for one image, from the first connection to its last byte
_WAIT = 20.0  # for the next bytes
_REDIRECTS = 10
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_address(source: str) -> bool:
    """Whether this is an address of another file system, such as s3://bucket/file."""
    return "://" in source


def scheme_in(address: str) -> str:
    return address.partition("://")[0].lower()


@dataclass(frozen=True)
class Allowed:
    """Addresses that lists and tables may name: schemes, hosts of any network, and buckets."""

    schemes: frozenset[str] = frozenset()  # of any bucket or any public host
    hosts: frozenset[tuple[str, str, int | None]] = frozenset()  # scheme, host, port (None: any)
    stores: tuple[str, ...] = ()  # beginnings of addresses that the command line itself named

    @classmethod
    def parse(cls, text: str) -> Allowed:
        """Parse schemes and hosts with commas, such as `s3,https,http://10.0.0.7:9000`."""
        schemes, hosts = set(), set()
        for word in words(text):
            scheme = scheme_in(word)
            if scheme not in _SCHEMES:
                known = ", ".join(_SCHEMES)
                raise EngramError(
                    f"{flag('allow_url')} has {word!r}; give schemes with commas between them "
                    f"({known}), or hosts of your own network such as http://10.0.0.7:9000."
                )
            if not is_address(word):
                schemes.add(scheme)
                continue
            parts = _parts(word)
            if scheme not in _WEB or parts is None or parts.path.strip("/"):
                raise EngramError(
                    f"{flag('allow_url')} has {word!r}; a host is given as http://HOST, "
                    "http://HOST:PORT or the same with https."
                )
            hosts.add((scheme, str(parts.hostname), parts.port))
        return cls(frozenset(schemes), frozenset(hosts))

    def beside(self, source: str) -> Allowed:
        """This, and what is beside a list that the command line gave by its address."""
        parts = _parts(source) if scheme_in(source) in _WEB else None
        if parts is not None:
            host = (parts.scheme, str(parts.hostname), parts.port)
            return replace(self, hosts=self.hosts | {host})
        return replace(self, stores=(*self.stores, source.rpartition("/")[0] + "/"))

    def names(self, scheme: str, host: str, port: int) -> bool:
        """Whether a host was named, so that it may be in a private network."""
        own = (scheme, host.lower())
        return not {(*own, None), (*own, port)}.isdisjoint(self.hosts)

    def refusal(self, address: str) -> str:
        """Why an address is not read, as the end of a sentence; "" if it may be."""
        scheme = scheme_in(address)
        beginnings = [store for store in self.stores if address.startswith(store)]
        if beginnings and "::" not in address.removeprefix(max(beginnings)):
            return ""
        if scheme in _WEB:
            parts = _parts(address)
            if parts is None:
                return "it is not a valid address"
            port = parts.port or _PORTS[scheme]
            if scheme in self.schemes or self.names(scheme, str(parts.hostname), port):
                return ""
        elif "::" in address:
            return "chained protocols are not read from a list or table"
        elif scheme in self.schemes:
            return ""
        how = f"; allow it with {_FLAG.format(scheme)}" if scheme in _SCHEMES else ""
        return f"a list or table names this address, and such are not read{how}"


#: No address in a list or table is read.
NOWHERE = Allowed()


def _parts(address: str) -> SplitResult | None:
    """The parts of a web address; None if it has no host, a wrong port, or a password."""
    try:
        parts = urlsplit(address)
        whole = bool(parts.hostname) and parts.port != 0 and parts.username is None
    except ValueError:
        return None
    return parts._replace(scheme=parts.scheme.lower()) if whole else None


def fetch(address: str, allowed: Allowed | None, name: str) -> bytes:
    """The image at an address, within the limits; a BadImage if it may not be read.

    `allowed` is None for an address that the command line names.
    """
    if allowed is not None and (reason := allowed.refusal(address)):
        raise BadImage(f"{name}: {reason}")
    if allowed is not None and scheme_in(address) in _WEB:
        return _download(address, allowed, name)
    with open_source(address) as file:
        check_bytes(int(getattr(file, "size", None) or 0), name)
        return read_encoded(file, name)


def open_source(source: str) -> IO[Any]:
    """Open a path, or an address with the package that knows its scheme."""
    if not is_address(source):
        return open_regular(source)
    if scheme_in(source) in ("file", "local"):
        return open_regular(source.partition("://")[2])
    file: IO[Any] = file_systems().open(source, "rb").open()
    return file


def file_systems() -> Any:
    """The package that opens addresses."""
    return require("fsspec", extra="hub-data", purpose="Reading from an address")


# The web


def _download(address: str, allowed: Allowed, name: str) -> bytes:
    """One image over HTTP, without the proxies of the environment: they would connect for us."""
    sockets: list[socket.socket] = []
    late = threading.Event()

    def end() -> None:
        late.set()
        for connected in sockets:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)  # whoever reads it is at its end

    alarm = threading.Timer(_SECONDS, end)
    alarm.daemon = True
    alarm.start()
    try:
        for _ in range(_REDIRECTS):
            with closing(_connection(address, allowed, sockets)) as connection:
                parts = urlsplit(address)
                path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                connection.request("GET", path, headers={"User-Agent": "engram"})
                response = connection.getresponse()
                place = response.getheader("Location", "")
                if 300 <= response.status < 400 and place:
                    address = urljoin(address, quote(place, safe=string.punctuation))
                    if scheme_in(address) not in _WEB or allowed.refusal(address):
                        raise OSError(f"it redirects to {address}, which is not allowed")
                    continue
                if not 200 <= response.status < 300:
                    raise OSError(f"{response.status} {response.reason}")
                check_bytes(response.length or 0, name)
                data = read_encoded(response, name)
            if late.is_set():
                raise OSError(f"it takes longer than {_SECONDS:.0f} seconds")
            return data
        raise OSError("it redirects too often")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise BadImage(f"{name}: it cannot be downloaded ({error})") from error
    finally:
        alarm.cancel()
        for connected in sockets:
            connected.close()


def _connection(
    address: str, allowed: Allowed, sockets: list[socket.socket]
) -> http.client.HTTPConnection:
    """Connect to a host that was named, or to one whose addresses are all public.

    A copy of the socket is added to `sockets`: TLS takes the socket itself away.
    """
    parts, scheme = urlsplit(address), scheme_in(address)
    host, port = str(parts.hostname), parts.port or _PORTS[scheme]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(place[0]) for *_, place in found]
    if not allowed.names(scheme, host, port) and not all(map(is_public, addresses)):
        raise OSError(
            f"{host} is this machine or in a private network; allow it with "
            + _FLAG.format(f"{scheme}://{host}")
        )
    for number, ip in enumerate(addresses, start=1):
        try:
            connected = socket.create_connection((ip, port), _WAIT)
            break
        except OSError:
            if number == len(addresses):
                raise
    sockets.append(connected.dup())
    connection = http.client.HTTPConnection(host, port)
    if scheme == "https":
        connection = http.client.HTTPSConnection(host, port)
        connected = ssl.create_default_context().wrap_socket(connected, server_hostname=host)
    connection.sock = connected  # so it does not connect by itself
    return connection


def is_public(address: str) -> bool:
    """Whether an IP address, or the one inside of it, belongs to the public internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    inner = None
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo or (None, None))[1]
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    ip = inner or ip
    return ip.is_global and not ip.is_multicast and not ip.is_reserved
