"""Versions of the two ends of a link: both have the same one, or neither believes the other.

A message of another version may be read without an error and mean something else. Either end refuses the other and
names both versions; it is tried again, since an upgrade replaces one process after the other.
"""

from __future__ import annotations

from collections.abc import Iterable

from outrider import __version__
from outrider.errors import ProtocolError

_KEY = "outrider-version"
METADATA = (_KEY, __version__)
"""Metadata of the call that opens a link: the caller's version."""
_BEFORE_VERSIONS = "0.1.0"
"""Version that did not send its own."""


def check_service(address: str, version: str) -> None:
    """Raise ``ProtocolError`` for a service of another version than this coordinator."""
    if version != __version__:
        raise ProtocolError(
            f"{address} runs Outrider {version[:40] or 'of an unknown version'}, and this coordinator {__version__}:"
            " both must have the same version"
        )


def check_coordinator(metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
    """Raise ``ProtocolError`` for a coordinator that says it has another version than this service."""
    version = dict(metadata or ()).get(_KEY, _BEFORE_VERSIONS)
    if version != __version__:
        raise ProtocolError(
            f"this service runs Outrider {__version__}, and the coordinator {str(version)[:40]}:"
            " both must have the same version"
        )
