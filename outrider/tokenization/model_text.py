"""Text side of a model: tokenizer, chat templates, sampling defaults."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import jinja2

from outrider.errors import ConfigError
from outrider.generation import TokenizerFiles
from outrider.limits import TOKENIZER_BYTES
from outrider.limits.bounded_files import MAX_SETTINGS_BYTES, read_bounded, read_of_folder
from outrider.tokenization.chat import ChatRenderer, ChatRendering
from outrider.tokenization.chat.sandbox import compile_template
from outrider.tokenization.chat.templates import (
    LEGACY_TEMPLATE_FILE,
    TEMPLATE_FILE,
    TEMPLATE_FOLDER,
    ChatTemplates,
    special_tokens,
    with_template,
)
from outrider.tokenization.sampling_defaults import GENERATION_CONFIG_FILE, sampling_defaults
from outrider.tokenization.tokenizer import TOKENIZER_FILE, TextTokenizer

JSON_FILES = (TOKENIZER_FILE, "tokenizer_config.json", GENERATION_CONFIG_FILE, "special_tokens_map.json")
MAX_TEMPLATES = 32
"""Maximum number of templates in a folder; models have two or three."""


@dataclass(frozen=True, slots=True)
class ModelText:
    """The text side of one model; empty for a model without a tokenizer."""

    files: TokenizerFiles = field(default_factory=TokenizerFiles)
    tokenizer: TextTokenizer | None = None
    chat: ChatRenderer = field(default_factory=lambda: ChatRenderer(ChatTemplates()))
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)
    eos_token_id: int | None = None
    """Id of ``eos_token`` in ``tokenizer_config.json``; None if it has none, or the vocabulary has not got it."""

    rendering: ChatRendering = field(init=False, repr=False, compare=False)
    """Renders with ``chat``, within limits."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rendering", ChatRendering(self.chat))

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], *, bos_token_id: int | None = None) -> ModelText:
        """Create it from the files of a description; ``ConfigError`` for an unusable tokenizer."""
        tokenizer = TextTokenizer.from_files(files, bos_token_id=bos_token_id)
        eos_token = special_tokens(files).get("eos_token")
        return cls(
            files=TokenizerFiles(files, bos_token_id, _hash(files, bos_token_id)),
            tokenizer=tokenizer,
            chat=ChatRenderer.from_files(files),
            sampling_defaults=sampling_defaults(files),
            eos_token_id=None if tokenizer is None or eos_token is None else tokenizer.backend.token_to_id(eos_token),
        )

    @classmethod
    def from_folder(cls, folder: Path | str) -> ModelText:
        """Create it from a folder with a ``tokenizer.json``; ``ConfigError`` if there is none."""
        TextTokenizer.from_folder(folder)  # for its errors, which name the folder
        return cls.from_files(read_text_files(Path(folder)))

    def with_chat_template(self, template: bytes) -> ModelText:
        """Return it with this template in place of all others."""
        files, bos_token_id = with_template(self.files.files, template), self.files.bos_token_id
        made = TokenizerFiles(files, bos_token_id, _hash(files, bos_token_id))
        return replace(self, files=made, chat=ChatRenderer.from_files(files))


def read_chat_template(path: Path | str) -> bytes:
    """Read the file of a chat template; ``ConfigError`` if it cannot be read or is no template."""
    try:
        content = read_bounded(Path(path))
        compile_template(content.decode())
    except OSError as error:
        raise ConfigError("coordinator.chat_template", f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, jinja2.TemplateError) as error:
        raise ConfigError("coordinator.chat_template", f"{path} is no Jinja template: {error}") from error
    return content


def read_text_files(folder: Path) -> dict[str, bytes]:
    """Read the text files of a folder, by their names in it; ``ConfigError`` for one that cannot be read."""
    named = [name for name in JSON_FILES if (folder / name).is_file()]
    return {name: _read(folder, name) for name in (*named, *template_files(folder))}


def most_bytes(name: str) -> int:
    """Most bytes that are read of a file of this name."""
    return TOKENIZER_BYTES.most if name == TOKENIZER_FILE else MAX_SETTINGS_BYTES


def _read(folder: Path, name: str) -> bytes:
    try:
        return read_of_folder(folder, name, most_bytes(name))
    except OSError as error:
        raise ConfigError("coordinator.tokenizer", f"{folder / name} cannot be read: {error.strerror}") from error


def template_files(folder: Path) -> list[str]:
    """Names of a folder's chat templates, apart from those inside its JSON files."""
    further = sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))[:MAX_TEMPLATES]
    named = [TEMPLATE_FILE, LEGACY_TEMPLATE_FILE, *(f"{TEMPLATE_FOLDER}/{path.name}" for path in further)]
    return [name for name in named if (folder / name).is_file()]


def _hash(files: Mapping[str, bytes], bos_token_id: int | None) -> str:
    digest = hashlib.sha256(str(bos_token_id).encode())
    for name in sorted(files):
        digest.update(f"\0{name}\0{len(files[name])}\0".encode() + files[name])
    return digest.hexdigest()
