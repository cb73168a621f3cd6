"""Chat templates of a model and the special tokens that they use, from its tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import InvalidRequestError

TEMPLATE_FILE = "chat_template.jinja"
LEGACY_TEMPLATE_FILE = "chat_template.json"
"""Chat template of processors, before templates had files of their own."""
TEMPLATE_FOLDER = "additional_chat_templates"
_DEFAULT, _TOOL_USE = "default", "tool_use"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """Templates by name, and the variables that all templates share."""

    sources: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> ChatTemplates:
        """Read the templates from the files of a model folder; unreadable files are ignored."""
        config = _object(files, "tokenizer_config.json")
        return cls(_of_files(files) or _of_config(config, files), special_tokens(files))

    def choose(self, name: str, *, has_tools: bool) -> str:
        """Return the template of this name, or the default one for a chat; ``InvalidRequestError`` if there is none."""
        if not self.sources:
            raise InvalidRequestError(
                "messages",
                "cannot be used, since the model has no chat template: serve it with --chat-template FILE, or send a"
                " prompt to be completed",
            )
        name = self.name_of(name, has_tools=has_tools)
        if name not in self.sources:
            known = ", ".join(sorted(self.sources))
            raise InvalidRequestError("chat_template", f"must name one of the model's templates ({known})")
        return self.sources[name]

    def name_of(self, name: str, *, has_tools: bool) -> str:
        """The name of the template that is meant by a name, which may be empty."""
        return name or (_TOOL_USE if has_tools and _TOOL_USE in self.sources else _DEFAULT)


def with_template(files: Mapping[str, bytes], template: bytes) -> dict[str, bytes]:
    """Return the files of a model folder with this template in place of all others."""
    kept = {path: content for path, content in files.items() if not path.startswith(f"{TEMPLATE_FOLDER}/")}
    return {**kept, TEMPLATE_FILE: template}


def _of_files(files: Mapping[str, bytes]) -> dict[str, str]:
    found = {_DEFAULT: files[TEMPLATE_FILE]} if TEMPLATE_FILE in files else {}
    for path, content in files.items():
        folder, _, file_name = path.rpartition("/")
        if folder == TEMPLATE_FOLDER and file_name.endswith(".jinja"):
            found[file_name.removesuffix(".jinja")] = content
    return {name: content.decode("utf-8", "replace") for name, content in found.items()}


def _of_config(config: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, str]:
    found = config.get("chat_template") or _object(files, LEGACY_TEMPLATE_FILE).get("chat_template")
    if isinstance(found, str):
        return {_DEFAULT: found}
    entries = found if isinstance(found, list) else []
    return {entry["name"]: entry["template"] for entry in entries if isinstance(entry, dict) and _is_named(entry)}


def _is_named(entry: Mapping[str, Any]) -> bool:
    return isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)


def special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """Name -> text of each special token that the files of a model folder name."""
    config, others = _object(files, "tokenizer_config.json"), _object(files, "special_tokens_map.json")
    found = {name: _content(config.get(name)) or _content(others.get(name)) for name in _SPECIAL_TOKENS}
    return {name: content for name, content in found.items() if content is not None}


def _content(token: object) -> str | None:
    """The text of a token, which is a string or an object that contains it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        parsed = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
