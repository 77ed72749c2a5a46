"""An address in a list is read only where that was allowed, and never from a private network."""

from __future__ import annotations

import importlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tests.support.images import encoded, gradient

from engram import EngramError
from engram.images.decode import BadImage
from engram.inference.bulk.addresses import NOWHERE, Allowed, fetch, is_public
from engram.inference.bulk.sources import read_items

PNG = encoded(gradient(), "PNG")


class _Web(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        self.send_response(200)
        if self.path == "/large":
            self.send_header("Content-Length", "999999999999")
        self.end_headers()
        self.wfile.write(PNG)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def web() -> Iterator[tuple[str, list[str]]]:
    """The address of a server on this machine, and what it was asked for."""
    _Web.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Web)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", _Web.asked
    server.shutdown()
    server.server_close()


def test_no_address_of_a_list_is_read_unless_it_is_allowed(
    tmp_path: Path, web: tuple[str, list[str]]
) -> None:
    address, asked = web
    lines = [f"{address}/a.png", f"simplecache::{address}/a.png", "reference://x", "s3://b/a.png"]
    (tmp_path / "list.txt").write_text("\n".join([*lines, "file:///dev/zero"]))
    for item in read_items([str(tmp_path / "list.txt")]):
        with pytest.raises(BadImage, match="list or table"):
            item.read()
    assert not asked


def test_a_scheme_allows_public_hosts_only(web: tuple[str, list[str]]) -> None:
    address, asked = web
    port = address.rpartition(":")[2]
    for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0.0.0.0", "2130706433"):
        with pytest.raises(BadImage, match=r"private network|downloaded"):
            fetch(f"http://{host}:{port}/a.png", Allowed.parse("http,https,s3"), "x")
    assert not asked


def test_a_host_that_is_named_is_read(web: tuple[str, list[str]]) -> None:
    address, _ = web
    assert fetch(f"{address}/a.png", Allowed.parse(address), "x") == PNG
    assert fetch(f"{address}/to//a.png", Allowed.parse("http://127.0.0.1"), "x") == PNG
    with pytest.raises(BadImage, match="not read"):
        fetch(f"{address}/a.png", Allowed.parse("http://127.0.0.1:1"), "x")


@pytest.mark.parametrize(
    "target", ["http://localhost:{}/a.png", "file:///etc/hostname", "https://127.0.0.1:{}/a.png"]
)
def test_a_redirect_leads_to_nothing_that_was_not_allowed(
    web: tuple[str, list[str]], target: str
) -> None:
    address, asked = web
    allowed = Allowed.parse(f"{address},http")
    with pytest.raises(BadImage, match="downloaded"):
        fetch(f"{address}/to/{target.format(address.rpartition(':')[2])}", allowed, "x")
    assert len(asked) == 1


def test_a_download_has_a_limit_of_bytes_and_time(
    web: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, _ = web
    with pytest.raises(BadImage, match="limit"):
        fetch(f"{address}/large", Allowed.parse(address), "x")
    monkeypatch.setattr("engram.inference.bulk.addresses._SECONDS", 0.1)
    with _SilentServer() as silent, pytest.raises(BadImage, match="downloaded"):
        fetch(silent, Allowed.parse(silent), "x")


class _SilentServer:
    """Accepts, and says nothing."""

    def __enter__(self) -> str:
        self._socket = socket.create_server(("127.0.0.1", 0))
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def test_a_store_is_read_if_its_scheme_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.import_module("fsspec.registry")._registry
    monkeypatch.setitem(known, "s3", MemoryFileSystem)
    fsspec.filesystem("s3").pipe("s3://b/a.png", PNG)
    with pytest.raises(BadImage, match=r"--allow-url s3"):
        fetch("s3://b/a.png", Allowed.parse("https"), "x")
    assert fetch("s3://b/a.png", Allowed.parse("s3"), "x") == PNG
    with pytest.raises(BadImage, match="chained"):
        fetch("simplecache::s3://b/a.png", Allowed.parse("s3"), "x")


def test_what_is_beside_a_list_at_an_address_is_read(web: tuple[str, list[str]]) -> None:
    address, _ = web
    assert fetch(f"{address}/a.png", NOWHERE.beside(f"{address}/list.txt"), "x") == PNG
    near = NOWHERE.beside("memory://near/list.txt")
    fsspec.filesystem("memory").pipe("/near/a.png", PNG)
    assert fetch("memory://near/a.png", near, "x") == PNG
    for other in ("memory://two/a.png", "memory://near/a.png::http://localhost/"):
        with pytest.raises(BadImage):
            fetch(other, near, "x")


@pytest.mark.parametrize(
    "text", ["ftp", "reference", "simplecache::https", "s3://bucket", "http://h/path", "http://u@h"]
)
def test_what_cannot_be_allowed_is_a_sentence(text: str) -> None:
    with pytest.raises(EngramError, match="allow_url"):
        Allowed.parse(text)


def test_private_addresses_are_not_public() -> None:
    private = "127.0.0.1 10.1.2.3 192.168.0.1 172.16.0.1 169.254.169.254 100.64.0.1 0.0.0.0 ::1 "
    private += "fe80::1%eth0 fd00::1 ::ffff:10.0.0.1 64:ff9b::7f00:1 2002:7f00:1:: 224.0.0.1"
    assert not any(map(is_public, private.split()))
    assert is_public("93.184.215.14")
    assert is_public("2606:2800:21f:cb07:6820:80da:af6b:8b2c")
