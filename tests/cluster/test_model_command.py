"""`quire model check`, and `quire model fetch` from a small hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from quire.cluster.cli import main
from quire.replica.builtin_model import CHECKPOINT

COMMIT = "0123456789" * 4

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


class Hub(ThreadingHTTPServer):
    """The two routes of the Hugging Face hub that its library asks for a download; counts the requests."""

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), HubRoutes)
        self.folder = folder
        self.requests: list[str] = []


class HubRoutes(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        files = {file.name: file for file in self.server.folder.iterdir()}
        if self.path.startswith(f"/api/models/owner/name/tree/{COMMIT}"):
            tree = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": "0" * 40}
                for name, file in files.items()
            ]
            self._answer(json.dumps(tree).encode(), "application/json")
        elif (name := self.path.rpartition("/")[2]) in files:
            self._answer(files[name].read_bytes(), "application/octet-stream")
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "hub"
    shutil.copytree(CHECKPOINT, folder)
    (folder / "pytorch_model.bin").write_bytes(b"not wanted")
    with Hub(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_fetch_downloads_what_is_read_and_refuses_other_files(
    hub: Hub, tmp_path: Path, capsys
) -> None:
    environment = os.environ | {
        "HF_HOME": str(tmp_path / "cache"),
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_OFFLINE": "0",
    }

    def fetch(*options: str) -> tuple[int, list[str]]:
        command = [sys.executable, "-m", "quire.cluster.cli", "model", "fetch", "owner/name"]
        result = subprocess.run(
            [*command, f"--revision={COMMIT}", *options],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
        )
        return result.returncode, result.stdout.splitlines()

    status, (folder, digest) = fetch()
    assert status == 0
    assert sorted(file.name for file in Path(folder).iterdir()) == sorted(
        file.name for file in Path(CHECKPOINT).iterdir() if fits(file.name)
    )
    # The documented way to compute the digest.
    names = sorted(file.name for file in Path(folder).iterdir())
    lines = subprocess.run(
        ["sha256sum", *names], cwd=folder, capture_output=True, check=True
    ).stdout
    assert digest == f"sha256:{hashlib.sha256(lines).hexdigest()}"

    hub.requests.clear()
    assert fetch(f"--digest={digest}") == (0, [folder, digest])
    assert [path for path in hub.requests if "owner/name" in path] == []  # all files were there

    other = f"sha256:{'0' * 64}"
    status, (line,) = fetch(f"--digest={other}")
    assert status == 1 and digest in line and other in line
    assert main(["model", "fetch", "owner/name", "--digest=abc"]) == 1
    assert "64 hexadecimal digits" in capsys.readouterr().out

    # One changed byte of the weights, in the cache.
    weights = Path(folder) / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.resolve().write_bytes(changed)
    status, (line,) = fetch(f"--digest={digest}")
    assert status == 1 and digest in line


def fits(name: str) -> bool:
    return name.endswith((".json", ".jinja", ".safetensors")) or name.startswith("tokenizer")
