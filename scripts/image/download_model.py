"""Fetches a model from the Hub into a folder: what the chart runs before a program that reads the model there.

A folder that is complete serves when the Hub cannot be reached; one that is not is an error, so that it is tried again.
Only what the programs read is fetched.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

_FILES = ("*.json", "tokenizer*")
_WEIGHTS = "*.safetensors"
_IGNORED = ("consolidated*", "original/*")
"""The same weights once more, in another layout."""
_MARK = ".outrider-complete"


def main(words: Sequence[str] | None = None) -> int:
    """Fetch what is missing; the exit status."""
    given = _arguments(words)
    folder: Path = given.folder
    mark, wanted = folder / _MARK, f"{given.repository}@{given.revision}"
    try:
        fetch(given.repository, given.revision, folder, [*_FILES, *([_WEIGHTS] if given.weights else [])])
    except Exception as error:  # whatever it is: a missing host, a proxy, a token, a disk
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        if mark.is_file() and mark.read_text(encoding="utf-8") == wanted:
            print(f"warning: {wanted} was not checked ({reason}); what is in {folder} is used", file=sys.stderr)
            return 0
        print(f"error: {wanted} was not fetched into {folder}: {reason}", file=sys.stderr)
        return 1
    mark.write_text(wanted, encoding="utf-8")
    return 0


def fetch(repository: str, revision: str, folder: Path, patterns: list[str]) -> None:
    """Have the repository's files of these patterns in the folder; raises when one is not there in the end."""
    found = HfApi().model_info(repository, revision=revision)
    named = [sibling.rfilename for sibling in found.siblings or []]
    wanted = [name for name in named if _fits(name, patterns) and not _fits(name, _IGNORED)]
    # Given a folder with anything in it, this is content with that when the Hub goes away.
    snapshot_download(
        repository, revision=found.sha, local_dir=folder, allow_patterns=patterns, ignore_patterns=list(_IGNORED)
    )
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing or not wanted:
        raise FileNotFoundError(f"{', '.join(missing[:3]) or 'nothing that a model has'} of {repository} is missing")


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", help="owner/name on the Hub")
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--revision", default="main", help="a commit, branch or tag")
    parser.add_argument("--no-weights", dest="weights", action="store_false", help="only configuration and tokenizer")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
