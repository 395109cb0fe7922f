"""Trust in a certificate: the system's authorities, those of a file, or one that a digest names.

The digest is the SHA-256 of the authority's certificate (DER).
"""

import hashlib
import re
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from . import network_address
from .errors import UsageError

CA = "UNICRON_CA"
"""Environment variable: an authority, as --ca names it."""
INSECURE = "UNICRON_INSECURE"
"""Environment variable: 1 allows what --insecure allows."""
HANDSHAKE_S_MAX = 10.0
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
_NOT_YET_VALID, _EXPIRED, _OTHER_NAME, _OTHER_ADDRESS = 9, 10, 62, 64  # x509_vfy.h of OpenSSL


def digest(chain: str) -> str:
    """`sha256:...` of the last certificate of a chain (PEM), its authority. Raises ValueError."""
    found = _CERTIFICATE.findall(chain)
    if not found:
        raise ValueError("there is no certificate in it")
    return "sha256:" + hashlib.sha256(ssl.PEM_cert_to_DER_cert(found[-1])).hexdigest()


def is_plain(url: str) -> bool:
    """Whether what is sent there crosses a network unencrypted. Sentinels may name any host."""
    parts = network_address.url_parts(url)
    return parts.scheme == "redis+sentinel" or (
        parts.scheme in ("http", "redis")
        and not network_address.is_loopback(parts.hostname or "localhost")
    )


def check_plain(what: str, *, insecure: bool) -> None:
    """Raises UsageError unless the user accepts that `what` crosses a network unencrypted."""
    if not insecure:
        raise UsageError(
            f"{what}: tokens and reports would cross the network unencrypted",
            "use TLS: unicron certs init; or --insecure on a network that you trust",
        )


def may_follow(pointer: str, at: str, *, by_socket: bool) -> bool:
    """Whether a token that goes to the URL `at` may go where that points: not without the same TLS,
    nor, instead of a socket, to a port of this machine, which may be a stranger's by now."""
    return pointer.startswith("https:") or (
        not at.startswith("https:") and (not by_socket or is_plain(pointer))
    )


def client_context(ca: str) -> ssl.SSLContext:
    """Accepts servers for which these certificates (PEM) stand, or with "" those of the system. The
    server's name or address must be in its certificate. Raises SSLError if `ca` is not PEM."""
    context = ssl.create_default_context(cadata=ca or None)
    if ca:  # an authority may itself be below another one
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def authority(ca: str, host: str, port: int) -> str:
    """The certificates (PEM) that --ca names; for a digest, the server there is asked for them.
    Raises UsageError; OSError if the server does not answer."""
    if not ca.startswith("sha256:"):
        try:
            pem = Path(ca).read_text(encoding="ascii")
            digest(pem)
            client_context(pem)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise UsageError(f"--ca {ca}: {why}", "a file in PEM, or sha256:DIGEST") from None
        return pem
    if not re.fullmatch("sha256:[0-9a-f]{64}", ca.lower()):
        raise UsageError(f"--ca {ca[:80]!r} is no digest", "sha256: and 64 hex digits, or a file")
    where = network_address.endpoint(host, port)
    try:
        chain = sent_chain(host, port)
    except ssl.SSLError as error:
        raise refusal(error, where) or error from None
    for one in chain:
        if digest(one) == ca.lower():
            return one
    raise UsageError(
        f"{where}: none of its {len(chain)} certificates has the digest {ca}",
        "is it another server? the log of the control plane has the right digest",
    )


def sent_chain(host: str, port: int) -> list[str]:
    """The certificates (PEM) that a server sends, unverified. Raises OSError."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((host, port), timeout=HANDSHAKE_S_MAX) as link,
        context.wrap_socket(link, server_hostname=host) as secure,
    ):
        chain = cast(Any, secure)._sslobj.get_unverified_chain()  # public from Python 3.13 on
        return [str(one.public_bytes()) for one in chain or ()]


def is_likely(error: Exception, host: str, port: int) -> bool:
    """Whether a plain connection failed so because the server there speaks TLS."""
    with suppress(OSError):  # without an answer the connection is closed
        return isinstance(error, ConnectionResetError) and bool(sent_chain(host, port))
    return False


def refusal(error: BaseException | None, where: str) -> UsageError | None:
    """What is wrong with a server's certificate or protocol; None for other errors."""
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = {
            _NOT_YET_VALID: "compare the clocks of both hosts",
            _EXPIRED: "renew it there",
            **dict.fromkeys(
                (_OTHER_NAME, _OTHER_ADDRESS),
                "use a name or address that is in it, or renew it there: unicron certs init --host",
            ),
        }.get(error.verify_code, "name its authority: --ca FILE, or --ca sha256:DIGEST")
        return UsageError(
            f"{where}: its certificate is refused: {str(error.verify_message).rstrip('.').lower()}",
            hint,
        )
    if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
        return UsageError(f"{where}: what answers there does not speak TLS", "is it http://?")
    return None
