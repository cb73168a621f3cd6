"""Checks before any process is started: ports in use, unreadable files, invalid model folders, different tokenizers.

Only fast checks without torch; the services check the rest when they load.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from outrider.addresses import check_listening
from outrider.cli.stack.plan import LOOPBACK
from outrider.config import CoordinatorSettings, DraftSettings, GatewaySettings, Section, Settings, TargetSettings
from outrider.config.fields import DraftMethod
from outrider.config.typed_names import SettingKey
from outrider.errors import ConfigError, ModelError
from outrider.limits import TOKENIZER_BYTES
from outrider.limits.bounded_files import read_of_folder
from outrider.process.model_files import lack_of_config
from outrider.vocabularies import check_same_ids, names_of, tokens_by_id

Listening = CoordinatorSettings | TargetSettings | DraftSettings | GatewaySettings


def check(settings: Settings) -> None:
    """Raise ``ConfigError`` or ``ModelError`` for the first problem."""
    target, draft = settings.target, settings.draft
    config = check_model_folder(
        Path(target.model),
        "target",
        needs_tokenizer=settings.coordinator.tokenizer is None,
        needs_weights=target.load_format == "safetensors",
    )
    check_length(target, config)
    if draft.method.has_model and draft.model is not None:
        config = check_model_folder(
            Path(draft.model), "draft", needs_tokenizer=False, needs_weights=draft.load_format == "safetensors"
        )
        check_tokenizers(Path(target.model), Path(draft.model))
        if draft.method is DraftMethod.DRAFT_MODEL:
            check_length(draft, config)
    if settings.coordinator.tokenizer is not None:
        check_tokenizer_folder(Path(settings.coordinator.tokenizer))
    check_hops(settings)
    check_files(settings.coordinator)
    check_files(target)
    if draft.method is not DraftMethod.NONE:
        check_files(draft)
    coordinator = settings.coordinator
    check_listening(
        coordinator.host, coordinator.port, port_setting="coordinator.port", host_setting="coordinator.host"
    )


def check_hops(settings: Settings) -> None:
    """Check that the coordinator's credentials match the models' requirements."""
    models: list[TargetSettings | DraftSettings] = [settings.target]
    if settings.draft.method is not DraftMethod.NONE:
        models.append(settings.draft)
    for model in models:
        pairs = (("tls_cert_file", "link_tls_ca_file"), ("link_token_file", "link_token_file"))
        for of_model, of_coordinator in pairs:
            _check_both(model, of_model, settings.coordinator, of_coordinator)


def _check_both(
    model: TargetSettings | DraftSettings, key: str, coordinator: CoordinatorSettings, its_key: str
) -> None:
    given, expected = getattr(model, key), getattr(coordinator, its_key)
    if model.host.startswith("unix:") and key == "tls_cert_file":
        return  # socket files speak no TLS
    if given is not None and expected is None:
        raise ConfigError(f"coordinator.{its_key}", f"is needed, since {model.name}.{key} is set")
    if given is None and expected is not None:
        raise ConfigError(f"{model.name}.{key}", f"is needed, since coordinator.{its_key} is set")


def check_model_folder(
    folder: Path, role: str, *, needs_tokenizer: bool, needs_weights: bool = True
) -> Mapping[str, Any]:
    """Check that the folder looks like a model in the Hugging Face layout, and return its ``config.json``."""
    if not folder.is_dir():
        problem = "is a file, not a folder" if folder.exists() else "does not exist"
        if len(folder.parts) == 1 and not folder.exists():
            problem += "; an id of the Hugging Face Hub is OWNER/NAME, such as Qwen/Qwen3-8B"
        raise ModelError(f"{role} model: {folder} {problem}")
    config = read_config(folder, role)
    if needs_weights and not any(folder.glob("*.safetensors")):
        raise ModelError(f"{role} model: {folder} has no *.safetensors")
    if needs_tokenizer and not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{role} model: {folder} has no tokenizer.json (--tokenizer names another folder)")
    return config


def check_tokenizer_folder(folder: Path) -> None:
    """Check that the folder that replaces the target's tokenizer has one."""
    problem = "" if (folder / "tokenizer.json").is_file() else f"{folder} has no tokenizer.json"
    if not folder.is_dir():
        problem = f"{folder} is no folder here, and no id of the Hugging Face Hub, such as Qwen/Qwen3-8B"
    if problem:
        raise ConfigError("coordinator.tokenizer", problem)


def check_length(section: TargetSettings | DraftSettings, config: Mapping[str, Any]) -> None:
    """Check that no more tokens are asked for than the model can take, as far as its ``config.json`` says so; loading
    checks the rest.
    """
    most = longest_context(config)
    if most is not None and section.max_model_len is not None and section.max_model_len > most:
        problem = f"is {section.max_model_len:,}, and the model takes at most {most:,} tokens, by its config.json"
        raise ConfigError(f"{section.name}.max_model_len", problem)


def longest_context(config: Mapping[str, Any]) -> int | None:
    """Upper bound of a model's context in tokens, stretched by any kind of rope scaling; None where it is not known."""
    longest = config.get("max_position_embeddings")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(longest, int) or not isinstance(scaling, Mapping):
        return None
    originals = (fields.get("original_max_position_embeddings") for fields in (config, scaling))
    factor, original = scaling.get("factor") or 1.0, next(filter(None, originals), 0)
    if not isinstance(factor, int | float) or not isinstance(original, int):
        return None
    try:
        return int(max(longest, longest * factor, original * factor))
    except (OverflowError, ValueError):  # infinity, which JSON in Python may be, or no number at all
        return None


def check_tokenizers(target: Path, draft: Path) -> None:
    """Check that both models use the same token ids, as the coordinator does after loading."""
    try:
        of_target, of_draft = (
            read_of_folder(folder, "tokenizer.json", TOKENIZER_BYTES.most) for folder in (target, draft)
        )
    except OSError:
        return  # without one of them, or with one that cannot be read: the services say what they make of it
    if of_target == of_draft:
        return
    tokens_of_target, tokens_of_draft = tokens_by_id(of_target), tokens_by_id(of_draft)
    if tokens_of_target and tokens_of_draft:
        check_same_ids(names_of(target.resolve().name, draft.resolve().name), tokens_of_target, tokens_of_draft)


def read_config(folder: Path, role: str) -> dict[str, Any]:
    """The content of a model's config.json; ``ModelError`` of one line for one that cannot be read."""
    path = folder / "config.json"
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ModelError(f"{role} model: {path} is no regular file")
    try:
        config = json.loads(read_of_folder(folder, path.name).decode("utf-8-sig"))
    except FileNotFoundError:
        raise ModelError(f"{role} model: {folder} {lack_of_config(folder)}") from None
    except RecursionError as error:
        raise ModelError(f"{role} model: {path} cannot be read: it is nested too deeply") from error
    except OSError as error:
        raise ModelError(f"{role} model: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{role} model: {path} is not JSON in UTF-8: byte {error.start} does not fit") from error
    except ValueError as error:
        raise ModelError(f"{role} model: {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{role} model: {path} should hold a JSON object")
    return config


def check_files(section: Section) -> None:
    """Check that the files a section names can be read: tokens, certificates, keys, chat templates."""
    for key, value in section.model_dump().items():
        if value is None or key == "trace_file" or not (key.endswith("_file") or key == "chat_template"):
            continue
        try:
            Path(value).open("rb").close()
        except OSError as error:
            raise ConfigError(f"{section.name}.{key}", f"{value} cannot be read: {error.strerror}") from error


def check_listeners(
    settings: Settings, gateway: GatewaySettings | None, explicit: Collection[SettingKey] = frozenset()
) -> None:
    """Check that ports which were set differ, that those of models, metrics and health are free, and the gateway's
    files. ``explicit``: the settings that a user set; a model's port is of no concern otherwise.
    """
    taken = {settings.coordinator.port: "coordinator.port"}
    sections: list[Listening] = [settings.coordinator, settings.target]
    if settings.draft.method is not DraftMethod.NONE:
        sections.append(settings.draft)
    if gateway is not None:
        check_files(gateway)
        if gateway.port == settings.coordinator.port:
            raise ConfigError(
                "gateway.port",
                f"is {gateway.port}, as coordinator.port is: --port is the port of gRPC (default 50050),"
                " --http-port that of HTTP (default 8000); they must be different ports",
            )
        _take(taken, gateway.port, "gateway.port")
        sections.append(gateway)
    for section in sections:
        if section.name in {"target", "draft"}:
            has_port = (section.name, "port") in explicit
            setting = f"{section.name}.port"
            if has_port:
                _take(taken, section.port, setting)
            # Without a port of its own it gets a free one; 0 stands for that.
            check_listening(
                section.host,
                section.port if has_port else 0,
                port_setting=setting,
                host_setting=f"{section.name}.host",
            )
        for kind in ("metrics", "health"):
            port = getattr(section, f"{kind}_port", None)
            if port is not None:
                setting = f"{section.name}.{kind}_port"
                _take(taken, port, setting)
                own_host = getattr(section, f"{kind}_host")
                host = own_host or section.host
                check_listening(
                    LOOPBACK if host.startswith("unix:") else host,
                    port,
                    port_setting=setting,
                    host_setting=f"{section.name}.{'host' if own_host is None else f'{kind}_host'}",
                )


def _take(taken: dict[int, str], port: int, setting: str) -> None:
    if port in taken:
        raise ConfigError(setting, f"is {port}, as {taken[port]} is; they must be different ports")
    taken[port] = setting
