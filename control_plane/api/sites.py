"""The Host and Origin of a request: whom it names, and which page it comes from."""

import ipaddress
import re
from collections.abc import Container
from typing import NamedTuple

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{0,5}))?")
_PORTS = {"http": 80, "https": 443}


class Site(NamedTuple):
    """An origin. Source: RFC 6454, section 4."""

    scheme: str
    host: str
    port: int


def site_of(scheme: str, authority: str) -> Site | None:
    """The site at `HOST[:PORT]`, as a Host header has it; None for another text."""
    parts = _AUTHORITY.fullmatch(authority)
    if parts is None or scheme not in _PORTS:
        return None
    return Site(scheme, parts[1].lower(), int(parts[2] or _PORTS[scheme]))


def names(site: Site, own: Container[str]) -> bool:
    """Whether the site's host is one of these names, or an address."""
    try:
        ipaddress.ip_address(site.host.strip("[]"))
    except ValueError:
        return site.host in own
    return True
