"""The proxy's configuration with a real proxy: TLS, uploads, limits, and who the client is."""

import io
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from PIL import Image
from tests.support.nursery import Nursery
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.units import Started, answers, start_unit
from tests.support.waiting import wait_until

from engram.serve.service_settings import Settings

SITE = "engram.test"
ASKING, ATTACHING = ({"Authorization": f"Bearer {token}"} for token in ("ask", "attach"))


@pytest.fixture(scope="module")
def caddy() -> str:
    found = shutil.which("caddy")
    if found is None:
        pytest.skip("there is no caddy to run the proxy with: make deploy-tools")
    return found


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for the site that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, SITE)]), datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SITE)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "site.crt", folder / "site.key"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    secret = serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, secret))
    return paths


def adapted(caddy: str, site: str, upstream: str) -> dict[str, Any]:
    """The Caddyfile as Caddy understands it."""
    command = [caddy, "adapt", "--adapter", "caddyfile", "--config", ROOT / "deploy" / "Caddyfile"]
    env = {**os.environ, "SITE": site, "UPSTREAM": upstream}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no warning either
    configuration: dict[str, Any] = json.loads(done.stdout)
    return configuration


@dataclass
class Proxied:
    """A service of the unit behind the proxy of the Caddyfile."""

    service: Started
    port: int
    trusted: ssl.SSLContext

    def ask(self, method: str, path: str, source: str = "127.0.0.1", **more: Any) -> httpx.Response:
        transport = httpx.HTTPTransport(verify=self.trusted, local_address=source)
        headers = {"Host": SITE, **more.pop("headers", {})}
        with httpx.Client(transport=transport, timeout=60) as client:
            return client.request(
                method,
                f"https://127.0.0.1:{self.port}{path}",
                headers=headers,
                extensions={"sni_hostname": SITE},
                **more,
            )


@pytest.fixture(scope="module")
def proxied(
    caddy: str, nursery: Nursery, bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxied]:
    folder = tmp_path_factory.mktemp("proxy")
    own = Path(shutil.copytree(bundle, folder / "bundle"))
    service = start_unit(nursery, SITE, own, ENGRAM_ASK_TOKEN="ask", ENGRAM_TOKEN="attach")
    port = free_port()
    public, key = certificate(folder)
    configuration = adapted(caddy, f"{SITE}:{port}", f"127.0.0.1:{service.port}")
    # What only a public machine can do: get a certificate, and listen on ports 80 and 443.
    configuration["admin"] = {"disabled": True}
    files = [{"certificate": str(public), "key": str(key)}]
    configuration["apps"]["tls"] = {"certificates": {"load_files": files}}
    (server,) = configuration["apps"]["http"]["servers"].values()
    server["listen"] = [f"127.0.0.1:{port}"]
    server["automatic_https"] = {"disable_redirects": True}
    (folder / "caddy.json").write_text(json.dumps(configuration))
    home = {name: str(folder) for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [caddy, "run", "--config", folder / "caddy.json"],
            env={**os.environ, **home},
            stdout=log,
            stderr=log,
        )
    wait_until(lambda: answers(port) or process.poll() is not None)
    assert process.poll() is None, (folder / "log").read_text()
    yield Proxied(service, port, ssl.create_default_context(cafile=str(public)))
    process.kill()
    process.wait()
    service.stop(signal.SIGKILL)


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 20), (200, 30, 30)).save(file, "PNG")
    return file.getvalue()


def test_an_upload_is_answered_over_tls(proxied: Proxied) -> None:
    files = {"image": ("red.png", picture())}
    answer = proxied.ask("POST", "/v1/predict", files=files, headers=ASKING)
    assert answer.status_code == 200, answer.text
    assert set(answer.json()["images"][0]["tasks"]) == {"base", "colour"}
    assert proxied.ask("POST", "/v1/predict", files=files).status_code == 401


def test_the_page_is_shown_with_its_own_headers_and_the_proxys(proxied: Proxied) -> None:
    page = proxied.ask("GET", "/")
    assert page.status_code == 200
    assert "<!doctype html>" in page.text
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert page.headers["Strict-Transport-Security"] == "max-age=31536000"


def test_the_metrics_are_for_inside(proxied: Proxied) -> None:
    assert proxied.ask("GET", "/metrics", headers=ASKING).status_code == 404
    inside = f"http://127.0.0.1:{proxied.service.port}/metrics"
    assert httpx.get(inside, headers=ASKING, timeout=60).status_code == 200


@pytest.mark.parametrize("more", [0, 20_000_000])
def test_a_body_that_is_too_large_is_refused_with_a_sentence(proxied: Proxied, more: int) -> None:
    files = {"image": ("large.png", bytes(Settings().max_body + more))}
    answer = proxied.ask("POST", "/v1/predict", files=files, headers=ASKING)
    assert answer.status_code == 413
    assert "64,000,000" in answer.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "most"),
    [("POST", "/v1/predict", 100_000_000), ("PUT", "/v1/tasks/new", 300_000_000)],
)
def test_a_length_that_is_far_too_large_ends_at_the_proxy(
    proxied: Proxied, method: str, path: str, most: int
) -> None:
    """By what is declared: nothing of that size has to be sent."""
    headers = "Authorization: Bearer attach\r\nContent-Type: application/json"
    plain = socket.create_connection(("127.0.0.1", proxied.port), timeout=60)
    with plain, proxied.trusted.wrap_socket(plain, server_hostname=SITE) as connection:
        head = f"{method} {path} HTTP/1.1\r\nHost: {SITE}\r\n{headers}\r\n"
        connection.sendall(f"{head}Content-Length: {most}\r\n\r\n{{".encode())
        assert connection.recv(10_000).startswith(b"HTTP/1.1 413 ")


def test_a_task_is_attached_through_it(proxied: Proxied, bundle: Path) -> None:
    data = (bundle / "colour.safetensors").read_bytes()
    assert proxied.ask("DELETE", "/v1/tasks/colour", headers=ASKING).status_code == 401
    again = proxied.ask("PUT", "/v1/tasks/colour", content=data, headers=ATTACHING)
    assert again.status_code in (200, 201), again.text


def test_the_service_sees_who_the_client_is_and_not_who_it_says_it_is(proxied: Proxied) -> None:
    headers = {**ASKING, "X-Forwarded-For": "203.0.113.9"}
    assert proxied.ask("GET", "/v1/tasks", "127.0.0.2", headers=headers).status_code == 200

    def clients() -> list[str]:  # of whole lines; the log is written after the answer
        lines = proxied.service.running.stderr.rpartition("\n")[0].splitlines()
        log = [json.loads(line) for line in lines]
        return [line["client"] for line in log if line.get("path") == "/v1/tasks"]

    wait_until(clients)
    assert clients() == ["127.0.0.2"]


def test_more_clients_than_one_address_may_have_connections_are_answered(proxied: Proxied) -> None:
    """The service sees one address, that of the proxy."""
    count, pid = Settings().client_connections + 20, proxied.service.running.pid
    head = f"POST /v1/predict HTTP/1.1\r\nHost: {SITE}\r\nContent-Type: application/json\r\n"
    asking = f"Authorization: {ASKING['Authorization']}\r\nContent-Length: 2\r\n\r\n{{"
    clients = list[ssl.SSLSocket]()
    for i in range(count):
        plain = socket.create_connection(
            ("127.0.0.1", proxied.port), 60, (f"127.0.1.{1 + i % 4}", 0)
        )
        clients.append(proxied.trusted.wrap_socket(plain, server_hostname=SITE))
        clients[-1].sendall((head + asking).encode())
    wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) >= count)
    for client in clients:
        client.sendall(b"}")
    answers = {client.recv(65536).split()[1] for client in clients}
    for client in clients:
        client.close()
    assert answers == {b"422"}


def test_the_limits_are_above_those_of_the_service(caddy: str) -> None:
    (server,) = adapted(caddy, SITE, "engram:8000")["apps"]["http"]["servers"].values()
    settings, text = Settings(), json.dumps(server)
    sizes = [int(size) for size in re.findall(r'"max_size": (\d+)', text)]
    assert len(sizes) == 2
    for size, own in zip(sorted(sizes), (settings.max_body, settings.max_engram), strict=True):
        assert own < size < 2 * own
    assert server["read_timeout"] / 1e9 > settings.timeout
    (idle,) = re.findall(r'"keep_alive": {"idle_timeout": (\d+)', text)
    assert int(idle) / 1e9 < 10  # after which the service closes a connection
