"""The text the pair learns from: the standard library's own sources, split by file, and its tokenizer.

Owns which files count, which are held out, and how text becomes ids.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
BOS_ID = 0
EOS_ID = 1

TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
HELD_OUT_ONE_IN = 20
LARGEST_FILE_BYTES = 400_000

# A word takes the space after it, not the one before: a prompt such as "def " is then whole tokens that the model has
# seen in exactly that form. Line ends and indentation stand alone for the same reason: a prompt may end after either.
PIECES = r"[\p{L}_]+ ?|\p{N}{1,3} ?|[^\s\p{L}\p{N}_]+ ?|\n+| +|\s"

Ids = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the standard library."""

    path: str
    text: str

    @property
    def is_test(self) -> bool:
        """True if the file belongs to the library's own test suites."""
        return not TEST_FOLDERS.isdisjoint(Path(self.path).parts)

    @property
    def is_held_out(self) -> bool:
        """True if the file is kept for measuring: by a hash of its path, and never a test."""
        digest = hashlib.sha256(self.path.encode()).digest()
        return not self.is_test and int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True, slots=True)
class Corpus:
    """Packed token ids: each file is bos, its tokens, eos."""

    library: Ids
    tests: Ids
    held_out: Ids
    num_bytes: dict[str, int]
    num_files: dict[str, int]

    def save(self, path: Path) -> None:
        """Write everything to one compressed file."""
        arrays: dict[str, npt.ArrayLike] = {"library": self.library, "tests": self.tests, "held_out": self.held_out}
        arrays |= {f"bytes_{name}": count for name, count in self.num_bytes.items()}
        arrays |= {f"files_{name}": count for name, count in self.num_files.items()}
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> "Corpus":
        """Read what `save` wrote."""
        with np.load(path) as stored:
            return cls(
                library=stored["library"],
                tests=stored["tests"],
                held_out=stored["held_out"],
                num_bytes={k.removeprefix("bytes_"): int(stored[k]) for k in stored.files if k.startswith("bytes_")},
                num_files={k.removeprefix("files_"): int(stored[k]) for k in stored.files if k.startswith("files_")},
            )


def read_sources(folder: Path | None = None) -> list[SourceFile]:
    """The usable sources under `folder` (this interpreter's standard library by default), in path order."""
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    return list(_usable(root, sorted(root.rglob("*.py"))))


def _usable(root: Path, paths: Iterable[Path]) -> Iterator[SourceFile]:
    for path in paths:
        name = path.relative_to(root).as_posix()
        if _is_foreign(name) or path.stat().st_size > LARGEST_FILE_BYTES:
            continue
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
            ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue  # the test suites carry broken files on purpose
        if text.strip() and "decoding_table" not in text:
            yield SourceFile(name, text)


def _is_foreign(name: str) -> bool:
    """Installed packages, bundled wheels, and files generated when the interpreter was built."""
    return "site-packages" in name or "__pycache__" in name or Path(name).name.startswith("_sysconfigdata")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE; bos is put before every encoded text, as the Llama layout has it."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID), (EOS, EOS_ID)]
    )
    return tokenizer


def pack(tokenizer: Tokenizer, files: list[SourceFile]) -> Ids:
    """All files one after another, each bos, tokens, eos."""  # [T] uint16
    encodings = tokenizer.encode_batch([file.text for file in files])
    parts = [np.asarray([*encoding.ids, EOS_ID], dtype=np.uint16) for encoding in encodings]
    return np.concatenate([np.empty(0, np.uint16), *parts])


def build(vocab_size: int, folder: Path | None = None, tokenizer: Tokenizer | None = None) -> tuple[Tokenizer, Corpus]:
    """Read, split, learn the tokenizer from the library's training files unless one is given, and pack."""
    parts: dict[str, list[SourceFile]] = {"library": [], "tests": [], "held_out": []}
    for file in read_sources(folder):
        parts["tests" if file.is_test else "held_out" if file.is_held_out else "library"].append(file)
    if tokenizer is None:
        tokenizer = train_tokenizer((file.text for file in parts["library"]), vocab_size)
    packed = {name: pack(tokenizer, files) for name, files in parts.items()}
    return tokenizer, Corpus(
        **packed,
        num_bytes={name: sum(len(file.text.encode()) for file in files) for name, files in parts.items()},
        num_files={name: len(files) for name, files in parts.items()},
    )
