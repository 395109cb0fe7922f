"""Addresses: endpoints as text, and which address of this host an option means."""

from __future__ import annotations

import socket

import pytest
from unicron.events import network_address as na
from unicron.events.errors import UsageError


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [("10.0.0.1", 80, "10.0.0.1:80"), ("fd00::1", 80, "[fd00::1]:80"), ("n1.site", 1, "n1.site:1")],
)
def test_an_endpoint_is_written_and_read(host: str, port: int, text: str) -> None:
    assert na.endpoint(host, port) == text
    assert na.split_endpoint(text) == (host, port)


@pytest.mark.parametrize("url", ["http://[::1", "http://h]:1", "redis://h:port", "http://h:99999"])
def test_what_is_no_url_has_no_parts(url: str) -> None:
    parts = na.url_parts(url)
    assert (parts.scheme, parts.hostname, parts.port) == ("", None, None)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_listening_at_both_kinds_of_address(host: str) -> None:
    with na.listen(host) as listener:
        socket.create_connection(listener.getsockname()[:2], 2.0).close()
        assert listener.getsockname()[0] == host


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("fd00::1", False),
        ("n1", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert na.is_loopback(host) is expected


@pytest.mark.parametrize(
    ("host", "interface"),
    [("127.0.0.1", "lo"), ("127.1.2.3", "lo"), ("::1", "lo"), ("10.255.255.254", ""), ("n1", "")],
)
def test_the_interface_of_an_address(host: str, interface: str) -> None:
    assert na.interface_of(host) == interface


def test_an_interface_or_an_address_of_this_host_is_taken() -> None:
    assert na.own_address("lo", "--listen") == "127.0.0.1"
    assert na.own_address("::1", "--listen") == "::1"
    assert na.own_address("0:0:0:0:0:0:0:1", "--listen") == "::1"
    assert na.address_towards("127.0.0.1", 80) == "127.0.0.1"


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ([], "no address, interface or known name"),
        (["10.255.255.254"], "which this host does not have"),
        (["127.0.0.1", "::1"], "n1 is 127.0.0.1 and ::1"),
    ],
)
def test_a_name_stands_for_one_address_of_this_host(
    monkeypatch: pytest.MonkeyPatch, named: list[str], words: str
) -> None:
    def resolve(host: str, *_: object, **__: object) -> list[object]:
        if not named:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in named]

    monkeypatch.setattr(na.socket, "getaddrinfo", resolve)
    with pytest.raises(UsageError, match=words) as refused:
        na.own_address("n1", "--advertise")
    assert refused.value.hint
    named[:] = ["127.0.0.1", "10.255.255.254"]
    assert na.own_address("n1", "--advertise") == "127.0.0.1"


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(UsageError, match="this host has no address") as refused:
        na.own_address("10.255.255.254", "--advertise")
    assert "127.0.0.1 (lo)" in refused.value.hint
