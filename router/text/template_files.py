"""Finds the chat templates of a checkpoint: in files of their own, or in `tokenizer_config.json`.

| where | what |
|---|---|
| `chat_template.jinja` | the template named default |
| `additional_chat_templates/NAME.jinja` | further ones; transformers uses `tool_use` for messages with tools |
| `chat_template` in `tokenizer_config.json` | the default as a text, or a list of `{"name": ..., "template": ...}` |

Files replace the entry, as in transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.router.text.tokenizer import read_json_object

DEFAULT, TOOL_USE = "default", "tool_use"
_FOLDER = "additional_chat_templates"


def load_sources(folder: Path, file: Path | None = None) -> dict[str, str]:
    """Return the text of each chat template by its name; empty if there is none.

    Parameters
    ----------
    file
        Replaces all templates of the checkpoint.

    Raises
    ------
    FileNotFoundError
        `file` does not exist.
    ValueError
        A template is not a text; the message names file, entry and value.
    """
    if file is not None:
        return {DEFAULT: _read(file)}
    found = {path.stem: _read(path) for path in sorted((folder / _FOLDER).glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        found[DEFAULT] = _read(folder / "chat_template.jinja")
    if found:
        return found
    path = folder / "tokenizer_config.json"
    return _from_entry(read_json_object(path).get("chat_template"), path)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be UTF-8: {error}") from error


def _from_entry(entry: Any, path: Path) -> dict[str, str]:
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {DEFAULT: entry}
    if not isinstance(entry, list):
        raise ValueError(
            f"{path}: chat_template must be a string or a list of named templates, got {type(entry).__name__}"
        )
    found: dict[str, str] = {}
    for i, item in enumerate(entry):
        name = item.get("name") if isinstance(item, dict) else None
        template = item.get("template") if isinstance(item, dict) else None
        if not isinstance(name, str) or not isinstance(template, str):
            raise ValueError(
                f"{path}: chat_template[{i}] must be an object with the strings name and template, got "
                f"{str(item)[:80]!r}"
            )
        found[name] = template
    return found
