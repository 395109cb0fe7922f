"""`certs`: a small authority and the control plane's certificate, made by the openssl command."""

import ipaddress
import re
import secrets
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...events import tls
from ...events.errors import UsageError
from ...events.private_files import write_private
from ..cluster.state_dir import shown
from ..terminal import console

AUTHORITY_DAYS, CERTIFICATE_DAYS = 3650, 825
OPENSSL_S_MAX = 60.0


def init(folder: Path, hosts: Sequence[str], *, force: bool) -> None:
    """Make the control plane's certificate, and an authority unless the folder has one."""
    names = ",".join(map(_name, hosts))
    authority, made = folder / "authority.pem", folder / "control-plane.pem"
    if made.exists() and not force:
        raise UsageError(
            f"{made} exists already", "--force replaces it by another one of the same authority"
        )
    for place in (folder.parent, folder):  # the parent is the state folder, unless one is named
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not authority.exists():
        # The number: two authorities have two names.
        _make(
            authority,
            f"authority {secrets.token_hex(4)}",
            AUTHORITY_DAYS,
            (
                "basicConstraints=critical,CA:TRUE,pathlen:0",
                "keyUsage=critical,keyCertSign,cRLSign",
            ),
        )
    chain = authority.read_bytes()
    _make(
        made,
        "control plane",
        CERTIFICATE_DAYS,
        (
            "basicConstraints=critical,CA:FALSE",
            "keyUsage=critical,digitalSignature",
            "extendedKeyUsage=serverAuth",
            f"subjectAltName={names}",
        ),
        ("-CA", str(authority), "-CAkey", str(authority.with_suffix(".key"))),
        chain,
    )
    console.out(
        f"unicron control-plane --tls-cert {shown(made.absolute())} "
        f"--tls-key {shown(made.with_suffix('.key').absolute())}"
    )
    console.talk(
        f"valid for {', '.join(hosts)}, {CERTIFICATE_DAYS} days; agents and commands "
        f"trust it with --ca {tls.digest(chain.decode())}"
    )


def _make(
    path: Path,
    name: str,
    days: int,
    extensions: Sequence[str],
    by: Sequence[str] = (),
    chain: bytes = b"",
) -> None:
    """Make a key, and its certificate followed by the chain. Raises UsageError."""
    with tempfile.TemporaryDirectory(prefix=".certs.", dir=path.parent) as made:  # 0700
        key, certificate = Path(made, "key"), Path(made, "pem")
        argv = [
            "openssl",
            "req",
            "-x509",
            "-config",
            "/dev/null",
            "-subj",
            f"/CN=unicron {name}",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-sha256",
            "-days",
            str(days),
            "-keyout",
            str(key),
            "-out",
            str(certificate),
            *by,
            *(word for one in extensions for word in ("-addext", one)),
        ]
        try:
            ran = subprocess.run(
                argv, capture_output=True, text=True, check=False, timeout=OPENSSL_S_MAX
            )
            why = " ".join(ran.stderr.split())[-200:] if ran.returncode else ""
        except OSError as error:
            why = (error.strerror or "").lower()
        except subprocess.TimeoutExpired:
            why = f"it did not end within {OPENSSL_S_MAX:g} s"
        if why:
            raise UsageError(
                f"openssl: {why}",
                "OpenSSL 3.0 or later is needed: apt-get install "
                "openssl; or use a certificate from elsewhere",
            )
        write_private(path.with_suffix(".key"), key.read_bytes())
        write_private(path, certificate.read_bytes() + chain)


def _name(host: str) -> str:
    """The name or address as a certificate has it. Raises UsageError."""
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}", host):
            return f"DNS:{host}"
        raise UsageError(
            f"--host {host!r} is neither a name nor an address",
            "as others name this host, for example cp.site",
        ) from None
