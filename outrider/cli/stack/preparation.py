"""Preparation of a stack: from settings to a checked plan, before any process is started.

Owns the order of the checks that ``serve``, ``demo`` and the benchmarks share.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from outrider.cli.stack.arrangement import Load, arrange
from outrider.cli.stack.gateways import GatewayPlan, plan_gateway, spread_over
from outrider.cli.stack.gpus import NO_GPUS, find_gpus
from outrider.cli.stack.held_ports import hold_port
from outrider.cli.stack.placement import place
from outrider.cli.stack.plan import StackPlan, plan_stack, with_typed_names
from outrider.cli.stack.preflight import check, check_listeners, read_config
from outrider.cli.stack.secret import make_link_secret
from outrider.config import Effective, Settings
from outrider.config.sources import CONFIG
from outrider.process.extras import is_missing, require_extras
from outrider.process.head_layers import with_layers_of_head
from outrider.process.model_files import with_local_model, with_local_tokenizer


def prepare_stack(
    effective: Effective,
    *,
    gpu_memory_utilization: float | None = None,
    serves_http: bool = False,
    optimize: Load | None = None,
) -> StackPlan:
    """The plan for these settings; ``ConfigError`` or ``ModelError`` for the first thing that cannot work.

    ``gpu_memory_utilization`` is the share of each GPU's memory for all that runs on it, in (0, 1]. ``serves_http``
    adds the gateway where the settings do not turn it off. ``optimize``: the load that several GPUs are arranged for.
    """
    with effective.names.in_errors():
        plan = _prepare(effective, gpu_memory_utilization, optimize, serves_http=serves_http)
    return with_typed_names(plan, effective.names)


def _prepare(
    effective: Effective, gpu_memory_utilization: float | None, optimize: Load | None, *, serves_http: bool
) -> StackPlan:
    optional = ["gateway"] if serves_http and effective.settings.gateway.enabled else []
    require_extras(extras_of(effective.settings), "starting the services", optional=optional)
    settings = _with_local_models(effective.settings)
    check(settings)
    settings = with_length_of_target(with_layers_of_head(settings))
    http = plan_gateway(settings, explicit=effective.origins) if serves_http else GatewayPlan()
    check_listeners(settings, http.settings, effective.origins)
    gpus = find_gpus() if _may_need_gpu(settings) else NO_GPUS
    share = gpu_memory_utilization
    arranged = arrange(settings, gpus, optimize, effective.origins, gpu_memory_utilization=share)
    placed = place(arranged.settings, gpus, gpu_memory_utilization=share)
    plan = plan_stack(
        placed.settings,
        explicit=effective.origins,
        free_port=hold_port,
        secret=make_link_secret(),
        replica_devices=arranged.replica_devices,
        shares_draft=arranged.shares_draft,
    )
    note = "\n".join(filter(None, (arranged.reason, placed.note, http.note)))
    gateways = spread_over(http, plan.own_addresses, effective.origins)
    return replace(plan, note=note, gateways=gateways, http_url=http.url)


def require_for_file(config: str | None) -> None:
    """Raise a ``ConfigError`` with all that starting the services needs, where the file of settings cannot be read
    without one of the packages.
    """
    if (config or os.environ.get(CONFIG)) and is_missing("yaml"):
        require_extras(["engine"], "starting the services", optional=["gateway"])


def with_length_of_target(settings: Settings) -> Settings:
    """The settings with the target's ``max_model_len`` as the draft's, whose KV cache need not hold longer texts.
    Unchanged where the draft has its own, or its ``config.json`` does not say that it can take as much.
    """
    draft, length = settings.draft, settings.target.max_model_len
    if length is None or draft.max_model_len is not None or not draft.method.has_model or draft.model is None:
        return settings
    most = read_config(Path(draft.model), "draft").get("max_position_embeddings")
    if not isinstance(most, int) or most < length:
        return settings
    return replace(settings, draft=draft.model_copy(update={"max_model_len": length}))


def extras_of(settings: Settings) -> list[str]:
    """The extras that the services need."""
    sections = (settings.target, settings.draft, settings.coordinator, settings.gateway)
    is_watched = any(section.metrics_port is not None or section.trace_file is not None for section in sections)
    return ["engine", *(["telemetry"] if is_watched else [])]


def _with_local_models(settings: Settings) -> Settings:
    """The draft is downloaded when the target is there, so that one error is told before the other's long wait."""
    return replace(
        settings,
        coordinator=with_local_tokenizer(settings.coordinator),
        target=with_local_model(settings.target, reads_configuration=True),
        draft=with_local_model(settings.draft),
    )


def _may_need_gpu(settings: Settings) -> bool:
    has_draft = settings.draft.method.has_model
    devices = {settings.target.device, *([settings.draft.device] if has_draft else [])}
    return devices != {"cpu"}
