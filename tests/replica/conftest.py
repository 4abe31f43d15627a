"""Fixtures for the replica's tests: tiny checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Tests run with --import-mode=importlib, which leaves their folder off the path.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``zoo(name)``: the folder of a tiny checkpoint of `model_zoo`, built once a session."""
    import model_zoo

    root = tmp_path_factory.mktemp("zoo")

    def get(name: str) -> Path:
        path = root / name
        return path if path.exists() else model_zoo.build(name, root)

    return get


@pytest.fixture(scope="session")
def harness(zoo: Callable[[str], Path]) -> Callable[[str], object]:
    """``harness(name)``: the `Harness` of a checkpoint of the zoo, its weights loaded once a session."""
    from device_harness import Harness

    made: dict[str, Harness] = {}

    def get(name: str) -> Harness:
        if name not in made:
            made[name] = Harness(zoo(name))
        return made[name]

    return get
