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
import threading
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, Any, cast
from urllib.parse import SplitResult, urlsplit

from engram.errors import EngramError
from engram.images.decode import BadImage, check_bytes, read_encoded
from engram.util.files import open_regular
from engram.util.flag_names import flag
from engram.util.optional import require
from engram.util.text import words

_PORTS = {"http": 80, "https": 443}
_WEB = tuple(_PORTS)
#: Schemes whose address names a bucket, and no machine that a list could choose.
_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "hf")
_SCHEMES = (*_WEB, *_STORES)
_FLAG = "--allow-url {} (allow_url in Python)"  # the same in all processes: it is in the table
_SECONDS = 60.0  # for one image, from the first connection to its last byte
_WAIT = 20.0  # for the next bytes
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_address(source: str) -> bool:
    """Whether this is an address of another file system, such as s3://bucket/file."""
    return "://" in source


def scheme_of(address: str) -> str:
    return address.partition("://")[0].lower()


@dataclass(frozen=True)
class Allowed:
    """What addresses in lists and tables may be: schemes, and hosts that were named.

    Args:
        schemes: Schemes of any bucket or any public host.
        hosts: A scheme, a host and a port (None: any), which may be in a private network.
        stores: Beginnings of addresses of other kinds that the command line itself named.
    """

    schemes: frozenset[str] = frozenset()
    hosts: frozenset[tuple[str, str, int | None]] = frozenset()
    stores: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Allowed:
        """Of a flag: schemes and hosts with commas, such as `s3,https,http://10.0.0.7:9000`."""
        schemes, hosts = set(), set()
        for word in words(text):
            scheme = scheme_of(word)
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
        parts = _parts(source) if scheme_of(source) in _WEB else None
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
        scheme = scheme_of(address)
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


def fetch(address: str, allowed: Allowed, name: str) -> bytes:
    """The image at an address in a list, within the limits; a BadImage if it may not be read."""
    if reason := allowed.refusal(address):
        raise BadImage(f"{name}: {reason}")
    if scheme_of(address) in _WEB:
        return _download(address, allowed, name)
    return read_address(address, name)


def read_address(address: str, name: str) -> bytes:
    """The image at an address that may be read, within the limit of bytes."""
    with open_address(address) as file:
        check_bytes(int(getattr(file, "size", None) or 0), name)
        return read_encoded(file, name)


def open_address(address: str) -> IO[Any]:
    """Open an address with the package that knows its scheme."""
    if scheme_of(address) in ("file", "local"):
        return open_regular(address.partition("://")[2])
    file: IO[Any] = file_systems().open(address, "rb").open()
    return file


def file_systems() -> Any:
    """The package that opens addresses."""
    return require("fsspec", extra="hub-data", purpose="Reading from an address")


# The web


def _download(address: str, allowed: Allowed, name: str) -> bytes:
    """One image over HTTP, without the proxies of the environment: they would connect for us."""
    connections = _Connections(allowed)
    opener = urllib.request.OpenerDirector()
    for handler in (
        connections,
        _Redirects(allowed),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
    ):
        opener.add_handler(handler)
    alarm = threading.Timer(_SECONDS, connections.end)
    alarm.daemon = True
    alarm.start()
    try:
        with opener.open(address, timeout=_WAIT) as response:
            check_bytes(response.length or 0, name)
            data = read_encoded(response, name)
        if connections.late:
            raise OSError(f"it takes longer than {_SECONDS:.0f} seconds")
        return data
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise BadImage(f"{name}: it cannot be downloaded ({reason})") from error
    finally:
        alarm.cancel()
        connections.close()


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect only to what could have been in the list itself."""

    def __init__(self, allowed: Allowed) -> None:
        self._allowed = allowed

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if scheme_of(newurl) not in _WEB or self._allowed.refusal(newurl):
            raise OSError(f"it redirects to {newurl}, which is not allowed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Connections(urllib.request.AbstractHTTPHandler):
    """Opens http and https with connections that check where they lead, and that can be ended."""

    def __init__(self, allowed: Allowed) -> None:
        super().__init__()
        self._allowed, self._open, self.late = allowed, list[socket.socket](), False

    http_request = urllib.request.AbstractHTTPHandler.do_request_
    https_request = urllib.request.AbstractHTTPHandler.do_request_

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connection, "http"), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connection, "https"), request)

    def _connection(self, scheme: str, host: str, **options: Any) -> http.client.HTTPConnection:
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        connection: Any = kinds[scheme](host, **options)
        connection._create_connection = partial(self._connect, scheme)
        return cast("http.client.HTTPConnection", connection)

    def _connect(
        self, scheme: str, place: tuple[str, int], timeout: float, source: object = None
    ) -> socket.socket:
        """Connect to a host that was named, or to one whose addresses are all public."""
        host, port = place
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(address[0]) for *_, address in found]
        if not self._allowed.names(scheme, host, port) and not all(map(is_public, addresses)):
            raise OSError(
                f"{host} is this machine or in a private network; allow it with "
                + _FLAG.format(f"{scheme}://{host}")
            )
        for address in addresses[:-1]:
            with suppress(OSError):
                return self._kept(socket.create_connection((address, port), timeout))
        return self._kept(socket.create_connection((addresses[-1], port), timeout))

    def _kept(self, connected: socket.socket) -> socket.socket:
        self._open.append(connected.dup())  # TLS takes the socket itself away
        return connected

    def end(self) -> None:
        """End what is under way: whoever reads it is at its end."""
        self.late = True
        for connected in self._open:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for connected in self._open:
            connected.close()


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
