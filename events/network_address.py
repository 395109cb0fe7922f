"""Addresses of hosts: endpoints as text, the interfaces of this host, and the address to advertise.

An endpoint is `HOST:PORT`, with an IPv6 address in brackets: `[fd00::1]:20000`. Sentinels that know
where a server is are endpoints in one URL: `redis+sentinel://HOST:PORT,HOST:PORT/NAME`.
"""

import ipaddress
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from .errors import UsageError

_IFREQ_BYTES = 40
_INTERFACES_NUM_MAX = 1024
_SENTINEL = "+sentinel"
_LINK_SCOPE = "20"
"""The scope of addresses that are valid on one link only, as /proc/net/if_inet6 writes it."""


def endpoint(host: str, port: int) -> str:
    """`HOST:PORT`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_endpoint(text: str) -> tuple[str, int]:
    """Host and port of an endpoint. Raises ValueError."""
    host, _, port = text.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def url_parts(url: str) -> SplitResult:
    """The parts of a URL; of what is none, as one with a bad port or half a bracket, empty ones.
    That of Sentinels has no one port."""
    try:
        parts = urlsplit(url)
        _ = parts.port if "," not in parts.netloc else 0
    except ValueError:
        return urlsplit("")
    return parts


def split_sentinels(url: str) -> tuple[str, str, tuple[str, ...]]:
    """(name, URL of the server, URL of each Sentinel) of a URL of Sentinels; ("", the URL itself,
    ()) of another one. The server's URL has the first Sentinel's endpoint in place of the server's,
    which the Sentinels know by this name. Raises UsageError."""
    scheme, _, rest = url.partition("://")
    if not scheme.endswith(_SENTINEL):
        return "", url, ()
    scheme = scheme.removesuffix(_SENTINEL)
    user, at, rest = rest.rpartition("@")
    endpoints, _, path = rest.partition("/")
    name, _, database = path.partition("/")
    found = tuple(f"{scheme}://{one}" for one in endpoints.split(","))
    is_valid = (
        bool(name)
        and "?" not in path
        and all((parts := url_parts(one)).hostname and parts.port for one in found)
    )
    if not is_valid or scheme not in ("redis", "rediss"):
        raise UsageError(
            f"{scheme}{_SENTINEL}://{rest} does not name Sentinels and a server",
            f"redis{_SENTINEL}://:PASSWORD@HOST:PORT,HOST:PORT/NAME",
        )
    return name, f"{scheme}://{user}{at}{endpoints.partition(',')[0]}/{database}", found


def is_loopback(host: str) -> bool:
    """Whether this address or name stands for the host itself only."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def listen(host: str, port: int = 0, *, backlog: int = 128) -> socket.socket:
    """A TCP socket that listens at this address, IPv4 or IPv6; `port` 0: any. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=backlog)


def interfaces() -> list[tuple[str, str]]:
    """(interface, address) of this host, IPv4 first; without addresses that are valid on one link
    only. Empty where this is not Linux. Source: netdevice(7), SIOCGIFCONF; /proc/net/if_inet6."""
    if not sys.platform.startswith("linux"):
        return []
    return [*_ipv4(), *_ipv6()]


def _ipv4() -> list[tuple[str, str]]:
    import array
    import fcntl

    siocgifconf = 0x8912
    requests = array.array("B", bytes(_IFREQ_BYTES * _INTERFACES_NUM_MAX))
    where, length = requests.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, siocgifconf, struct.pack("iP", length, where))
    num_bytes, _ = struct.unpack("iP", answer)
    data = requests.tobytes()[:num_bytes]
    found: list[tuple[str, str]] = []
    for begin in range(0, num_bytes, _IFREQ_BYTES):
        label = data[begin : begin + 16].partition(b"\0")[0].decode()
        # a second address of an interface may have a label of its own: eth0:1
        found.append((label.partition(":")[0], socket.inet_ntoa(data[begin + 20 : begin + 24])))
    return found


def _ipv6() -> list[tuple[str, str]]:
    try:  # of this thread: its network may be another one than that of the process
        lines = Path("/proc/thread-self/net/if_inet6").read_text().splitlines()
    except OSError:  # no IPv6 here
        return []
    found: list[tuple[str, str]] = []
    for line in lines:
        address, _, _, scope, _, name = line.split()
        if scope != _LINK_SCOPE:
            found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))))
    return found


def interface_of(host: str) -> str:
    """The interface of this host that has this address; "" if none has it."""
    try:
        wanted = ipaddress.ip_address(host)
    except ValueError:
        return ""
    if wanted.version == 4 and wanted.is_loopback:  # lo has all of 127.0.0.0/8
        return "lo"
    return next(
        (name for name, address in interfaces() if ipaddress.ip_address(address) == wanted), ""
    )


def own_address(text: str, option: str) -> str:
    """The address of this host that the user means by an address, an interface's name or a host's
    name. Raises UsageError if this host has no such address, or a name stands for several."""
    there = interfaces()
    of_interface = [address for name, address in there if name == text]
    if of_interface:
        return of_interface[0]
    own = {address for _, address in there}
    with suppress(ValueError):
        address = str(ipaddress.ip_address(text))
        if own and address not in own and not is_loopback(address):
            raise UsageError(f"{option}: this host has no address {address}", _listed(there))
        return address
    try:
        named = dict.fromkeys(
            str(entry[4][0]) for entry in socket.getaddrinfo(text, None, type=socket.SOCK_STREAM)
        )
    except OSError:
        raise UsageError(
            f"{option}: {text!r} is no address, interface or known name", _listed(there)
        ) from None
    found = [address for address in named if not own or address in own or is_loopback(address)]
    if not found:
        raise UsageError(
            f"{option}: {text} is {', '.join(named)}, which this host does not have", _listed(there)
        )
    if len(found) > 1:
        raise UsageError(f"{option}: {text} is {' and '.join(found)}", "name one of them")
    return found[0]


def _listed(there: list[tuple[str, str]]) -> str:
    if not there:
        return "name an address of this host"
    return "this host has " + ", ".join(f"{address} ({name})" for name, address in there[:8])


def address_towards(host: str, port: int) -> str:
    """The address of this host from which it reaches another one. Sends nothing. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
