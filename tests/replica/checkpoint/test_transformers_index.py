"""The kept index of transformers' classes is the one that transformers makes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers.utils import import_utils

from quire.replica.checkpoint import transformers_index

MODELS = Path(transformers.__file__).parent / "models"
# `conftest.py` has changed the function.
MAKE = getattr(
    import_utils.define_import_structure, "args", (import_utils.define_import_structure,)
)[0]


@pytest.fixture
def models(tmp_path, monkeypatch) -> Path:
    """A copy of two models."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "transformers" / "models"
    for name in ("llama", "qwen3"):
        shutil.copytree(MODELS / name, folder / name)
    (folder / "__init__.py").write_text("")
    return folder


@pytest.fixture(autouse=True)
def forget():
    transformers_index._kept.cache_clear()
    yield
    transformers_index._kept.cache_clear()


def index_files(folder: Path) -> list[Path]:
    return list(folder.parents[1].glob("cache/transformers/*"))


def unmade(*_: object) -> None:
    raise AssertionError("the index is kept")


def test_the_kept_index_is_that_of_transformers(models):
    for prefix in (None, "models"):
        expected = MAKE(models, prefix)
        assert any("Qwen3Config" in names for names in expected[frozenset()].values())
        assert transformers_index._define(MAKE, models, prefix) == expected
        transformers_index._kept.cache_clear()  # as a new process
        assert transformers_index._define(unmade, models / "__init__.py", prefix) == expected
    assert len(index_files(models)) == 1


def test_a_file_that_changes_makes_another_index(models):
    transformers_index._define(MAKE, models)
    (models / "qwen3" / "configuration_qwen3.py").write_text('__all__ = ["Other"]\n')
    transformers_index._kept.cache_clear()
    for function in (MAKE, import_utils.create_import_structure_from_path):
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    found = transformers_index._define(MAKE, models)
    assert found == MAKE(models)
    assert {"Other"} in found[frozenset()].values()


@pytest.mark.parametrize("content", ["", "{", "[[1, 2]]", '{"a": 1}'])
def test_a_damaged_index_is_not_used(models, content):
    expected = transformers_index._define(MAKE, models)
    (file,) = index_files(models)
    file.write_text(content)
    transformers_index._kept.cache_clear()
    assert transformers_index._define(MAKE, models) == expected


def test_a_cache_folder_that_cannot_be_used_costs_time_only(models, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file"))
    assert transformers_index._define(MAKE, models) == MAKE(models)


def test_other_folders_are_left_to_transformers(tmp_path):
    assert transformers_index._define(lambda path, prefix: (path, prefix), tmp_path, "a") == (
        tmp_path,
        "a",
    )


def test_a_process_that_installs_it_reads_the_sources_once(tmp_path):
    """Real transformers: the second import finds what the first one has kept."""
    code = (
        "from quire.replica.checkpoint import transformers_index as t; t.install(); t.install()\n"
        "import transformers, sys\n"
        "from transformers.utils import import_utils\n"
        "assert transformers.LlamaConfig and transformers.models.qwen3.Qwen3Config\n"
        "assert not any(isinstance(f, t._Finder) for f in sys.meta_path)\n"
        "t.install()\n"
        "assert not any(isinstance(f, t._Finder) for f in sys.meta_path)\n"
        "print(import_utils.create_import_structure_from_path.cache_info().misses)\n"
    )
    misses = [
        int(
            subprocess.run(
                [sys.executable, "-c", code],
                env=os.environ | {"QUIRE_CACHE": str(tmp_path)},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for _ in range(2)
    ]
    assert misses[0] > 100 and misses[1] < 5, misses
