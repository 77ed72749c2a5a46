"""A service answers to its own names and to no others."""

from __future__ import annotations

import pytest

from engram.serve.hosts import host_name, in_networks, is_loopback, is_own_name


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8000", "localhost"),
        ("example.com.:80", "example.com"),
        ("[::1]:8000", "::1"),
        ("127.0.0.1:8000", "127.0.0.1"),
        ("", ""),
        (":80", ""),
    ],
)
def test_the_name_is_without_the_port(header: str, name: str) -> None:
    assert host_name(header) == name


def test_addresses_of_this_machine_alone() -> None:
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.1.2.3", "::1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "localhost.evil.com", ""))


def test_an_address_is_in_a_network_or_not() -> None:
    networks = ("127.0.0.1", "::1", "10.1.0.0/16")
    assert all(in_networks(address, networks) for address in ("127.0.0.1", "::1", "10.1.2.3"))
    assert not any(in_networks(address, networks) for address in ("127.0.0.2", "10.2.0.1", "unix"))


@pytest.mark.parametrize(
    ("listened", "header", "allowed"),
    [
        ("127.0.0.1", "localhost:8000", True),
        ("127.0.0.1", "[::1]", True),
        ("127.0.0.1", "rebind.example:8000", False),
        ("127.0.0.1", "127.0.0.1.rebind.example", False),
        ("127.0.0.1", "localhost@rebind.example", False),
        ("127.0.0.1", "10.0.0.7", False),
        ("127.0.0.1", "", False),
        ("127.0.0.1", "more.example", True),
        ("box.example", "BOX.example:80", True),
        ("0.0.0.0", "10.0.0.7:8000", True),
        ("0.0.0.0", "10.0.0.8:8000", False),
        ("0.0.0.0", "", False),
    ],
)
def test_only_its_own_names_are_allowed(listened: str, header: str, allowed: bool) -> None:
    assert is_own_name(header, listened, ["More.example"], "10.0.0.7") == allowed
