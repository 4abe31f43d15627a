"""Speculative decoding with a trained model on the CPU: tokens per second with it, divided by those without it.

    python -m tests.perf speculation [--rounds N] [--tokens N] [--home FOLDER]

Two engines of one process run the same greedy requests in turns, one with `speculation.method` auto and one with off.
With 16 streams, each of them asks for three answers one after the other, as under load: were they one batch, the time
would be that of the slowest answer, and what drafts save for the others would not count. The answers have different
lengths, from half to one and a half times `--tokens`: of equal lengths, the engine without drafts would prefill 16
prompts in one step, and drafts would spread them over 16. Each round gives one ratio; a
bar is the median. `cpu_ratios` are those of the process's CPU time, on which other load of the machine has less effect.
The tokens of both engines must be equal. The model is SmolLM2 135M (`packaged_checkpoints.py`).

| text | what a draft can use |
|---|---|
| json | a document that is written again with one change |
| code | methods that repeat one another but for a name |
| free | a story: next to nothing |
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from quire.cluster.bench.results.report import RESULTS, ROOT, Bar, write
from quire.protos.sampling_params import SamplingParams
from quire.replica.engine import Engine
from quire.replica.offline import RequestOutput
from tests.perf.engine.packaged_checkpoints import make

METHODS = ("off", "auto")
BATCH = 16
# Answers that each of several streams asks for in a round.
ANSWERS = 3
# At least this ratio where drafts are right and one stream runs; at least the other one elsewhere.
GAIN, NO_LOSS = 1.6, 0.98
_THINGS = (
    "lamp chair table shelf clock mirror carpet basket pillow candle vase kettle stool drawer bench frame"
).split()
_PEOPLE = "sailor baker teacher doctor painter farmer pilot singer".split()
# `free_prompt` has 600 different prompts.
_FIRST_OF_ONE = 500
_PLACES = "an island|a mountain|a train|a market|an attic".split("|")
_NAMES = "width height depth color weight price label owner order level title score state speed count limit".split()


def json_prompt(number: int) -> str:
    """A list of things, and the beginning of the same list with another name for the first one."""
    things = [_THINGS[(number + i) % len(_THINGS)] for i in range(4)]
    items = [
        {
            "id": 10 * number + i,
            "name": thing,
            "price": 19.5 + 7 * i,
            "tags": ["new", "sale"],
            "stock": {"warehouse": "north", "count": 10 * i},
        }
        for i, thing in enumerate(things)
    ]
    text = json.dumps(items, indent=1)
    begun = json.dumps(items[:1], indent=1).replace(things[0], "lantern").partition('"price"')[0]
    change = f"# After: the {things[0]} is renamed to lantern, all else is the same"
    return f"# Before\n```json\n{text}\n```\n\n{change}\n```json\n{begun}"


def code_prompt(number: int) -> str:
    """A class with methods of one pattern, and the beginning of the next one."""
    names = random.Random(number).sample(_NAMES, 4)
    lines = ["class Box:", f"    def __init__(self, {', '.join(names)}):"]
    lines += [f"        self.{name} = {name}" for name in names]
    for name in names[:3]:
        lines += ["", f"    def get_{name}(self):", f"        return self.{name}"]
        lines += ["", f"    def set_{name}(self, {name}):", f"        self.{name} = {name}"]
    return "\n".join([*lines, "", f"    def get_{names[3]}(self):"]) + "\n"


def free_prompt(number: int) -> str:
    """A question whose answer repeats nothing."""
    who, thing = _PEOPLE[number // len(_THINGS) % len(_PEOPLE)], _THINGS[number % len(_THINGS)]
    place = _PLACES[number // len(_THINGS) // len(_PEOPLE) % len(_PLACES)]
    asked = f"Write a story about a {who} who finds a {thing} in {place}."
    return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"


TEXTS = {"json": json_prompt, "code": code_prompt, "free": free_prompt}


def generate(
    engine: Engine, prompts: Sequence[str], lengths: Sequence[int]
) -> tuple[float, float, list[RequestOutput]]:
    """Generate `lengths` tokens for the prompts; returns seconds, CPU seconds and the outputs."""
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths]
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    outputs = engine.generate(prompts, params, progress=False)
    return time.perf_counter() - began_s, time.process_time() - cpu_began_s, outputs


def measure(engines: dict[str, Engine], text: str, batch: int, num_tokens: int, rounds: int) -> Bar:
    """Compare the engines on texts of one kind, in turns: one after the other begins a round.

    Each round has prompts of its own: an earlier answer to the same prompt would be a perfect draft.
    """
    name = f"{text}/{batch}"
    ratios, cpu_ratios, drafted, accepted, differing = [], [], 0, 0, 0
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    num_prompts = batch if batch == 1 else ANSWERS * batch
    # The batches have no prompt in common either.
    first = _FIRST_OF_ONE if batch == 1 else 0
    lengths = [num_tokens]
    if batch > 1:  # from half the number to one and a half times
        parts = [7 * k % batch / batch for k in range(num_prompts)]
        lengths = [num_tokens // 2 + int(num_tokens * part) for part in parts]
    for i in range(rounds):
        prompts = [TEXTS[text](first + num_prompts * i + k) for k in range(num_prompts)]
        # Not counted: the prompts' prefill, whose blocks stay in the cache.
        for engine in engines.values():
            generate(engine, prompts, [1] * num_prompts)
        cpu_s: dict[str, float] = {}
        outputs: dict[str, list[RequestOutput]] = {}
        for method in METHODS[:: 1 if i % 2 == 0 else -1]:
            spent_s, cpu_s[method], outputs[method] = generate(engines[method], prompts, lengths)
            seconds[method].append(spent_s)
        cpu_ratios.append(cpu_s["off"] / cpu_s["auto"])
        ratios.append(seconds["off"][-1] / seconds["auto"][-1])
        drafted += sum(output.num_drafted for output in outputs["auto"])
        accepted += sum(output.num_accepted for output in outputs["auto"])
        differing += sum(
            a.token_ids != b.token_ids for a, b in zip(outputs["off"], outputs["auto"], strict=True)
        )
    if differing:
        raise AssertionError(f"{name}: {differing} answers differ")
    pays = batch == 1 and text != "free"
    num = sum(lengths)
    return Bar(
        f"spec/{name}",
        median(ratios),
        "x",
        GAIN if pays else NO_LOSS,
        at_most=False,
        details={
            "ratios": [round(ratio, 3) for ratio in ratios],
            "cpu_ratios": [round(ratio, 3) for ratio in cpu_ratios],
            "tokens_per_s": {m: round(num / median(s), 1) for m, s in seconds.items()},
            "drafted": drafted,
            "accepted": accepted,
            "tokens": num * rounds,
        },
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=160, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--home", type=Path, default=ROOT / ".cache" / "real")
    parser.add_argument("--out", type=Path, default=RESULTS / "speculation.json")
    options = parser.parse_args()
    folder = make("smollm2", options.home / "smollm2")
    engines = {
        method: Engine(
            model=str(folder),
            device="cpu",
            num_threads=options.threads,
            max_model_len=1024,
            max_running_requests=BATCH,
            speculation={"method": method},
        )
        for method in METHODS
    }
    bars: list[Bar] = []
    given = f"--rounds {options.rounds} --tokens {options.tokens} --threads {options.threads}"
    try:
        for text in TEXTS:
            for batch in (1, BATCH):
                bars.append(measure(engines, text, batch, options.tokens, options.rounds))
                # After each text, because a whole run takes long.
                write(
                    options.out,
                    f"python -m tests.perf speculation {given}",
                    bars,
                    model="SmolLM2-135M-Instruct",
                    dtype=engines["off"].config.dtype,
                )
    finally:
        for engine in engines.values():
            engine.close()
    return 0 if all(bar.holds for bar in bars) else 1
