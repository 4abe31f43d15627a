"""A file in which a key is given twice is refused by every reader of files that others write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from quire.cluster.auth.key_file import KeyFileError, read_key_file
from quire.cluster.config import serve_config
from quire.protos.unique_keys import parse_json, parse_yaml
from quire.replica.builtin_model import CHECKPOINT
from quire.replica.checkpoint.checkpoint import check_header, resolve_checkpoint, weight_files
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.router.request.params import GenerationDefaults
from quire.router.text.chat_template import ChatTemplate
from quire.router.text.tokenizer import load_special_tokens


def test_what_has_no_key_twice_is_read():
    value = {"a": [{"b": 1}, {"b": 2}], "": {"a": None}}
    assert parse_json(json.dumps(value)) == parse_yaml(json.dumps(value)) == value


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 1}', '[{"b": {"a": 1, "c": 2, "a": 3}}]', '{"a": {}, "\\u0061": {}}']
)
def test_a_key_given_twice_is_refused(text: str):
    with pytest.raises(ValueError, match="'a' is given twice"):
        parse_json(text)
    with pytest.raises(yaml.YAMLError, match="'a' was given in line 1 already"):
        parse_yaml(text)


def twice(path: Path) -> None:
    """Write the first key of a JSON file once more, at its end, with another value."""
    text = path.read_text(encoding="utf-8").rstrip()
    name = next(iter(json.loads(text)))
    path.write_text(f"{text[:-1]}, {json.dumps(name)}: {{}}}}", encoding="utf-8")
    json.loads(path.read_text(encoding="utf-8"))  # other readers take it


def test_every_file_of_a_checkpoint(tmp_path):
    """Every JSON file that a checkpoint may have: the reader of the file must refuse it."""
    readers = {
        "config.json": resolve_checkpoint,
        "generation_config.json": lambda folder: (
            ModelSpec.from_checkpoint(Path(folder)),
            GenerationDefaults.load(Path(folder)),
        ),
        "tokenizer_config.json": load_special_tokens,
        "special_tokens_map.json": load_special_tokens,
        "tokenizer.json": lambda folder: ModelSpec.from_checkpoint(Path(folder)),
        "model.safetensors.index.json": lambda folder: weight_files(Path(folder)),
    }
    for name, read in readers.items():
        folder = tmp_path / name
        folder.mkdir()
        for file in CHECKPOINT.glob("*.json"):
            shutil.copy(file, folder)
        (folder / "model.safetensors").symlink_to(CHECKPOINT / "model.safetensors")
        if not (folder / name).exists():
            (folder / name).write_text('{"weight_map": {"a": "model.safetensors"}}')
        twice(folder / name)
        with pytest.raises(ValueError, match=rf"{name}: not (readable as )?JSON: .*is given twice"):
            read(str(folder))
    with pytest.raises(ValueError, match="is given twice"):
        ChatTemplate.load(tmp_path / "tokenizer_config.json")


def test_a_header_of_weights(tmp_path):
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    header += b"," + header[1:] + b"}"
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"0")
    with pytest.raises(ValueError, match="'a' is given twice"):
        check_header(file)


@pytest.mark.parametrize("text", ['{"keys": [], "keys": []}', "keys: []\nkeys: []"])
def test_a_key_file_and_a_configuration(tmp_path, text: str):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(KeyFileError, match=r"twice|not valid YAML: line 2"):
        read_key_file(path)
    with pytest.raises(ValueError, match="'keys' was given in line 1 already"):
        serve_config.parse_yaml(text)
