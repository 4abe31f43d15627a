"""Make checkpoints with random weights and the shapes of real models, without downloads.

    python -m tests.perf checkpoints halfb FOLDER

A model with random weights takes the same time and memory as the real one. Its greedy answers run to the limit.
"""

from __future__ import annotations

import argparse
import json
import string
from itertools import islice, product
from pathlib import Path
from typing import Any

VOCAB_SIZE = 32_000
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES: dict[str, dict[str, Any]] = {
    # 4 layers, 12 M parameters: seconds on any machine, for the regression guard.
    "tiny": dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=64),
    # 12 layers, about 110 M parameters.
    "small": dict(hidden_size=768, intermediate_size=2304, num_hidden_layers=12, num_attention_heads=12,
                  num_key_value_heads=4, head_dim=64),
    # Qwen3-0.6B but for the vocabulary: 473 M parameters, 33 M of them in the embedding.
    "halfb": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                  num_key_value_heads=8, head_dim=128),
}  # fmt: skip


def build(name: str, folder: Path, dtype: str = "bfloat16") -> Path:
    """Write the checkpoint of a shape, unless it exists.

    Parameters
    ----------
    name
        One of `SHAPES`. All have Qwen3's architecture, tied embeddings and a vocabulary of 32,000.
    folder
        Folder for config.json, safetensors and a tokenizer.

    Raises
    ------
    ValueError
        The name is unknown.
    """
    if name not in SHAPES:
        raise ValueError(f"checkpoint: must be one of {', '.join(SHAPES)}, got {name!r}")
    if (folder / "model.safetensors").is_file():
        return folder
    import torch
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_theta=1e6,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        **SHAPES[name],
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    _add_older_spellings(folder / "config.json")
    _write_tokenizer(folder)
    return folder


def _add_older_spellings(path: Path) -> None:
    """Add the field names of transformers 4, for engines that read them."""
    config = json.loads(path.read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config["torch_dtype"] = config["dtype"]
    path.write_text(json.dumps(config, indent=2) + "\n")


def _write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE of 32,000 tokens: bytes, then pairs and triples of letters and digits.

    Every id above the single bytes is plain text, so a stream of random ids decodes to text piece by piece.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*_SPECIAL, *alphabet]
    letters = string.ascii_letters + string.digits
    merges = [(a, b) for a, b in product(letters, repeat=2)]
    room = VOCAB_SIZE - len(vocabulary) - len(merges)
    merges += islice(((a + b, c) for a, b, c in product(letters, repeat=3)), room)
    vocabulary += [a + b for a, b in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[2],
        "pad_token": _SPECIAL[0],
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"))
    options = parser.parse_args()
    print(build(options.name, options.folder, options.dtype))


if __name__ == "__main__":
    main()
