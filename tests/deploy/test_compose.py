"""The compose file agrees with the image, the proxy and the flags of the service."""

import ipaddress
import re
from typing import Any

import pytest
import yaml
from tests.support.dockerfiles import read_dockerfile
from tests.support.paths import ROOT

from engram.serve.service_settings import Settings

DEPLOY = ROOT / "deploy"
IMAGE = read_dockerfile(DEPLOY / "Dockerfile")[-1]


@pytest.fixture(scope="module")
def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


def flags(words: list[str]) -> dict[str, str]:
    """Flags and their values, as fields of the settings."""
    pairs = zip(words[::2], words[1::2], strict=True)
    return {flag.removeprefix("--").replace("-", "_"): value for flag, value in pairs}


def test_the_flags_are_settings_that_work(compose: Any) -> None:
    given: dict[str, Any] = flags(compose["services"]["engram"]["command"])
    assert given.pop("allow_host") == "${SITE:?}"
    Settings(
        allow_host=("engram.example.org",), log=given["log"], trust_proxy=(given["trust_proxy"],)
    )
    assert given.keys() == {"log", "trust_proxy"}


def test_the_proxy_is_the_one_that_is_trusted(compose: Any) -> None:
    given = flags(compose["services"]["engram"]["command"])
    proxy = compose["services"]["proxy"]["networks"]["inside"]["ipv4_address"]
    (network,) = compose["networks"]["inside"]["ipam"]["config"]
    assert given["trust_proxy"] == proxy
    assert ipaddress.ip_address(proxy) in ipaddress.ip_network(network["subnet"])


def test_only_the_proxy_can_be_reached_from_outside(compose: Any) -> None:
    services = compose["services"]
    assert "ports" not in services["engram"]
    assert services["proxy"]["ports"] == ["80:80", "443:443"]
    assert services["proxy"]["environment"]["UPSTREAM"] == f"engram:{IMAGE.env['PORT']}"


def test_what_is_mounted_and_built_exists(compose: Any) -> None:
    services = compose["services"]
    build = services["engram"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    mounted = [volume.rsplit(":", 1)[-1] for volume in services["engram"]["volumes"]]
    assert mounted == IMAGE.command("VOLUME")
    sources = [v.split(":")[0] for v in services["proxy"]["volumes"]]
    named = {source for source in sources if not source.startswith("./")} | {"cache"}
    assert compose["volumes"].keys() == named
    assert all((DEPLOY / source).is_file() for source in sources if source.startswith("./"))


def test_every_variable_is_in_the_example(compose: Any) -> None:
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    used = set(re.findall(r"\$\{(\w+)", text)) | {"ENGRAM_TOKEN"}
    example = (DEPLOY / "example.env").read_text(encoding="utf-8")
    assert set(re.findall(r"^#?([A-Z_]+)=", example, re.MULTILINE)) == used
    assert set(compose["services"]["engram"]["environment"]) == {"ENGRAM_ASK_TOKEN", "ENGRAM_TOKEN"}


def test_it_is_stopped_only_after_requests_in_progress(compose: Any) -> None:
    grace = compose["services"]["engram"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > Settings().timeout + 10


def test_it_gets_no_more_rights_than_it_needs(compose: Any) -> None:
    for service in compose["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
