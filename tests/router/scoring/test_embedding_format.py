"""How a checkpoint's files for sentence-transformers are read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.protos.errors import EngineError, InvalidRequest, UnsupportedField
from quire.router.scoring.embedding_format import EmbeddingFormat

PREFIX = "sentence_transformers.models."
TYPES = ("Transformer", "Pooling", "Normalize")
LAST_TOKEN = {
    "word_embedding_dimension": 8,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_lasttoken": True,
    "include_prompt": True,
}


def write(folder: Path, pooling: Any = None, types: tuple[str, ...] = TYPES, **files: Any) -> Path:
    """A checkpoint's files as sentence-transformers writes them."""
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": PREFIX + kind}
        for i, kind in enumerate(types)
    ]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling or LAST_TOKEN))
    for name, content in ({"modules": modules} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_checkpoint_without_the_files_gets_the_last_token_normalised(tmp_path):
    assert EmbeddingFormat.load(tmp_path) == EmbeddingFormat("last", True, "", "")


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (LAST_TOKEN, "last"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"embedding_dimension": 8, "pooling_mode": "lasttoken"}, "last"),
        ({"embedding_dimension": 8, "pooling_mode": ["mean"]}, "mean"),
        ({"word_embedding_dimension": 8}, "mean"),
    ],
)
def test_the_mode_of_pooling_is_that_of_the_files(tmp_path, pooling, expected):
    prompts = {"prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": "query"}
    folder = write(tmp_path, pooling, config_sentence_transformers=prompts)
    assert EmbeddingFormat.load(folder) == EmbeddingFormat(expected, True, "Query: ")
    assert not EmbeddingFormat.load(write(tmp_path, pooling, TYPES[:2])).normalises


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(pooling={"pooling_mode_cls_token": True}), "one of lasttoken, mean, got \\['cls'\\]"),
        (dict(pooling={"pooling_mode": ["mean", "max"]}), "got \\['mean', 'max'\\]"),
        (dict(types=(*TYPES[:2], "Dense", "Normalize")), "got Transformer, Pooling, Dense, Normal"),
        (dict(modules={"a": 1}), "modules.json is not a list of modules"),
        (
            dict(modules=[dict(type="Transformer", path=""), dict(type="Pooling", path="../x")]),
            "'../x' is outside of the checkpoint",
        ),
        (
            dict(config_sentence_transformers={"default_prompt_name": "q", "prompts": {}}),
            "default_prompt_name must be one of the prompts, got 'q'",
        ),
        (
            dict(
                pooling=LAST_TOKEN | {"include_prompt": False},
                config_sentence_transformers={"default_prompt_name": "q", "prompts": {"q": "Q"}},
            ),
            "include_prompt must be true",
        ),
        (dict(sentence_bert_config={"do_lower_case": True}), "do_lower_case must be false"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path, changes, message):
    embedding = EmbeddingFormat.load(write(tmp_path, **changes))
    with pytest.raises(UnsupportedField, match=message):
        embedding.check(None, 8)


def test_dimensions_have_bounds():
    embedding = EmbeddingFormat()
    for dimensions in (None, 1, 8):
        embedding.check(dimensions, 8)
    for dimensions in (0, 9):
        with pytest.raises(InvalidRequest, match=rf"dimensions must be .*8.*, got {dimensions}"):
            embedding.check(dimensions, 8)


def test_an_embedding_is_cut_and_then_normalised():
    pooled = np.array([3, 4, 12], np.float32)
    assert EmbeddingFormat().finish(pooled, 2).tolist() == np.float32([0.6, 0.8]).tolist()
    whole = EmbeddingFormat().finish(pooled, None)
    assert whole.dtype == np.float32 and whole.tolist() == np.float32(pooled / 13.0).tolist()
    assert EmbeddingFormat(normalises=False).finish(pooled, 2).tolist() == [3, 4]
    for values in ([0, 0, 1], [np.nan, 1, 0], [np.inf, 1, 0]):
        with pytest.raises(EngineError, match="length"):
            EmbeddingFormat().finish(np.array(values, np.float32), 2)
