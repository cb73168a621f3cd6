"""Small tokenizers: one id for each byte, and one with merged pieces that split and join characters."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from outrider.tokenization import TextTokenizer

END = "<|end|>"
START = "<|start|>"


def byte_alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(*, merges: tuple[tuple[str, str], ...] = (), has_start: bool = False) -> Tokenizer:
    """Byte-level BPE: all bytes, the merges, and an end token."""
    pieces = [*byte_alphabet(), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True), AddedToken(START, special=True)])
    if has_start:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{START} $A", special_tokens=[(START, tokenizer.token_to_id(START))]
        )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece's way: spaces as U+2581, unknown characters as a token for each byte."""
    vocab = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    vocab += [("\u2581hello", -1.0), ("\u2581world", -1.0), ("\u2581", -3.0), ("hello", -2.0)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def text_tokenizer(tokenizer: Tokenizer) -> TextTokenizer:
    found = TextTokenizer.from_files({"tokenizer.json": tokenizer.to_str().encode()})
    assert found is not None
    return found
