"""Download of a model into a folder, from the Hub, S3 or Cloud Storage: the chart's init container runs it.

Only files that the programs read are fetched. A complete folder is used when its source cannot be reached; an
incomplete one is an error, so that the download is tried again.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

_FILES = ("*.json", "tokenizer*")
_WEIGHTS = "*.safetensors"
_IGNORED = ("consolidated*", "original/*")
"""The same weights in another layout."""
_MARK = ".outrider-complete"
_TAGS = ".outrider-tags.json"
"""Name -> entity tag of the files that were fetched from a bucket."""
_NUM_CONNECTIONS = 8
_STALE_S = 24 * 3600
"""A partial file of this age was left by a pod that is gone."""


def main(words: Sequence[str] | None = None) -> int:
    """Fetch what is missing; the exit status."""
    given = _arguments(words)
    folder: Path = given.folder
    patterns = [*_FILES, *([_WEIGHTS] if given.weights else [])]
    is_bucket = "://" in given.source
    wanted = given.source if is_bucket else f"{given.source}@{given.revision}"
    try:
        if is_bucket:
            fetch_from_bucket(given.source, folder, patterns)
        else:
            fetch_from_hub(given.source, given.revision, folder, patterns)
    except Exception as error:  # whatever it is: a missing host, a proxy, credentials, a disk
        return _report(error, wanted, folder)
    (folder / _MARK).write_text(wanted, encoding="utf-8")
    return 0


def _report(error: Exception, wanted: str, folder: Path) -> int:
    reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    mark = folder / _MARK
    if mark.is_file() and mark.read_text(encoding="utf-8") == wanted:
        print(f"warning: {wanted} was not checked ({reason}); what is in {folder} is used", file=sys.stderr)
        return 0
    print(f"error: {wanted} was not fetched into {folder}: {reason}", file=sys.stderr)
    return 1


def fetch_from_hub(repository: str, revision: str, folder: Path, patterns: list[str]) -> None:
    """Have the repository's files of these patterns in the folder; raises when one is not there in the end."""
    from huggingface_hub import HfApi, snapshot_download

    found = HfApi().model_info(repository, revision=revision)
    wanted = _wanted([sibling.rfilename for sibling in found.siblings or []], patterns)
    # snapshot_download accepts a folder with any file in it when the Hub goes away: the check below does not.
    snapshot_download(
        repository, revision=found.sha, local_dir=folder, allow_patterns=patterns, ignore_patterns=list(_IGNORED)
    )
    _check(folder, wanted, repository)


def fetch_from_bucket(url: str, folder: Path, patterns: list[str]) -> None:
    """Have the files of these patterns that are directly below ``url`` in the folder; raises when one is missing.

    Credentials, region and endpoint are those of the environment, as for the providers' own tools.
    """
    import obstore

    # An endpoint in the cluster may speak plain HTTP.
    store = obstore.store.from_url(
        url.rstrip("/"),
        client_options={"allow_http": True, "timeout": timedelta(hours=12)},
        retry_config={"max_retries": 5, "retry_timeout": timedelta(seconds=60)},
    )
    found = {str(entry["path"]): entry for entry in obstore.list_with_delimiter(store)["objects"]}
    wanted = _wanted(list(found), patterns)
    folder.mkdir(parents=True, exist_ok=True)
    tags = _read_tags(folder)
    missing = [name for name in wanted if not _is_there(folder / name, found[name], tags.get(name))]

    def fetch(name: str) -> None:
        _write(folder / name, found[name]["size"], lambda: obstore.get(store, name).stream())
        tags[name] = found[name]["e_tag"]

    try:
        with ThreadPoolExecutor(_NUM_CONNECTIONS) as threads:
            list(threads.map(fetch, missing))
    finally:
        (folder / _TAGS).write_text(json.dumps(tags), encoding="utf-8")
        _remove_stale(folder)
    _check(folder, wanted, url)


def _wanted(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    def fits(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch(name, pattern) for pattern in patterns)

    return [name for name in names if fits(name, patterns) and not fits(name, _IGNORED)]


def _check(folder: Path, wanted: Sequence[str], source: str) -> None:
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing or not wanted:
        raise FileNotFoundError(f"{', '.join(missing[:3]) or 'every file of a model'} is missing in {source}")


def _is_there(path: Path, entry: Any, tag: object) -> bool:  # noqa: ANN401 - a typed dictionary of obstore's
    return path.is_file() and path.stat().st_size == entry["size"] and tag == entry["e_tag"]


def _write(path: Path, size: int, open_stream: Callable[[], Any]) -> None:
    """Write a file under another name, the host's, and rename it when it is whole: other pods may fetch it too."""
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.partial")
    with partial.open("wb") as file:
        for chunk in open_stream():
            file.write(chunk)
    if partial.stat().st_size != size:
        raise OSError(f"{path.name} has {partial.stat().st_size} of {size} bytes")
    partial.replace(path)


def _read_tags(folder: Path) -> dict[str, object]:
    try:
        tags = json.loads((folder / _TAGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return tags if isinstance(tags, dict) else {}


def _remove_stale(folder: Path) -> None:
    for partial in folder.glob(".*.partial"):
        if time.time() - partial.stat().st_mtime > _STALE_S:
            partial.unlink(missing_ok=True)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="owner/name on the Hub, s3://bucket/folder or gs://bucket/folder")
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--revision", default="main", help="on the Hub: a commit, branch or tag")
    parser.add_argument("--no-weights", dest="weights", action="store_false", help="only configuration and tokenizer")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
