"""Values at the bounds of sampling parameters and beyond them, for the tests of both ends of the bus.

A case is a field and its value; an error names the item of a list by its index. Token ids assume a vocabulary of
`VOCAB_SIZE` ids.
"""

from __future__ import annotations

import math
from typing import Any

from quire.protos.sampling_params import Grammar

VOCAB_SIZE = 1000
NO_INTEGERS = (1.5, 1.0, "1", math.nan, math.inf, True, [1], 1e10)
NO_NUMBERS = ("1", math.nan, math.inf, -math.inf, True, [1])

ACCEPTED: list[tuple[str, Any]] = [
    ("max_tokens", 1),
    ("min_tokens", 0),
    ("temperature", 0),
    ("temperature", 100.0),
    ("top_p", 1),
    ("top_p", 5e-324),
    ("top_k", 2**31 - 1),
    ("min_p", 0),
    ("min_p", 1.0),
    ("repetition_penalty", 1e-9),
    ("repetition_penalty", 100),
    ("presence_penalty", -2),
    ("presence_penalty", 2.0),
    ("frequency_penalty", -2.0),
    ("frequency_penalty", 2),
    ("logit_bias", ((0, -100), (VOCAB_SIZE - 1, 100.0))),
    ("logit_bias", tuple((i, 1.0) for i in range(VOCAB_SIZE))),
    ("allowed_token_ids", (0, VOCAB_SIZE - 1)),
    ("allowed_token_ids", (1,) * 4096),
    ("grammar", Grammar("regex", "é" * 32768, "grammar")),
    ("logprobs", 0),
    ("logprobs", 20),
    ("prompt_logprobs", 0),
    ("prompt_logprobs", 20),
    ("seed", 0),
    ("seed", 2**64 - 1),
    ("stop_token_ids", (0, VOCAB_SIZE - 1)),
    ("stop_token_ids", (1,) * 128),
]
REFUSED: list[tuple[str, Any]] = [
    *(("max_tokens", value) for value in [0, -1, -(2**63), *NO_INTEGERS]),
    *(("min_tokens", value) for value in [-1, *NO_INTEGERS]),
    *(("temperature", value) for value in [-1e-9, -1, 100.1, 2**63, *NO_NUMBERS]),
    *(("top_p", value) for value in [0, -1, 1.0000001, 2, *NO_NUMBERS]),
    *(("top_k", value) for value in [-2, 2**31, 2**63, *NO_INTEGERS]),
    *(("min_p", value) for value in [-1e-9, 1.0000001, *NO_NUMBERS]),
    *(("repetition_penalty", value) for value in [0, -1, 100.1, *NO_NUMBERS]),
    *(("presence_penalty", value) for value in [-2.1, 2.1, *NO_NUMBERS]),
    *(("frequency_penalty", value) for value in [-2.1, 2.1, *NO_NUMBERS]),
    *(("logit_bias", value) for value in [((1, 1.0),) * 2, ((1, 1.0),) * 1025]),
    *(("logit_bias[0]", (1, value)) for value in [-100.1, 100.1, *NO_NUMBERS]),
    *(("logit_bias[0]", (value, 1)) for value in [-1, VOCAB_SIZE, 2**31, *NO_INTEGERS[:-2]]),
    ("allowed_token_ids", (1,) * 4097),
    *(("allowed_token_ids[0]", value) for value in [-1, VOCAB_SIZE, 2**31, *NO_INTEGERS]),
    ("grammar", Grammar("odd", "", "grammar")),
    *(("grammar", Grammar("regex", text, "grammar")) for text in ["é" * 32769, None, "\ud800"]),
    *(("logprobs", value) for value in [-1, 21, *NO_INTEGERS]),
    *(("prompt_logprobs", value) for value in [-1, 21, *NO_INTEGERS]),
    *(("seed", value) for value in [-(2**63) - 1, 2**64, *NO_INTEGERS]),
    ("stop_token_ids", (1,) * 129),
    *(("stop_token_ids[0]", value) for value in [-1, VOCAB_SIZE, 2**31, None, *NO_INTEGERS]),
]
PRIORITIES_ACCEPTED = (-1000, 0, 1000)
PRIORITIES_REFUSED = (-1001, 1001, 2**31, None, *NO_INTEGERS)


def as_field(name: str, value: Any) -> dict[str, Any]:
    """The keyword argument of a case; `name[0]` stands for a list of one item."""
    field = name.partition("[")[0]
    return {field: (value,) if name != field else value}
