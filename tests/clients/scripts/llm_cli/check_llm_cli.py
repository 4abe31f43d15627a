"""The command `llm`: a prompt, and one with a schema."""

from __future__ import annotations

import json
import os
import subprocess

from checks import Target, run

SCHEMA = {
    "type": "object",
    "properties": {
        "country": {"enum": ["France", "Japan", "Peru"]},
        "districts": {"type": "integer"},
    },
    "required": ["country", "districts"],
}


def _prompt(target: Target, *arguments: str) -> str:
    """What the command prints, with the server as a model of its configuration."""
    settings = {
        "model_id": "served",
        "model_name": target.model,
        "api_base": target.api,
        "supports_schema": True,
    }
    lines = [f"{name}: {json.dumps(value)}\n" for name, value in settings.items()]
    path = target.work / "extra-openai-models.yaml"
    path.write_text("- " + "  ".join(lines))
    environment = os.environ | {"LLM_USER_PATH": str(target.work), "OPENAI_API_KEY": "none"}
    command = ["llm", "prompt", "-m", "served", "-o", "max_tokens", "64", *arguments]
    command += ["Name a city."]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-400:])
    return done.stdout


def prompt(target: Target) -> None:
    assert _prompt(target).strip()


def whole(target: Target) -> None:
    assert _prompt(target, "--no-stream").strip()


def schema(target: Target) -> None:
    city = json.loads(_prompt(target, "--schema", json.dumps(SCHEMA)))
    assert city["country"] in ("France", "Japan", "Peru")
    assert isinstance(city["districts"], int)


run([prompt, whole, schema])
