"""Train the embedded model from scratch: corpus, tokenizer, weights.

    python -m tests.replica.builtin_model.train --out DIR    # rebuild it: about ten minutes on one core
    python -m tests.replica.builtin_model.train --check      # rebuild it and compare with the committed files

The run is deterministic: one seed, one thread, generated text. The tokenizer files are equal on all machines. The
weights are bit-equal on the same type of processor with the same torch version, and differ on others, because the order
of floating-point sums differs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from quire.replica.builtin_model import CHECKPOINT
from tests.replica.builtin_model.corpus import END_OF_TEXT, TURN_END, TURN_START, documents

# The form of calls is that of Qwen 2.5 (the family `hermes` of `router/chat`). Without tools it is plain ChatML.
CHAT_TEMPLATE = r"""{%- if tools -%}
{{- '<|im_start|>system\n' -}}
{%- if messages[0]['role'] == 'system' -%}
{{- messages[0]['content'] + '\n\n' -}}
{%- endif -%}
{{- 'Tools:\n' -}}
{%- for tool in tools -%}
{{- tool | tojson + '\n' -}}
{%- endfor -%}
{{- 'To call one, write <tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (tools and loop.first and message['role'] == 'system') -%}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] -}}
{%- for call in message['tool_calls'] or [] -%}
{{- '\n' if message['content'] or not loop.first else '' -}}
{{- '<tool_call>\n{"name": "' + call['function']['name'] + '", "arguments": ' -}}
{{- call['function']['arguments'] | tojson + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' + '\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""

MAX_POSITION = 4096
HELD_OUT_DOCUMENTS = 200


@dataclass(frozen=True, slots=True)
class Recipe:
    """Parameters of the training.

    `batch_shapes` are the shapes [rows, tokens] of successive batches, repeated. Long rows of many documents train the
    positions up to `MAX_POSITION`, and that earlier text in a row is another document.
    """

    steps: int = 1400
    seed: int = 0
    held_out_seed: int = 1_000_003
    vocab_size: int = 1024
    tokenizer_documents: int = 4000
    peak_learning_rate: float = 4e-3
    warmup_steps: int = 60
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    batch_shapes: tuple[tuple[int, int], ...] = ((4, 512),) * 9 + ((2, 1024),) * 2 + ((1, 4096),)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Quality on held-out text."""

    loss: float  # nats per token
    mean_max_probability: float  # mean over positions of the probability of the most likely token


def train_tokenizer(recipe: Recipe) -> Tokenizer:
    """Train a byte-level BPE on the first documents of the corpus; its alphabet has all 256 bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = islice(documents(recipe.seed), recipe.tokenizer_documents)
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    """A Llama of 0.9 million parameters with grouped queries: 4 query heads, 2 key/value heads."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITION,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        initializer_range=0.04,
    )


def packed_rows(recipe: Recipe, tokenizer: Tokenizer) -> Iterator[torch.Tensor]:
    """Documents packed into rows; each row starts with a document and may cut its last one.

    Yields
    ------
    torch.Tensor
        [rows, tokens + 1] int64, in the shapes of the recipe: inputs are all but the last column,
        targets all but the first.
    """
    texts = documents(recipe.seed)
    while True:
        for rows, length in recipe.batch_shapes:
            batch = []
            for _ in range(rows):
                ids: list[int] = []
                while len(ids) <= length:
                    ids += tokenizer.encode(next(texts)).ids
                batch.append(ids[: length + 1])
            yield torch.tensor(batch)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a half cosine down to zero."""
    if step < recipe.warmup_steps:
        return recipe.peak_learning_rate * (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return recipe.peak_learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def train_model(
    recipe: Recipe, tokenizer: Tokenizer, *, progress: bool = True
) -> tuple[LlamaForCausalLM, list[float]]:
    """Train with AdamW; returns the model and the loss of each step, in nats per token."""
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(model_config(tokenizer)).float().train()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": gains, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    losses: list[float] = []
    batches = islice(packed_rows(recipe, tokenizer), recipe.steps)
    bar = tqdm(batches, total=recipe.steps, unit="step", disable=not progress)
    for step, batch in enumerate(bar):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        loss = token_losses(model, batch)[0].mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    return model.eval(), losses


def token_losses(model: LlamaForCausalLM, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and logits of next-token prediction.

    Parameters
    ----------
    model
        The model, in either mode.
    batch
        [rows, tokens + 1] int64.

    Returns
    -------
    tuple
        Losses in nats, [rows * tokens] float32, and logits, [rows * tokens, vocab] float32.
    """
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits.flatten(0, 1)
    return F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="none"), logits


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, tokenizer: Tokenizer, seed: int, count: int) -> Evaluation:
    """Evaluate the first `count` documents with `seed`, each document alone."""
    losses, peaks = [], []
    for text in islice(documents(seed), count):
        loss, logits = token_losses(model, torch.tensor([tokenizer.encode(text).ids]))
        losses.append(loss)
        peaks.append(logits.softmax(-1).amax(-1))
    return Evaluation(torch.cat(losses).mean().item(), torch.cat(peaks).mean().item())


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write a checkpoint folder: float32 safetensors, configs, tokenizer, template."""
    out.mkdir(parents=True, exist_ok=True)
    ends = [tokenizer.token_to_id(token) for token in (TURN_END, END_OF_TEXT)]
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_p=0.9, eos_token_id=ends, pad_token_id=ends[1]
    )
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes 0600, which a wheel would keep
    save_tokenizer(tokenizer, out)


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.

    Writes the configuration without transformers, so that its bytes do not depend on a version.
    """
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITION,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def differences(rebuilt: Path, committed: Path) -> list[str]:
    """Names of files in `committed` that differ from `rebuilt`; weights are compared by tensor."""
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    wrong = [n for n in names if (rebuilt / n).read_bytes() != (committed / n).read_bytes()]
    weights = "model.safetensors"
    new, old = load_file(rebuilt / weights), load_file(committed / weights)
    if new.keys() != old.keys() or not all(torch.equal(new[name], old[name]) for name in old):
        wrong.append(weights)
    return wrong


def build(recipe: Recipe, out: Path) -> Evaluation:
    """Train everything, write it to `out` and evaluate it on held-out documents."""
    tokenizer = train_tokenizer(recipe)
    model, _ = train_model(recipe, tokenizer)
    save(model, tokenizer, out)
    return evaluate(model, tokenizer, recipe.held_out_seed, HELD_OUT_DOCUMENTS)


def main() -> int:
    """Entry point; returns 1 when `--check` finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="folder to write")
    parser.add_argument("--steps", type=int, default=Recipe().steps, help="training steps")
    parser.add_argument("--check", action="store_true", help="compare with the committed files")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    torch.set_num_threads(
        1
    )  # the order of sums, and so the bits of the result, depends on the number of threads
    recipe = Recipe(steps=options.steps)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) if options.check else options.out
        result = build(recipe, out)
        print(
            f"held out: loss {result.loss:.4f} nats per token, "
            f"mean max-probability {result.mean_max_probability:.3f}"
        )
        wrong = differences(out, CHECKPOINT) if options.check else []
    if wrong:
        print("differs from the committed checkpoint: " + ", ".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
