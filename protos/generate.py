"""Regenerate this folder's gRPC code from its `.proto` files: `python -m quire.protos.generate`.

Generated code does not load under a protobuf or grpcio older than the tools that generated it. So this script uses the
oldest tools that the package supports, in a new virtual environment, instead of the installed ones.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

PROTO_DIR = Path(__file__).resolve().parent
PROTO_NAMES = ("generation", "control")
# grpcio-tools: the oldest version that generates code (protobuf 6.30) for protobuf 6 and 7. The lower bounds
# in pyproject.toml are the same.
TOOLS_VERSION = "1.72.1"


def compile_protos(out_dir: Path, python: str = sys.executable) -> list[Path]:
    """Compile every proto into `out_dir`.

    Parameters
    ----------
    out_dir
        An existing directory.
    python
        Interpreter with grpcio-tools.

    Returns
    -------
    The generated files.

    Raises
    ------
    subprocess.CalledProcessError
        A proto has an error, which protoc prints.
    """
    # The virtual path makes the generated imports read `from quire.protos import ...`.
    command = [python, "-m", "grpc_tools.protoc", f"-Iquire/protos={PROTO_DIR}"]
    command += [f"--{kind}_out={out_dir}" for kind in ("python", "pyi", "grpc_python")]
    command += [f"quire/protos/{name}.proto" for name in PROTO_NAMES]
    subprocess.run(command, check=True)
    return sorted((out_dir / "quire" / "protos").iterdir())


def main() -> None:
    """Replace the generated files in this folder."""
    with tempfile.TemporaryDirectory() as tmp:
        tools, out_dir = Path(tmp) / "tools", Path(tmp) / "out"
        out_dir.mkdir()
        venv.create(tools, with_pip=True)
        python = str(tools / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, f"grpcio-tools=={TOOLS_VERSION}"], check=True)
        for path in compile_protos(out_dir, python):
            shutil.copyfile(path, PROTO_DIR / path.name)
            print(f"wrote {PROTO_DIR / path.name}")


if __name__ == "__main__":
    main()
