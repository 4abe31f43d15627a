"""Requests of all kinds and sizes, which launch every kernel that an engine may need while it serves.

Waves are served one after the other. Their steps have one row and many, prompts of one token and of several chunks and,
while a wave ends, every smaller number of rows. Only the steps matter, not the answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from quire.protos.sampling_params import SamplingParams

# Lengths around a block, a tile and a multiple of 16; then several chunks.
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 100, 250)
_CROWDS = (2, 3, 5, 17)
_SOME_IDS = tuple(range(3, 43))
# Sampling options. With the first ones the device draws alone; with the others the host edits the logits.
_OPTIONS: tuple[dict[str, Any], ...] = (
    dict(temperature=0.0),
    dict(temperature=1.0),
    dict(temperature=0.8, top_p=0.9),
    dict(temperature=1.2, top_k=7, top_p=0.95),
    dict(temperature=0.7, min_p=0.05),
    dict(temperature=0.0, logprobs=0),
    dict(temperature=1.0, logprobs=5),
    dict(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2),
    dict(temperature=0.0, logit_bias=((5, 2.0), (9, -100.0))),
    dict(temperature=1.0, allowed_token_ids=(0, *_SOME_IDS)),
    dict(temperature=0.0, bad_words=((7,), (3, 4))),
    dict(temperature=1.0, min_tokens=2, stop_token_ids=(11, 12)),
    dict(temperature=0.0, prompt_logprobs=2),
)


class Asked(NamedTuple):
    """One request of a wave."""

    prompt_ids: list[int]
    params: SamplingParams


def mixed_waves(rows: int, max_model_len: int, max_id: int = 128) -> Iterator[list[Asked]]:
    """All waves of requests.

    Parameters
    ----------
    rows
        Rows of the engine; one wave has more requests.
    max_model_len
        Tokens of the longest request.
    max_id
        Prompts have ids in [3, max_id).
    """
    ids = np.random.default_rng(0)
    trunk = ids.integers(3, max_id, 40).tolist()

    def ask(i: int, length: int, max_tokens: int) -> Asked:
        # Some prompts share a prefix, so that the cache has it.
        prompt = [*(trunk if i % 3 == 0 else ()), *ids.integers(3, max_id, length).tolist()]
        prompt = prompt[: max(length, 1)]
        options = _OPTIONS[i % len(_OPTIONS)]
        return Asked(
            prompt, SamplingParams(max_tokens=max_tokens, seed=i, ignore_eos=True, **options)
        )

    lengths = [n for n in LENGTHS if n < max_model_len - 4]
    for i, length in enumerate(lengths):  # one request per wave
        yield [ask(i % 5, length, 3)]
    for i in range(len(_OPTIONS)):  # each kind alone, then with all others
        yield [ask(i, 9, 3), ask(i, 20, 2)]
    for size in _CROWDS:
        yield [ask(size + i, lengths[i % len(lengths)], 2 + i % 5) for i in range(size)]
    # More requests than rows, so short that all of them run at a time.
    yield [ask(i % 5, 1 + i % 2, 5 + i % 3) for i in range(rows + 3)]
    # Plain requests alone; their block tables grow.
    yield [ask(i, 13 + i, 21) for i in range(4)]
    yield [ask(0, max_model_len - 20, 20), ask(1, 5, 12)]
