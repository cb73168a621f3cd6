"""Authorities, and certificates of theirs as files."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

LONG_AGO = datetime(2001, 1, 1, tzinfo=UTC)


class Authority:
    """One authority, and a folder for what it issues."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self.ca_file = str(folder / f"{name}.pem")
        self._ca.cert_pem.write_to_path(self.ca_file)

    def issue(
        self, *names: str, file: str = "server", is_expired: bool = False, is_future: bool = False
    ) -> dict[str, str]:
        """``cert_file`` and ``key_file`` of a new pair for these names, written over what bore the file's name."""
        begins = datetime.now(UTC) + timedelta(days=2) if is_future else LONG_AGO if is_expired else None
        ends = LONG_AGO + timedelta(days=1) if is_expired else None
        issued = self._ca.issue_cert(*(names or ("localhost",)), not_before=begins, not_after=ends)
        paths = {"cert_file": self._folder / f"{file}.crt", "key_file": self._folder / f"{file}.key"}
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        paths["cert_file"].write_bytes(chain)
        paths["key_file"].write_bytes(issued.private_key_pem.bytes())
        return {name: str(path) for name, path in paths.items()}
