"""The scripted generator behind a server of its own: python -m tests.support.scripted_server FILE_FOR_ITS_ADDRESS."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from tests.client.conftest import Service


def main() -> None:
    service = Service()
    Path(sys.argv[1]).write_text(service.address, encoding="utf-8")
    threading.Event().wait()


if __name__ == "__main__":
    main()
