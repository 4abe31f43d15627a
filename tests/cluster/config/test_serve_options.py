"""From the command line of `quire serve MODEL` to a Serve config."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.cluster.config import serve_config, serve_options
from quire.cluster.config.config_problems import ConfigError
from quire.cluster.config.default_config import default_config, to_yaml

ROOT = Path(__file__).parents[3]


def config_of(*line: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    serve_options.add_options(parser)
    return serve_options.config_of(parser.parse_args(line))


def test_a_model_alone_is_served_by_one_replica_and_one_router():
    expected = default_config({"model": "Qwen/Qwen3-8B", "replicas": 1, "routers": 1})
    assert config_of("Qwen/Qwen3-8B") == expected
    assert expected["http_options"] == {"host": "127.0.0.1", "port": 8000}
    (app,) = serve_config.check(expected).applications
    assert (app.config.model_name, app.config.replicas) == ("Qwen/Qwen3-8B", 1)


def test_every_option_reaches_its_place():
    config = config_of(
        *("owner/name", "--replicas", "3", "--routers", "2", "--device", "cpu"),
        *("--dtype", "bfloat16", "--max-model-len", "4096", "--kv-cache-gib", "0.5"),
        *("--served-model-name", "n", "--revision", "r", "--chat-template", "/t.jinja"),
        *("--host", "0.0.0.0", "--port", "1234", "--grpc-port", "1235"),
        *("--set", "engine.scheduler=fifo", "--set", "router.max_wait_s=2.5"),
        *("--set", 'http.cors_origins=["*"]', "--set", "engine.prefix_caching=false"),
    )
    assert config["http_options"] == {"host": "0.0.0.0", "port": 1234}
    assert config["grpc_options"]["port"] == 1235
    assert config["applications"][0]["args"] == {
        **{"model": "owner/name", "replicas": 3, "routers": 2, "device": "cpu"},
        **{"dtype": "bfloat16", "served_model_name": "n", "revision": "r"},
        "chat_template": "/t.jinja",
        "engine": {
            **{"max_model_len": 4096, "kv_cache_gib": 0.5},
            **{"scheduler": "fifo", "prefix_caching": False},
        },
        "router": {"max_wait_s": 2.5},
        "http": {"cors_origins": ["*"]},
    }


def test_the_printed_text_is_the_config_that_runs():
    config = config_of("embedded", "--set", "engine.block_size=16")
    assert serve_config.parse_yaml(to_yaml(config)) == config
    assert serve_config.check(yaml.safe_load(to_yaml(config))).applications[0].config is not None


def test_a_folder_becomes_absolute_for_workers_with_another_directory(tmp_path, monkeypatch):
    (tmp_path / "owner/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for word in ("./owner/name", "owner/name", "owner/name/", "~/owner/name"):
        assert serve_options.find_model(word) == str(tmp_path / "owner/name")
    assert serve_options.find_model("owner/other") == "owner/other"
    assert serve_options.find_model("embedded") == "embedded"


@pytest.mark.parametrize("word", ["nope", "./nope", "nope/a/b", "~/nope"])
def test_a_folder_that_is_not_there_is_named_with_the_directory(tmp_path, monkeypatch, word: str):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=f"model: there is no folder {tmp_path}/nope"):
        serve_options.find_model(word)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("--set", "engine.schedule=fifo"), "engine.schedule: unknown key; did you mean"),
        (("--set", "engine"), "--set: must be NAME=VALUE, got 'engine'"),
        (("--set", "model.x=1"), "model.x: model is not a section"),
        (("--set", "engine.block_size=[1"), "the value is not valid YAML"),
        (("--device", "gpu"), "device: must be 'auto', 'cpu' or 'cuda', got 'gpu'"),
        (("--replicas", "0"), "replicas: must be greater than or equal to 1, got 0"),
    ],
)
def test_a_wrong_option_is_named(line: tuple[str, ...], said: str):
    with pytest.raises(ConfigError) as caught:
        config_of("embedded", *line)
    assert said in str(caught.value)
