"""Facts from a model folder's tokenizer files, read as JSON only.

Owns how many ids it knows, the id it puts first, and the hash by which two
tokenizers are compared. Refuses to tokenize: that is the coordinator's.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from outrider.errors import ModelError
from outrider.model_executor.models.json_files import (
    is_there,
    one_line,
    parse_object,
    read_bytes,
    shown,
)
from outrider.tokenization.model_text import JSON_FILES, most_bytes, template_files

_log = logging.getLogger(__name__)
_MATCHING_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
"""Flags that decide where an added token is found; whether it is "special" only decides how it is shown."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """Tokenizer facts in a service's description; all empty for a folder without a tokenizer."""

    files: dict[str, bytes] = field(default_factory=dict)
    num_token_ids: int = 0
    """One more than the largest id; 0 without a tokenizer."""
    bos_token_id: int | None = None
    """The id put before every text, if the tokenizer asks for one."""
    sha256: str = ""
    """Hash of the files that decide the ids."""


def read_tokenizer(folder: Path, *, vocab_size: int) -> TokenizerFacts:
    """Read a folder's tokenizer files; ``ModelError`` when they cannot be read or do not fit the model."""
    files = {name: read_bytes(folder, name, most_bytes(name)) for name in JSON_FILES if is_there(folder / name)}
    templates = {name: read_bytes(folder, name) for name in template_files(folder)}
    if "tokenizer.json" not in files:
        return TokenizerFacts(files=files | templates)
    contents = {name: parse_object(folder / name, content) for name, content in files.items()}
    tokenizer = contents["tokenizer.json"]
    try:
        ids = _ids_by_token(tokenizer)
        path = folder / "tokenizer.json"
        _check_ids(path, ids.items())
        added = list(_post_processor_ids(tokenizer.get("post_processor") or {}))
        _check_ids(path, added, " in its post_processor")
        _check_rows(path, added, vocab_size, " in its post_processor")
        facts = TokenizerFacts(
            files=files | templates,
            num_token_ids=min(max(ids.values(), default=-1) + 1, vocab_size),
            bos_token_id=_bos_token_id(tokenizer, contents.get("tokenizer_config.json", {}), ids),
            sha256=tokenizer_hash(tokenizer),
        )
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ModelError(
            f"{folder / 'tokenizer.json'} is not a tokenizer of the tokenizers library: {type(error).__name__}"
            f" {one_line(error)}"
        ) from error
    if facts.bos_token_id is not None and not 0 <= facts.bos_token_id < vocab_size:
        raise ModelError(
            f"{folder / 'tokenizer.json'} puts id {facts.bos_token_id} first; the model has only {vocab_size} rows"
        )
    _warn_of_unused(path, ids, vocab_size)
    return facts


def _warn_of_unused(path: Path, ids: Mapping[str, int], vocab_size: int) -> None:
    """Log the tokens, such as a pad, that the model has no row for. A prompt that has one is refused."""
    without_row = [token for token, token_id in ids.items() if token_id >= vocab_size]
    if without_row:
        rest = f" and {len(without_row) - 1} more" if len(without_row) > 1 else ""
        shown_token = shown(without_row[0])
        _log.warning("%s: token %s%s not used: the model has only %d rows", path, shown_token, rest, vocab_size)


def check_tokenizer(folder: Path, facts: TokenizerFacts) -> None:
    """Raise ``ModelError`` when the tokenizers library, which the coordinator uses, cannot read the folder's file."""
    content = facts.files.get("tokenizer.json")
    if content is None:
        return
    try:
        Tokenizer.from_buffer(content)
    except BaseException as error:  # the library raises bare Exception, and from its own bugs what is none
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ModelError(f"{folder / 'tokenizer.json'} cannot be used as a tokenizer: {one_line(error)}") from error


def _check_ids(path: Path, ids: Iterable[tuple[object, object]], where: str = "") -> None:
    for token, token_id in ids:
        if type(token_id) is not int or token_id < 0:
            raise ModelError(
                f"{path}: the id of token {shown(token)}{where} should be a whole number, not {shown(token_id)}"
            )


def _check_rows(path: Path, ids: Iterable[tuple[object, Any]], vocab_size: int, where: str = "") -> None:
    for _, token_id in ids:
        if token_id >= vocab_size:
            raise ModelError(f"{path} has token id {shown(token_id)}{where}; the model has only {vocab_size} rows")


def tokenizer_hash(tokenizer: Json) -> str:
    """SHA-256, in hex, of vocabulary, merges, normalisation and splitting, however the file is laid out."""
    deciding = {
        "model": _canonical_model(tokenizer["model"]),
        "normalizer": _without_defaults(tokenizer.get("normalizer")),
        "pre_tokenizer": _without_defaults(tokenizer.get("pre_tokenizer")),
        "added_tokens": sorted(
            (token["id"], token["content"], [bool(token.get(flag)) for flag in _MATCHING_FLAGS])
            for token in tokenizer.get("added_tokens") or []
        ),
    }
    return hashlib.sha256(json.dumps(deciding, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _ids_by_token(tokenizer: Json) -> dict[str, int]:
    vocab = tokenizer["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {entry[0]: index for index, entry in enumerate(vocab)}
    ids.update((token["content"], token["id"]) for token in tokenizer.get("added_tokens") or [])
    return ids


def _canonical_model(model: Json) -> Json:
    """Merges were written as "a b" once and as ["a", "b"] since."""
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or []]
    rest = {key: _without_defaults(entry) for key, entry in model.items() if not _is_default(entry)}
    return {**rest, "vocab": model["vocab"], "merges": merges}


def _without_defaults(value: object) -> object:
    """Older files leave out what newer ones write as null, false or empty."""
    if isinstance(value, dict):
        return {key: _without_defaults(entry) for key, entry in value.items() if not _is_default(entry)}
    return [_without_defaults(entry) for entry in value] if isinstance(value, list) else value


def _is_default(entry: object) -> bool:
    return entry is None or entry is False or entry == ""


def _bos_token_id(tokenizer: Json, settings: Json, ids: Mapping[str, int]) -> int | None:
    """``add_bos_token`` where it is said; otherwise what the post-processor puts first."""
    asked = settings.get("add_bos_token")
    if asked is None:
        return _template_bos(tokenizer.get("post_processor") or {})
    token = settings.get("bos_token")
    content = token.get("content") if isinstance(token, dict) else token
    return ids[content] if asked and content is not None else None


def _post_processor_ids(processor: Json) -> Iterator[tuple[object, object]]:
    """Tokens that are put into texts, anywhere, and their ids."""
    for part in processor.get("processors") or []:
        yield from _post_processor_ids(part)
    for token, entry in (processor.get("special_tokens") or {}).items():
        yield from ((token, token_id) for token_id in entry["ids"])
    for name in ("cls", "sep"):  # of BERT's and RoBERTa's
        if name in processor:
            token, token_id = processor[name]
            yield token, token_id


def _template_bos(processor: Json) -> int | None:
    if processor.get("type") == "Sequence":
        found = (_template_bos(part) for part in processor["processors"])
        return next((token_id for token_id in found if token_id is not None), None)
    single = processor.get("single") or [{}]
    first = single[0].get("SpecialToken") if processor.get("type") == "TemplateProcessing" else None
    return int(processor["special_tokens"][first["id"]]["ids"][0]) if first else None
