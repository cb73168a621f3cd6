"""Tokenizers of each kind, small: the same texts under every model and decoder that published models have."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from outrider.tokenization import TextTokenizer
from tests.coordinator.tokenizers_for_tests import byte_alphabet, text_tokenizer

SPECIALS = ("<s>", "</s>", "<|im_end|>")
WORDS = ("hello", "world", "the", "do", "not", "n't", "'s", ",", ".", "!", "?", "中", "é", "x")
PARTS = ("he", "llo", "ing", "ed", "s", "t", "a", "o", "\u2581", "w")


def _vocab(pieces: Iterable[str]) -> dict[str, int]:
    return {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}


def _added(tokenizer: Tokenizer) -> TextTokenizer:
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return text_tokenizer(tokenizer)


def _bpe(pieces: Iterable[str], *, fallback: bool = False, suffix: str = "") -> Tokenizer:
    vocab = _vocab(["<unk>", *pieces])
    named = {"end_of_word_suffix": suffix} if suffix else {}
    return Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=fallback, **named))


def _marked() -> list[str]:
    return [*("\u2581" + word for word in WORDS), *WORDS, *PARTS, "\u2581\u2581", "a\u2581b"]


def _byte_tokens() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> TextTokenizer:
    """GPT-2, Llama 3, Qwen: some pieces end inside one character and begin inside another."""
    torn = ["Ġhello", "Ġä¸", "Ńå", "Ł½ĺ", "ðŁ", "ðŁĺĢ", "ä¸Ń", "½å", "Ġ", "ĠĠ", "ï¿½", "à¤", "¸à"]
    tokenizer = _bpe([*byte_alphabet(), *torn])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _added(tokenizer)


def _fallback(decoder: decoders.Decoder) -> TextTokenizer:
    tokenizer = _bpe([*_byte_tokens(), *_marked()], fallback=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoder
    return _added(tokenizer)


def llama_2() -> TextTokenizer:
    """Byte fallback, and a space that is stripped at the beginning."""
    mark = decoders.Replace("\u2581", " ")
    return _fallback(decoders.Sequence([mark, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]))


def gemma() -> TextTokenizer:
    """Byte fallback, and a text that does not depend on its beginning."""
    return _fallback(decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]))


def metaspace_fallback() -> TextTokenizer:
    """Byte fallback before Metaspace."""
    return _fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


def metaspace() -> TextTokenizer:
    """Metaspace without byte fallback: unknown characters are ``<unk>``."""
    tokenizer = _bpe(_marked())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _added(tokenizer)


def unigram() -> TextTokenizer:
    """T5, XLNet: Unigram with a space put before the first word only."""
    pieces = dict.fromkeys(["<unk>", *_marked()])
    tokenizer = Tokenizer(models.Unigram([(piece, -float(index)) for index, piece in enumerate(pieces)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return _added(tokenizer)


def _word_piece(decoder: decoders.Decoder) -> TextTokenizer:
    vocab = _vocab(["<unk>", *WORDS, *PARTS, *("##" + part for part in (*PARTS, *WORDS)), "##", "do not"])
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoder
    return _added(tokenizer)


def word_piece() -> TextTokenizer:
    """BERT: a space before each word that is no continuation, and clean-up before punctuation."""
    return _word_piece(decoders.WordPiece(cleanup=True))


def word_piece_without_clean_up() -> TextTokenizer:
    """BERT without clean-up."""
    return _word_piece(decoders.WordPiece(cleanup=False))


def joined_clean_up() -> TextTokenizer:
    """Clean-up of the joined text: a token may rewrite the text of the one before it."""
    return _word_piece(
        decoders.Sequence([decoders.WordPiece(cleanup=False), decoders.Fuse(), decoders.Replace(" n't", "n't")])
    )


def joined_clean_up_twice() -> TextTokenizer:
    """Clean-up in two steps: any text may be rewritten."""
    steps = [decoders.Replace("do n't", "don't"), decoders.Replace(" .", ".")]
    return _word_piece(decoders.Sequence([decoders.WordPiece(cleanup=False), decoders.Fuse(), *steps]))


def suffix() -> TextTokenizer:
    """CLIP, the first GPT: the last piece of a word is marked, and a space follows it unless the text ends."""
    tokenizer = _bpe([*(word + "</w>" for word in WORDS), *WORDS, *PARTS, "</w>"], suffix="</w>")
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return _added(tokenizer)


def without_decoder() -> TextTokenizer:
    """Tokens joined by spaces."""
    return _added(_bpe([*WORDS, *PARTS]))


def repeats_dropped() -> TextTokenizer:
    """CTC: a token that equals the one before it has no text."""
    tokenizer = _bpe([*WORDS, *PARTS, "<pad>", "|"])
    tokenizer.decoder = decoders.CTC()
    return _added(tokenizer)


KINDS: tuple[Callable[[], TextTokenizer], ...] = (
    byte_level,
    llama_2,
    gemma,
    metaspace_fallback,
    metaspace,
    unigram,
    word_piece,
    word_piece_without_clean_up,
    suffix,
    joined_clean_up,
    joined_clean_up_twice,
    without_decoder,
    repeats_dropped,
)
