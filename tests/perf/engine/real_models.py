"""Trained checkpoints in Quire's engine against transformers: greedy tokens, and log-probabilities of real text.

    python -m tests.perf real-models [--only NAME ...] [--home FOLDER]

Random weights show whether a model is computed exactly. Trained ones show what rounding does to text: 8-bit weights and
bfloat16 may change each token's log-probability, but not the mean over a text. The checkpoints are made once, in
`--home`, from packages (`packaged_checkpoints.py`).

| engine | compared with transformers in | bar |
|---|---|---|
| float32 | float32 | greedy tokens of `generate`; the largest difference of a token's log-probability |
| bfloat16, int8 | bfloat16 | the difference of the mean log-probability of all tokens |
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.cluster.bench.results.report import RESULTS, ROOT, Bar, write
from quire.protos.sampling_params import SamplingParams
from quire.replica.engine import Engine
from tests.perf.engine.packaged_checkpoints import PACKAGES, make

NEW_TOKENS = 32
# nats: sums in another order in float32; rounding to 8 bits of mantissa, averaged over the text
FLOAT32_BOUND, MEAN_BOUND = 1e-3, 0.01
ENGINES = {"bfloat16": {}, "int8": {"weights": "int8"}}
TEXTS = (
    "The bridge over the river had been closed since spring. Engineers measured its pillars every week and wrote the "
    "numbers into a table that hung in the town hall. In August the table showed that one pillar had moved by four "
    "millimetres, which was more than in the ten years before. The mayor asked for a second opinion, and the people "
    "who crossed the bridge on their way to work learned to get up half an hour earlier. In October a company from the "
    "capital sent three men and a boat. They spent two days in the water with lamps and cameras, and on the third day "
    "they met the council behind closed doors. The newspaper wrote that the foundation of the pillar was older than "
    "the rest of the bridge, and that nobody had known about it. A new one would cost as much as the school that the "
    "town wanted to build. At the end of the year the council voted for the bridge, because without it the farmers on "
    "the other side could not bring their milk to the station. The school had to wait until the summer after. "
    "When the work began, the river was so low that children walked to the second pillar without getting their knees "
    "wet. The workers built a wall of steel around the old foundation and pumped out the water, which took eleven "
    "days. Under the mud they found oak beams, as hard as stone, and between them coins from a country that no longer "
    "existed. A professor came by train and stayed for a week. She wanted the work to stop, the company wanted to be "
    "paid for every day of waiting, and the council met three times before it found a way: the beams on the north side "
    "were drawn, measured and covered again, and only those on the south side were taken out. One of them now lies in "
    "the town hall, next to the table with the numbers. The new pillar was ready in November, a month late. On the "
    "first morning a farmer drove across with twelve cans of milk, and the baker, who had waited for this, gave him a "
    "loaf of bread. Nobody had planned it, but it has been done every year since then.",
    "A compiler reads a program and writes another one that does the same. Between the two it keeps the program as a "
    "tree, because a tree is easy to change: a branch that can never run is cut off, and an expression that occurs "
    "twice is computed once. Most of these changes are small. Together they often make a program twice as fast, and "
    "few people ever read the result. The hardest part is to decide which values stay in registers. A processor has "
    "only a few of them, and memory is slow. The compiler draws a graph: each value is a point, and two points are "
    "connected if both values are needed at the same time. Then it gives each point a colour, so that no two connected "
    "points have the same one. If there are more colours than registers, some values go to memory and are loaded again "
    "when they are used. To find the best colours is a problem that takes too long for large programs, so compilers "
    "use simple rules, which are good enough in almost every case. "
    "Loops get the most attention, because a program spends most of its time in them. If a product does not change "
    "from one round to the next, it is computed once before the loop starts. If the same operation is done to many "
    "numbers that lie next to each other in memory, the compiler can do it to eight of them at a time, as long as it "
    "can show that no round needs the result of an earlier one. Often it cannot show this, although a person would see "
    "it at once, and so the fast version is not used. Some languages help by letting the author say more: that a list "
    "is never changed, or that two lists never share memory. Other compilers wait until the program runs. They count "
    "how often each part is executed, translate only the parts that matter, and guess what kind of values will come "
    "next. When a guess is wrong, the slow version takes over, and nothing is lost but time. All of this has a price. "
    "A large program can take an hour to compile, and an error that appears only in the fast version is among the "
    "hardest to find.",
    "Bread needs flour, water, salt and time. Mix 500 grams of flour with 350 grams of water and wait for an hour. "
    "Then add 10 grams of salt and a little yeast, and fold the dough four times during the next two hours. It should "
    "rest in a cold place until the morning. Bake it in a hot oven for 40 minutes, and let it cool before you cut it. "
    "The water should be warm in winter and cold in summer, because yeast works faster when it is warm. If the dough "
    "is too wet, it sticks to your hands; do not add more flour, but make your hands wet. A pot with a lid keeps the "
    "steam inside, so the crust stays soft for the first minutes and the bread can rise. After half the time take off "
    "the lid, and the crust becomes brown. You can hear whether the bread is done: knock on its bottom, and if it "
    "sounds hollow, it is ready. Whole grain flour takes more water and gives a heavier bread, which keeps for a week. "
    "White bread is best on the same day, and the next morning it makes good toast. "
    "Many people keep a jar of sourdough instead of buying yeast. It is only flour and water in which wild yeast and "
    "bacteria live, and it has to be fed once a week: throw half of it away, and replace what is missing with fresh "
    "flour and water. On the evening before baking, take it out of the fridge and feed it again. If it has doubled by "
    "the next morning and smells like fruit, it is strong enough. Bread made in this way needs more time, from eight "
    "hours in July to fourteen in January, but it also has more taste and stays fresh for longer. Write down what you "
    "did each time, because the kitchen is never twice the same. A dense loaf with a few large holes has not risen "
    "enough; a flat one has risen for too long. If the crust is pale, the oven was not hot enough or the door was "
    "opened too early. Salt is easy to forget, so put it next to the bowl before you start. And do not worry about a "
    "loaf that failed: cut it into cubes, dry them in the oven, and use them in a soup.",
)


def measure(name: str, folder: Path) -> list[Bar]:
    """Compare one checkpoint; returns the bars `families/real/NAME/...`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts: list[list[int]] = [tokenizer(text)["input_ids"] for text in TEXTS]
    right, generated = reference(folder, "float32", texts, NEW_TOKENS)
    ours, tokens = engine_scores(folder, "float32", texts, NEW_TOKENS)
    num_tokens = sum(map(len, generated))
    differing = sum(
        a != b
        for one, other in zip(tokens, generated, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    part = f"families/real/{name}"
    largest = float(np.abs(ours - right).max())
    bars = [
        Bar(
            f"{part}/greedy", differing, "tokens", 0, details={"of": num_tokens, "dtype": "float32"}
        ),
        Bar(f"{part}/float32", largest, "nats", FLOAT32_BOUND, details={"scored": len(right)}),
    ]
    rounded, _ = reference(folder, "bfloat16", texts, 0)
    for kind, options in ENGINES.items():
        scores, _ = engine_scores(folder, "bfloat16", texts, 1, **options)
        difference = float(scores.mean() - rounded.mean())
        details = {
            "signed": round(difference, 5),
            "standard_error": round(_standard_error(scores - rounded), 5),
            "mean": round(float(scores.mean()), 4),
            "transformers_bfloat16": round(float(rounded.mean()), 4),
            "transformers_float32": round(float(right.mean()), 4),
        }
        bars.append(Bar(f"{part}/{kind}", abs(difference), "nats", MEAN_BOUND, details=details))
    return bars


def _standard_error(differences: np.ndarray) -> float:
    """Return the standard error of the mean of [tokens] numbers: how much the choice of text moves it."""
    return float(differences.std(ddof=1) / len(differences) ** 0.5)


def reference(
    folder: Path, dtype: str, texts: Sequence[list[int]], num_tokens: int
) -> tuple[np.ndarray, list[list[int]]]:
    """Return log-probabilities of the texts, [tokens] float64, and greedy tokens of each, as transformers has them.

    With `num_tokens` 0 nothing is generated.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    # Else it ends a sequence, whatever the options say.
    model.generation_config.eos_token_id = None
    scores, generated = [], []
    for text in texts:
        ids = torch.tensor([text])
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits[0].float()
        expected = torch.log_softmax(logits, -1)[:-1]
        scores.append(expected[torch.arange(len(text) - 1), ids[0, 1:]].double().numpy())
        if not num_tokens:
            continue
        options = GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, generation_config=options)
        generated.append(out[0, len(text) :].tolist())
    return np.concatenate(scores), generated


def engine_scores(
    folder: Path, dtype: str, texts: Sequence[list[int]], num_tokens: int, **options: Any
) -> tuple[np.ndarray, list[list[int]]]:
    """Return the engine's log-probabilities of the texts, [tokens] float64, and its greedy tokens, in one batch."""
    params = SamplingParams(
        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, prompt_logprobs=1
    )
    with Engine(
        model=str(folder), device="cpu", dtype=dtype, max_model_len=1024, num_blocks=512, **options
    ) as engine:
        outputs = engine.generate(texts, params)
    scores = [
        np.concatenate([part.logprobs for part in output.prompt_logprobs or ()])
        for output in outputs
    ]
    assert [len(found) for found in scores] == [len(text) - 1 for text in texts]
    return np.concatenate(scores).astype(np.float64), [output.token_ids for output in outputs]


def main(argv: list[str] | None = None) -> int:
    """Make the checkpoints, measure them and write the result; 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(PACKAGES), metavar="NAME")
    parser.add_argument("--home", type=Path, default=ROOT / ".cache" / "real", help="is kept")
    parser.add_argument("--output", type=Path, default=RESULTS / "real_models.json")
    arguments = parser.parse_args(argv)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    bars: list[Bar] = []
    for name in arguments.only or PACKAGES:
        found = measure(name, make(name, arguments.home.resolve() / name))
        for bar in found:
            print(bar.to_json(), flush=True)
        bars += found
    write(arguments.output, "make real-model", bars, transformers=transformers.__version__)
    return int(not all(bar.holds for bar in bars))


if __name__ == "__main__":
    raise SystemExit(main())
