"""Tokenizers for tests of grammars: the embedded pair's, and one of a few letters."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from outrider.structured_output import GrammarCompiler, Matcher
from outrider.types import Grammar, GrammarKind

FILE = Path(__file__).parents[2] / "outrider" / "demo" / "pair" / "target" / "tokenizer.json"
TOKENIZER = Tokenizer.from_str(FILE.read_text())
VOCAB_SIZE, EOS = 2048, 1


def compiler() -> GrammarCompiler:
    return GrammarCompiler({"tokenizer.json": FILE.read_bytes()}, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))


def matcher(kind: str, text: object) -> Matcher:
    """Matcher of a grammar, for the pair's tokenizer."""
    given = text if isinstance(text, str) else json.dumps(text)
    return compiler().compile(Grammar(GrammarKind(kind), given), (EOS,))


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return found


def letters(alphabet: str) -> GrammarCompiler:
    """A compiler for a tokenizer with a token for each letter, and after them an end of sequence."""
    vocabulary = {letter: token_id for token_id, letter in enumerate((*alphabet, "</s>"))}
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": len(alphabet), "content": "</s>", "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    files = {"tokenizer.json": json.dumps(content).encode()}
    return GrammarCompiler(files, vocab_size=len(vocabulary), eos_token_ids=(len(alphabet),))
