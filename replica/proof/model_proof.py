"""Compares a tiny model of a checkpoint's class in Quire's engine with transformers' own forward pass.

```
 config.json ─▶ tiny_config ─▶ random weights ─┬─▶ the engine: chunks, a batch, preemption, ─▶ log-probabilities of
                                               │   cached prefixes, forks                      prompts and outputs
                                               └─▶ transformers, one sequence at a time ─────▶ the same
```

The engine runs as it will serve: with its own attention, fused layers and sampler, on the same kind of device. A greedy
token hides small differences, so the log-probability of every token is compared, in prompts longer than each window.
"""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import PromptLogprobs, TokenLogprob
from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec, build_config
from quire.replica.checkpoint.wrapped_text import TEXT, joint_sizes, text_config
from quire.replica.kv_cache.groups import sequence_blocks
from quire.replica.model.text_part import auto_class, causal_model, is_text_part, make_model
from quire.replica.proof.first_difference import find_module
from quire.replica.proof.tiny_config import NUM_POSITIONS, VOCAB_SIZE, tiny_config

logger = logging.getLogger(__name__)

_SEED = 5
# Less than a block; several windows; several chunks; a prompt that begins as the one before it.
_LENGTHS = (5, 70, 192, 150)
_NUM_SHARED = 100
_NEW_TOKENS = 20
_BLOCK_SIZE = 16
_CHUNK = 64
# Bound of the tiny model's size: a class whose sizes have names that `tiny_config` does not know exceeds it.
_MAX_PARAMETERS = 20_000_000
# Largest difference of two log-probabilities. Sums in another order make 1e-4 in float32, a wrong layer 0.01 and more.
_TOLERANCE = {"cpu": 2e-3, "cuda": 1e-2}

_SCORED = SamplingParams(
    max_tokens=_NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=1
)
_REPEATED = ("hidden_size", "vocab_size")
_OTHER_ATTENTION = "{} does not compute all its attention through transformers' attention interface"


class ScoredOutput(Protocol):
    """The part of `offline.RequestOutput` that a proof uses."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[PromptLogprobs] | None


class TinyEngine(Protocol):
    """The part of `replica.Engine` that a proof uses."""

    model: torch.nn.Module

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, n: int = 1
    ) -> Sequence[ScoredOutput]:
        """Generate `n` outputs for each prompt."""
        ...


StartEngine = Callable[..., AbstractContextManager[TinyEngine]]
"""Starts an engine that proves nothing itself, with the options of `EngineArgs` as keywords."""


def tiny_entries(spec: ModelSpec, num_positions: int = NUM_POSITIONS) -> dict[str, Any]:
    """Return config.json of the tiny model of a checkpoint's class, with a context of `num_positions` tokens."""
    config = build_config(spec.raw_config)
    inner = text_config(config)
    entries = tiny_config(inner.to_dict(), num_positions, inner.attribute_map)
    if inner is not config:
        outer = config.to_dict()
        # Some wrappers repeat sizes of the text, which must agree.
        repeated = {n for n in _REPEATED if outer.get(n) == getattr(inner, n)}
        for nested in outer.values():
            for name, size in joint_sizes(nested).items():
                if size == inner.hidden_size:
                    nested[name] = entries["hidden_size"]
        entries = {**outer, **{name: entries[name] for name in repeated}, TEXT: entries}
    return {**entries, "architectures": [spec.architecture]}


def find_difference(entries: dict[str, Any], device: str, start: StartEngine) -> str | None:
    """Return how the engine's results differ from transformers'; None: they do not.

    Parameters
    ----------
    entries
        Result of `tiny_entries`.
    device
        cpu or cuda.

    Raises
    ------
    Exception
        The model cannot be made, or the engine cannot run it. Each class fails in its own way.
    """
    with tempfile.TemporaryDirectory(prefix="quire-proof-") as name:
        folder = Path(name)
        model = save_random_model(entries, folder)
        spec = ModelSpec.from_checkpoint(folder)
        longest = max(_LENGTHS) + _NEW_TOKENS
        # Too few blocks for all prompts at a time, so that some are preempted.
        blocks = sequence_blocks(spec.groups, longest, _CHUNK, _BLOCK_SIZE) * 3 // 2
        options: dict[str, Any] = dict(
            model=str(folder),
            device=device,
            dtype="float32",
            block_size=_BLOCK_SIZE,
            num_blocks=blocks,
            max_batch_tokens=_CHUNK,
            max_model_len=longest,
            max_running_requests=4 * len(_LENGTHS),
            safety_margin=0.0,
            node_pool_gib=0,
            cuda_graphs="off",
        )
        # Classes with recurrent layers say so too, and may have attention as others.
        is_unlike = not (model._supports_attention_backend or spec.has_states)
        try:
            with start(**options) as running:
                difference = _compare(running, model, _TOLERANCE[device])
        except Exception as error:
            if is_unlike:
                raise CheckpointError(_OTHER_ATTENTION.format(spec.architecture)) from error
            raise
        if difference is None:
            return None
        where = _locate(functools.partial(start, **options, fuse="off"), model, _TOLERANCE[device])
        reason = _OTHER_ATTENTION.format(spec.architecture) if is_unlike else difference
        return f"{reason}; {where}" if where else reason


def _locate(
    start: Callable[[], AbstractContextManager[TinyEngine]],
    model: torch.nn.Module,
    tolerance: float,
) -> str:
    """Return where the engine's results become different, as text; empty: the search failed."""
    prompt = max(_prompts(), key=len)
    outputs: list[ScoredOutput] = []

    def run(engine: TinyEngine) -> list[int]:
        outputs.extend(engine.generate([prompt], _SCORED))
        # The engine does not compute the last token.
        return outputs[0].prompt_token_ids + outputs[0].token_ids[:-1]

    try:
        with start() as engine:
            found = find_module(engine.model, model, lambda: run(engine), tolerance)
    except Exception:  # each class fails in its own way, and the difference is known
        logger.info("the search for the module that differs failed", exc_info=True)
        return ""
    if found is not None:
        return found
    if _difference(outputs[0], model, tolerance) is None:
        return f"a prompt of {len(prompt)} tokens alone, without fused layers, does not differ"
    return "the decoder's results do not differ, so the output head does"


def save_random_model(entries: dict[str, Any], folder: Path) -> torch.nn.Module:
    """Save a model with random weights, and return it in eval mode with transformers' own attention.

    Norms, biases and sinks are random too: at their initial values a forgotten one would not show.

    Raises
    ------
    CheckpointError
        The model is not tiny.
    """
    config = build_config(entries)
    model = make_model(config, torch.float32, "eager")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters > _MAX_PARAMETERS:
        raise CheckpointError(
            f"a tiny model has {num_parameters} parameters: {entries['architectures'][0]} has sizes of other names "
            "than known"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        if is_text_part(model):
            model = model.to_empty(device="cpu").eval()
            model.init_weights()
            model.tie_weights()
        else:
            model = (
                auto_class(config)
                .from_config(config, dtype=torch.float32, attn_implementation="eager")
                .eval()
            )
        embedding = model.get_input_embeddings().weight
        # Buffers of several values are computed from the configuration, as the decay of linear attention is.
        computed = {name for name, buffer in model.named_buffers() if len(buffer.unique()) > 1}
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                if tensor.is_floating_point() and name not in computed:
                    _fill(name, tensor, is_embedding=tensor is embedding)
    model.save_pretrained(folder)
    return model


def _fill(name: str, tensor: torch.Tensor, is_embedding: bool) -> None:
    """Fill a stored tensor with values at which log-probabilities differ clearly, and no soft cap is saturated."""
    if is_embedding:
        tensor.normal_(0, 0.5)
    elif tensor.ndim >= 2:
        tensor.normal_(0, 1.5 / tensor.shape[-1] ** 0.5)
    elif "norm" in name and not name.endswith("bias"):
        tensor.uniform_(0.5, 1.5)
    else:
        tensor.uniform_(-0.5, 0.5)


def _prompts() -> list[list[int]]:
    random = np.random.default_rng(_SEED)
    prompts = [random.integers(3, VOCAB_SIZE, length).tolist() for length in _LENGTHS]
    prompts[-1][:_NUM_SHARED] = prompts[-2][:_NUM_SHARED]
    return prompts


def _compare(engine: TinyEngine, model: torch.nn.Module, tolerance: float) -> str | None:
    """Generate for prompts that are not cached, then for the same prompts with forks, and compare all outputs."""
    cached = replace(_SCORED, prompt_logprobs=None)
    for kind, wanted, n in (("a computed prompt", _SCORED, 1), ("a cached prompt", cached, 2)):
        for output in engine.generate(_prompts(), wanted, n=n):
            difference = _difference(output, model, tolerance)
            if difference is not None:
                return f"{difference}, after {kind}"
    return None


def _difference(output: ScoredOutput, model: torch.nn.Module, tolerance: float) -> str | None:
    """Compare the log-probabilities of one sequence, and whether each of its output tokens is the most likely one."""
    tokens = np.array(output.prompt_token_ids + output.token_ids)
    with torch.inference_mode():
        logits = causal_model(model)(torch.from_numpy(tokens)[None], use_cache=False).logits[0]
    # [tokens - 1, vocabulary]: entry i predicts token i + 1.
    expected = torch.log_softmax(logits.double(), -1).numpy()[:-1]
    right = expected[np.arange(len(expected)), tokens[1:]]
    assert output.logprobs is not None
    num_prompt = len(output.prompt_token_ids)
    # Where the engine reports no log-probability, the right one stands.
    reported = right.copy()
    for part in output.prompt_logprobs or ():
        reported[part.start - 1 : part.start - 1 + len(part.logprobs)] = part.logprobs
    reported[num_prompt - 1 :] = [entry.logprob for entry in output.logprobs]
    # A NaN differs.
    differs = ~(np.abs(reported - right) <= tolerance)
    best = expected[num_prompt - 1 :].max(-1)
    differs[num_prompt - 1 :] |= right[num_prompt - 1 :] < best - tolerance
    if not differs.any():
        return None
    at = int(differs.argmax())
    return f"the log-probability of token {at + 2} of {len(tokens)} is {reported[at]:.3f} instead of {right[at]:.3f}"
