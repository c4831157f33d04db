"""Mutual TLS for the exporter."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple


class ServerFiles(NamedTuple):
    """Whose certificates are accepted, and what is shown."""

    ca: str
    cert: str
    key: str


class ServerTls:
    """The context for connections that come in; the other side must have a certificate too.

    ``problem`` says why renewed files could not be read; what was read before stays in use.

    Raises:
        OSError: One of the files cannot be read, or is no certificate (``ssl.SSLError``).
    """

    def __init__(self, files: ServerFiles) -> None:
        self.problem = ""
        self._files = files
        self._signature = self._sign()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.verify_mode = ssl.CERT_REQUIRED
        self._load()

    def renew(self) -> None:
        """Reads the files again if they have changed, for new connections. An authority that was there stays accepted."""
        try:
            signature = self._sign()
            if signature != self._signature:
                self._load()
                self._signature = signature
        except OSError as error:  # SSLError is one
            self.problem = f"{error.filename or self._files.cert}: {error.strerror or error}"
        else:
            self.problem = ""

    def _load(self) -> None:
        self.context.load_verify_locations(cafile=self._files.ca)
        # A password would be asked for on the terminal.
        self.context.load_cert_chain(self._files.cert, self._files.key, password=lambda: b"")

    def _sign(self) -> list[tuple[int, int, int]]:
        found = (Path(path).stat() for path in self._files)
        return [(stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in found]
