"""Time to tokenise a chat's next turn, in full and with the cached tokens of the previous turn.

    python -m tests.perf router_tokenizer [--tokens 16384] [--out FILE]

A chat with turns of about 200 words and the embedded model's tokenizer. *Plain* is `TextTokenizer.encode` of the whole
prompt; *next turn* is `AsyncTokenizer.encode` of the same prompt after the previous turn's. *Stall* is the longest
pause of the event loop while threads encode long new prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from pathlib import Path

from quire.cluster.bench.results import report
from quire.replica.checkpoint.checkpoint import resolve_checkpoint
from quire.router.text.token_cache import split
from quire.router.text.tokenizer import AsyncTokenizer, TextTokenizer

WORDS = "the sea is blue and a quire of voices sings naïve songs of 日本 and 🙂 while pages turn".split()


def chats(tokenizer: TextTokenizer, num_tokens: int, seed: int) -> list[str]:
    """The prompts of a chat, turn by turn, until a prompt has `num_tokens`."""
    rng = random.Random(seed)
    text, prompts = "", []
    while not prompts or len(tokenizer.encode(prompts[-1], False)) < num_tokens:
        text += f"<|im_start|>user\n{' '.join(rng.choices(WORDS, k=200))}<|im_end|>\n"
        text += "<|im_start|>assistant\n"
        prompts.append(text)
        text += f"{' '.join(rng.choices(WORDS, k=200))}<|im_end|>\n"
    return prompts


def timed_ms(function, *args) -> float:
    began_s = time.perf_counter()
    function(*args)
    return 1e3 * (time.perf_counter() - began_s)


async def next_turns(tokenizer: TextTokenizer, prompts: list[str], rounds: int) -> list[float]:
    """Milliseconds of the last turn, each time with the previous turn cached."""
    times_ms = []
    for _ in range(rounds):
        cached = AsyncTokenizer(tokenizer)
        await cached.encode(prompts[-2], False, max_model_len=10**9)
        began_s = time.perf_counter()
        ids = await cached.encode(prompts[-1], False, max_model_len=10**9)
        times_ms.append(1e3 * (time.perf_counter() - began_s))
        assert ids.tolist() == tokenizer.encode(prompts[-1], False).tolist()
        cached.close()
    return times_ms


async def stall_ms(tokenizer: TextTokenizer, num_tokens: int, rounds: int) -> list[float]:
    """The longest pause of the event loop in each round of four concurrent new prompts."""
    worst_ms = []
    for i in range(rounds):
        new = AsyncTokenizer(tokenizer)
        prompts = [chats(tokenizer, num_tokens, 100 * i + j)[-1] for j in range(4)]
        longest_s, last_s = 0.0, time.perf_counter()
        work = asyncio.gather(*(new.encode(p, False, max_model_len=10**9) for p in prompts))
        while not work.done():
            await asyncio.sleep(0)
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        worst_ms.append(1e3 * longest_s)
        new.close()
    return worst_ms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "router_tokenizer.json")
    args = parser.parse_args()
    tokenizer = TextTokenizer.load(resolve_checkpoint("embedded", None, weights=False))
    prompts = chats(tokenizer, args.tokens, 0)
    text = prompts[-1]
    plain = report.Spread.of([timed_ms(tokenizer.encode, text, False) for _ in range(args.rounds)])
    warm = report.Spread.of(asyncio.run(next_turns(tokenizer, prompts, args.rounds)))
    stalls = report.Spread.of(asyncio.run(stall_ms(tokenizer, args.tokens, 3)))
    cut = report.Spread.of(
        [timed_ms(split, tokenizer.piece_pattern, text) for _ in range(args.rounds)]
    )
    details = {"characters": len(text), "plain_ms": report.spread_json(plain)}
    bars = [
        report.Bar(
            "router/tokenize_next_turn",
            warm.median / plain.median,
            "of plain",
            0.1,
            details={**details, "next_turn_ms": report.spread_json(warm)},
        ),
        report.Bar(
            "router/tokenize_split",
            1e6 * cut.median / len(text),
            "ns/character",
            10,
            details=report.spread_json(cut),
        ),
        report.Bar(
            "router/tokenize_stall",
            stalls.median,
            "ms",
            10,
            details={**report.spread_json(stalls), "prompts_at_once": 4},
        ),
    ]
    for bar in bars:
        print(bar.to_json())
    report.write(args.out, f"python -m tests.perf router_tokenizer --tokens {args.tokens}", bars)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
