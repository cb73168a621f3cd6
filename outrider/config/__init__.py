"""Settings: one schema for ``outrider serve`` and for each service started alone.

Owns the schema, its sources and what is said when they are wrong. Knows no process, no transport and no device.

The schema has four sections, ``target``, ``draft``, ``coordinator`` and ``gateway``. A service reads its own once::

    settings = load(TargetSettings, argv)        # or another section; argv None: sys.argv[1:]

and ``outrider serve`` reads all of them (``load_all``). Sources, strongest first: flags (``--page-size 32``),
environment (``OUTRIDER_TARGET_PAGE_SIZE=32``), file (``--config file.yaml``: ``target: {page_size: 32}``), defaults.
Environment, file and ``outrider serve`` also take a ``speculative_config`` in vLLM's keys. An unknown key is a
``ConfigError`` that suggests the nearest one. Settings are frozen; None means what the field's text says.
A service's ``__main__`` wraps itself in ``outrider.telemetry.exit_cleanly``, which makes such an error one clear line.
"""

from outrider.config.flags import service_module
from outrider.config.loading import UNSET, Effective, load, load_all, load_named, merge
from outrider.config.schema import (
    CoordinatorSettings,
    DraftSettings,
    GatewaySettings,
    Section,
    Settings,
    TargetSettings,
    to_argv,
)
from outrider.config.sources import FlagNames

__all__ = [
    "UNSET",
    "CoordinatorSettings",
    "DraftSettings",
    "Effective",
    "FlagNames",
    "GatewaySettings",
    "Section",
    "Settings",
    "TargetSettings",
    "load",
    "load_all",
    "load_named",
    "merge",
    "service_module",
    "to_argv",
]
