"""The first look at a model's folder, before torch is imported: it answers in milliseconds what is plainly wrong."""

from __future__ import annotations

from pathlib import Path

from outrider.errors import ModelError


def require_model_folder(folder: Path | str) -> None:
    """Raise ``ModelError`` unless this is a folder with a ``config.json``; loading says what else is missing."""
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(f"{path} is not a folder: give a folder with config.json and *.safetensors")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path / 'config.json'} is missing: a model folder has config.json and *.safetensors")
