"""The control plane's certificate: read from its files, and again when they change."""

import asyncio
import os
import signal
import ssl
from pathlib import Path

import structlog

from ...events import tls
from ...events.errors import UsageError
from ...events.private_files import read_private

RELOAD_S = 60.0


class ServerCertificate:
    """The certificate that all servers of this process show. Raises UsageError."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """`certificate` holds its chain too, the authority last. Only its owner may read `key`."""
        self._certificate, self._key = certificate, key
        self._mark = self._marked()
        self.context, self.ca = self._read()
        """`ca` is the authority's digest, for --ca."""
        self._present = self.context
        self.context.sni_callback = self._show

    async def keep_reloading(self) -> None:
        """Call `reload` periodically, and at SIGHUP."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)
        while True:
            await asyncio.sleep(RELOAD_S)
            self.reload()

    def reload(self) -> None:
        """Use changed files for new connections; if they are no pair, log so and keep the
        former."""
        mark = self._marked()
        if mark == self._mark:
            return
        self._mark = mark
        logger = structlog.get_logger("control_plane")
        try:
            self._present, self.ca = self._read()
        except UsageError as error:
            logger.warning("the former certificate stays", why=str(error), hint=error.hint)
        else:
            logger.info("the certificate was read again", ca=self.ca)

    def _show(self, connection: ssl.SSLObject, name: str, context: ssl.SSLContext) -> None:
        connection.context = self._present

    def _read(self) -> tuple[ssl.SSLContext, str]:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            ca = tls.digest(self._certificate.read_text(encoding="ascii"))
            read_private(self._key)  # raises UsageError if others may read it
            context.load_cert_chain(self._certificate, self._key, password="")
        except (OSError, ValueError) as error:
            why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
            if isinstance(error, ssl.SSLError):
                why = (
                    "the key is another certificate's"
                    if error.reason == "KEY_VALUES_MISMATCH"
                    else "no certificate with a key that has no password"
                )
            raise UsageError(
                f"--tls-cert, --tls-key: {why}", "both in PEM; unicron certs init makes them"
            ) from None
        return context, ca

    def _marked(self) -> list[tuple[int, int, int]]:
        """Differs if one of the files was written, replaced or given other rights."""
        found = [os.stat(path) for path in (self._certificate, self._key) if path.exists()]
        return [(one.st_ino, one.st_size, one.st_ctime_ns) for one in found]
