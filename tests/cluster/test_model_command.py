"""`quire model check`."""

from __future__ import annotations

import json

from quire.cluster.cli import main

# What a tiny model is made from; `OlmoForCausalLM` is small and quick.
OLMO = {
    "architectures": ["OlmoForCausalLM"],
    "model_type": "olmo",
    "vocab_size": 50_304,
    "eos_token_id": 2,
    "pad_token_id": 1,
}


def test_the_command_says_whether_a_model_is_served(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    for name, entries, status, text in (
        ("served", OLMO, 0, "OlmoForCausalLM: served on cpu"),
        ("refused", {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, 1, "'mamba'"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(entries))
        assert main(["model", "check", str(folder)]) == status
        assert text in capsys.readouterr().out
