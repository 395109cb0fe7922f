"""Certificates for tests, made by `unicron certs init`, and a server that shows one."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unicron.cli.commands import certs
from unicron.control_plane.service.server_certificate import ServerCertificate
from unicron.events import tls

OPENSSL_S_MAX = 30.0


def why_not() -> str:
    """The reason why no certificates can be made here, or ""."""
    return "" if shutil.which("openssl") else "there is no `openssl`"


class Pair:
    """An authority and a certificate in a folder."""

    def __init__(self, folder: Path, *hosts: str) -> None:
        certs.init(folder, hosts or ("127.0.0.1",), force=False)
        self.folder = folder
        self.ca, self.ca_key = folder / "authority.pem", folder / "authority.key"
        self.certificate, self.key = folder / "control-plane.pem", folder / "control-plane.key"
        self.digest = tls.digest(self.ca.read_text())

    def renew(self, *hosts: str) -> None:
        certs.init(self.folder, hosts or ("127.0.0.1",), force=True)

    def expire(self) -> None:
        """Replace the certificate by one that has ended."""
        asked = self.folder / "request"
        for words in (
            [
                "req",
                "-new",
                "-config",
                "/dev/null",
                "-subj",
                "/CN=old",
                "-key",
                str(self.key),
                "-addext",
                "subjectAltName=IP:127.0.0.1",
                "-out",
                str(asked),
            ],
            [
                "x509",
                "-req",
                "-in",
                str(asked),
                "-days",
                "-1",
                "-CA",
                str(self.ca),
                "-CAkey",
                str(self.ca_key),
                "-copy_extensions",
                "copyall",
                "-out",
                str(self.certificate),
            ],
        ):
            subprocess.run(
                ["openssl", *words], check=True, capture_output=True, timeout=OPENSSL_S_MAX
            )

    @contextmanager
    def shown(self) -> Iterator[int]:
        """A server that shows the certificate to each client and then closes; yields its port."""
        context = ServerCertificate(self.certificate, self.key).context
        with socket.create_server(("127.0.0.1", 0)) as listening:

            def serve() -> None:
                with suppress(OSError):
                    while True:
                        link, _ = listening.accept()
                        with suppress(OSError), context.wrap_socket(link, server_side=True):
                            pass

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            try:
                yield int(listening.getsockname()[1])
            finally:
                listening.shutdown(socket.SHUT_RDWR)
                thread.join()
