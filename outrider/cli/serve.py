"""``outrider serve``: all services on this host, as one command."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import islice
from typing import Annotated, Any

import typer

from outrider.cli.facts import draft_length_text, model_text, repetition_text
from outrider.cli.flag_groups import with_flag_groups
from outrider.cli.options import Verbose, output
from outrider.cli.serve_flags import DeviceFlags, ModelFlags, ServingFlags, SpeculationFlags
from outrider.cli.serve_settings import MODEL, flag_names, settings_of
from outrider.cli.settings_flags import ConfigFile, SetOptions, parse_set
from outrider.cli.stack.arrangement import LOADS, Load
from outrider.cli.stack.plan import StackPlan, inheriting
from outrider.cli.stack.preparation import prepare_stack, require_for_file
from outrider.cli.stack.running import Described, run_until_signal
from outrider.cli.stack.secret import LinkSecret, hold_tokens
from outrider.cli.typed import typed_flags
from outrider.config import UNSET, CoordinatorSettings, Effective, FlagNames, load_all
from outrider.config.typed_names import SettingKey
from outrider.errors import ConfigError
from outrider.generation import ModelPlacement
from outrider.telemetry import guard_output
from outrider.transport.security.tokens import check_token

Target = Annotated[
    str | None,
    typer.Argument(help="Target model: a folder in the Hugging Face layout, or an id on the Hugging Face Hub."),
]


@with_flag_groups
def serve(
    context: typer.Context,
    target: Target = None,
    *,
    models: ModelFlags,
    speculation: SpeculationFlags,
    devices: DeviceFlags,
    serving: ServingFlags,
    config: ConfigFile = None,
    set_options: SetOptions = None,
    verbose: Verbose = 0,
) -> None:
    """Start draft, target, coordinator and HTTP gateway on this host, and print the addresses when all are ready."""
    flags = settings_of(context.params)
    guard_output()
    require_for_file(config)
    given = parse_set(set_options)
    flags["target", "model"] = _target(target, models.model)
    keys = _held(serving.api_key, serving.api_token_file)
    if keys is not None:
        flags["coordinator", "api_token_file"] = keys.path
    names = flag_names(context.params, typed_flags(context), given)
    effective = _load({**flags, **given}, speculation.speculative_config, config, names)
    plan = prepare_stack(
        effective,
        gpu_memory_utilization=_share(devices.gpu_memory_utilization),
        serves_http=True,
        optimize=_chosen(devices.optimize),
    )
    plan = plan if keys is None else inheriting(plan, keys.descriptors)
    on_ready = partial(_print_ready, settings=effective.settings.coordinator)
    asyncio.run(run_until_signal(plan, verbose=verbose, on_ready=on_ready))


def _load(
    flags: dict[SettingKey, Any], speculative_config: str | None, config: str | None, names: FlagNames
) -> Effective:
    try:
        return load_all(flags, speculative_config=speculative_config, config=config, flag_names=names)
    except ConfigError as error:
        if error.field != MODEL or error.problem != UNSET:
            raise
        raise ConfigError("", "a model is needed: outrider serve MODEL (a folder or a Hub id)") from error


def _target(argument: str | None, option: str | None) -> str | None:
    if argument is not None and option not in {None, argument}:
        raise ConfigError("--model", f"is {option}, and the target was named {argument}; one of them should go")
    return argument if option is None else option


def _held(keys: list[str] | None, file: str | None) -> LinkSecret | None:
    """The API keys of the command line, kept in memory."""
    if not keys:
        return None
    if file is not None:
        raise ConfigError("--api-key", "is given together with --api-token-file; one of them should go")
    return hold_tokens([check_token("--api-key", key) for key in keys])


def _chosen(given: str | None) -> Load | None:
    load = next((load for load in LOADS if load == given), None)
    if given is not None and load is None:
        raise ConfigError("--optimize", f"should be {' or '.join(LOADS)}, not {given or 'empty'}")
    return load


def _share(value: float | None) -> float | None:
    if value is not None and not 0 < value <= 1:
        raise ConfigError("--gpu-memory-utilization", f"should be above 0 and at most 1, not {value:g}")
    return value


def _draft_lengths(settings: CoordinatorSettings) -> str:
    limit = settings.disable_by_batch_size
    return draft_length_text(settings.num_speculative_tokens, settings.draft_length, disable_by_batch_size=limit)


def _print_ready(plan: StackPlan, described: Described, settings: CoordinatorSettings) -> None:
    """Print all lines in one write, so that a reader may close the pipe after the first line."""
    lines = [f"Outrider is ready at {plan.address}"]
    if plan.http_url:
        lines.append(f"  OpenAI's API: {plan.http_url}")
    if len(plan.coordinators) > 1:
        lines.append(f"  {len(plan.coordinators)} coordinators share that port; each has its own limits and queue")
    for role, description in described.items():
        lines.append(f"  {role}: {model_text(description.model_name, ModelPlacement.of(description))}")
    if any(role.startswith("draft") for role in described):
        lines.append(f"  drafts: {_draft_lengths(settings)}")
    targets = (ModelPlacement.of(one) for role, one in described.items() if role.startswith("target"))
    lines += [f"  output: {repetition_text(placement)}" for placement in islice(targets, 1)]
    output.print("\n".join(lines), markup=False)
