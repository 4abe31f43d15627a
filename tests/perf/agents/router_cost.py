"""Processor time of the routers for a million prompt tokens: chats of agents, as text over HTTP, on a real cluster.

    python -m tests.perf router_cost [--turns 25]

The agents have the shape of public traces (`cluster/bench/load/agent_sessions.py`) at full scale: contexts of 12k to
80k tokens, which each turn sends again as messages; the parts of a prompt are the source files of this project. The
tokenizer is a byte-level BPE of 32,000 tokens with Qwen's pattern, trained on the same files. Replicas are paced and
compute nothing; everything else is the product: HAProxy, HTTP, template, tokenizer, hashes, decision, Serve, the bus,
detokenizer, server-sent events.

*Router* is the processor time of the routers' processes, with all threads, less what they take while nothing runs.
*Prompts* is the same for other agents whose answers have one token each: what a prompt costs until it is placed. The
rest is the price of streams: each token of a replica with few streams is a frame, and a write to a socket.
*Bare* is the tokenizer library alone, on the text of the same prompts in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import yaml
from ray.serve import Application
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from quire.cluster.app import application
from quire.cluster.bench.engines import checkpoints
from quire.cluster.bench.load.agent_sessions import AgentShape, agents
from quire.cluster.bench.results.report import RESULTS, ROOT, Bar, write
from quire.cluster.config.app_config import AppConfig
from quire.replica.serving.actor import Replica
from tests.perf.cluster.live_cluster import LiveCluster, cpu_s, live_cluster
from tests.perf.cluster.paced_replica import Pace, PacedEngine

SHAPE, VOCAB_SIZE = AgentShape(), checkpoints.VOCAB_SIZE
NUM_AGENTS, NUM_ROUTERS, NUM_REPLICAS = 4, 2, 2
MAX_MODEL_LEN, BLOCK_SIZE = 131_072, 64
NUM_BLOCKS = 2 * MAX_MODEL_LEN // BLOCK_SIZE
IDLE_S, REST_S = 10.0, 3.0
GOAL_S, GOAL_RATIO = 1.0, 1.0
# Of Qwen 2 and 3.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


class FastEngine(PacedEngine):
    """A device on which everything takes a few milliseconds."""

    pace = Pace(step_s=0.004)


class FastReplica(Replica):
    """A replica with such an engine."""

    engine_class = FastEngine


def build(args: dict[str, Any]) -> Application:
    """The application of `quire.cluster.app` with these replicas."""
    return application(AppConfig.from_args(args), FastReplica)


# -- texts ------------------------------------------------------------------------------------------------


def corpus() -> list[str]:
    """The project's own files, in a random order that is always the same."""
    names = sorted(
        p for f in ("cluster", "router", "replica", "docs") for p in ROOT.glob(f"{f}/**/*")
    )
    texts = [path.read_text() for path in names if path.suffix in (".py", ".md")]
    random.Random(0).shuffle(texts)
    return texts


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A tokenizer with the pattern and the kind of vocabulary of current models."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def make_checkpoint(folder: Path, tokenizer: Tokenizer) -> None:
    """A checkpoint with random weights, this tokenizer, and positions for the longest context."""
    checkpoints.build("tiny", folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"max_position_embeddings": MAX_MODEL_LEN}
    path.write_text(json.dumps(config))
    tokenizer.save(str(folder / "tokenizer.json"))


class Texts:
    """Cuts texts of about so many tokens out of the corpus."""

    def __init__(self, texts: list[str], tokenizer: Tokenizer):
        self._parts = itertools.cycle(texts)
        sample = "".join(texts[:20])
        self._chars_per_token = len(sample) / len(tokenizer.encode(sample).ids)

    def take(self, num_tokens: int) -> str:
        """The next text of about this length."""
        text = ""
        while len(text) < num_tokens * self._chars_per_token:
            text += next(self._parts)
        return text[: int(num_tokens * self._chars_per_token)]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn adds to its session, and how many tokens it asks for."""

    begins_session: bool
    messages: list[dict[str, str]]
    output_tokens: int


def turns_of(agent: int, texts: Texts, num_turns: int) -> list[Turn]:
    """The turns of one agent, with the lengths of the agents' trace.

    A session's first turn has a system prompt that some agents share, and all of the context before it.
    """
    shared = texts.take(SHAPE.shared_tokens)
    turns: list[Turn] = []
    duration_s = 3 * num_turns * SHAPE.pause_mean_s
    for asked in agents(1, duration_s, SHAPE, VOCAB_SIZE, seed=agent)[0][:num_turns]:
        num_tokens = len(asked.prompt_ids)
        new: list[dict[str, str]] = []
        if asked.turn == 0:
            new.append({"role": "system", "content": shared})
            num_tokens -= SHAPE.shared_tokens
        new.append({"role": "user", "content": texts.take(num_tokens)})
        turns.append(Turn(asked.turn == 0, new, asked.output_tokens))
    return turns


def rendered(messages: list[dict[str, str]]) -> str:
    """The text that the checkpoint's chat template makes of messages."""
    parts = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join(parts) + "<|im_start|>assistant\n"


# -- the load ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sent:
    """What the agents have sent: the texts of all prompts, and the sums of the answers' usage."""

    prompts: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


async def run_agent(url: str, turns: list[Turn], sent: Sent) -> None:
    """Send the turns one after the other. Each answer becomes a part of the next prompt."""
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages = turn.messages if turn.begins_session else [*messages, *turn.messages]
        answer = await ask(url, messages, turn.output_tokens, sent)
        sent.prompts.append(rendered(messages))
        messages = [*messages, {"role": "assistant", "content": answer}]


async def ask(url: str, messages: list[dict[str, str]], max_tokens: int, sent: Sent) -> str:
    """Stream one chat completion over a new connection; return its text."""
    body = {
        "messages": messages,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = ""
    async with httpx.AsyncClient(timeout=600) as client:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError((await response.aread()).decode()[:500])
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                if usage := event.get("usage"):
                    sent.prompt_tokens += usage["prompt_tokens"]
                    sent.output_tokens += usage["completion_tokens"]
                    details = usage.get("prompt_tokens_details") or {}
                    sent.cached_tokens += details.get("cached_tokens", 0)
    return text


def bare_s(tokenizer: Tokenizer, prompts: list[str]) -> tuple[float, int]:
    """Processor seconds of the tokenizer library for these texts, and the number of their tokens."""
    began_s, num_tokens = time.process_time(), 0
    for prompt in prompts:
        num_tokens += len(tokenizer.encode(prompt, add_special_tokens=False).ids)
    return time.process_time() - began_s, num_tokens


def serve_config(model: Path) -> dict[str, Any]:
    """The repository's cluster.yaml with these replicas."""
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    (app,) = config["applications"]
    app["import_path"] = "tests.perf.agents.router_cost:build"
    app["args"] = {
        "model": str(model),
        "device": "cpu",
        "replicas": NUM_REPLICAS,
        "routers": NUM_ROUTERS,
        "engine": {
            "num_blocks": NUM_BLOCKS,
            "block_size": BLOCK_SIZE,
            "max_model_len": MAX_MODEL_LEN,
            "num_threads": 1,
        },
    }
    return config


@dataclass(slots=True)
class Cost:
    """The measurement: processor seconds of the routers, without their idle share, and what was sent for them."""

    router_s: float
    idle_share: float
    sent: Sent


def measure(cluster: LiveCluster, turns: list[list[Turn]]) -> Cost:
    """Run all agents at once, and read the routers' processor time before and after."""
    pids = list(cluster.replicas("quire", "Router").values())
    url, sent = f"http://127.0.0.1:{cluster.http_port}", Sent()
    time.sleep(REST_S)
    before_s = cpu_s(pids)
    time.sleep(IDLE_S)
    idle_share = (cpu_s(pids) - before_s) / IDLE_S
    before_s, began_s = cpu_s(pids), time.monotonic()

    async def run_all() -> None:
        await asyncio.gather(*(run_agent(url, of_agent, sent) for of_agent in turns))

    asyncio.run(run_all())
    time.sleep(REST_S)
    took_s = time.monotonic() - began_s
    return Cost(cpu_s(pids) - before_s - idle_share * took_s, idle_share, sent)


def bars_of(cost: Cost, of_prompts: Cost, bare: float, bare_tokens: int) -> list[Bar]:
    """Processor seconds per million prompt tokens, and the ratio to the bare tokenizer.

    Parameters
    ----------
    of_prompts
        The cost with answers of one token.
    bare, bare_tokens
        Processor seconds of the bare tokenizer for the prompts of `cost`, and the number of their tokens.
    """
    sent = cost.sent
    million = sent.prompt_tokens / 1e6
    prompts_s = of_prompts.router_s / (of_prompts.sent.prompt_tokens / 1e6)
    streams_us = 1e6 * (cost.router_s - prompts_s * million) / sent.output_tokens
    details = {
        "requests": len(sent.prompts),
        "million_prompt_tokens": round(million, 3),
        "output_tokens": sent.output_tokens,
        "hit_percent": round(100 * sent.cached_tokens / sent.prompt_tokens, 2),
        "characters_per_token": round(sum(map(len, sent.prompts)) / bare_tokens, 2),
        "router_ms_per_request": round(1e3 * cost.router_s / len(sent.prompts), 2),
        "router_us_per_output_token": round(streams_us, 1),
        "idle_share_of_a_core": round(cost.idle_share, 4),
    }
    bare_per_million = bare / (bare_tokens / 1e6)
    ratio = cost.router_s / million / bare_per_million
    return [
        Bar(
            "router/core_s_per_million_tokens",
            cost.router_s / million,
            "s",
            GOAL_S,
            details=details,
        ),
        Bar(
            "router/core_s_per_million_tokens_of_prompts",
            prompts_s,
            "s",
            GOAL_S,
            details={
                "requests": len(of_prompts.sent.prompts),
                "million_prompt_tokens": round(of_prompts.sent.prompt_tokens / 1e6, 3),
                "hit_percent": round(
                    100 * of_prompts.sent.cached_tokens / of_prompts.sent.prompt_tokens, 2
                ),
            },
        ),
        Bar(
            "router/cost_of_bare_tokenizer",
            ratio,
            "x",
            GOAL_RATIO,
            details={"bare_core_s_per_million_tokens": round(bare_per_million, 3)},
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.perf router_cost",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--turns", type=int, default=25, help="of each of the four agents")
    parser.add_argument("--out", type=Path, default=RESULTS / "router_cost.json")
    options = parser.parse_args()
    files = corpus()
    tokenizer = train_tokenizer(files)
    texts = Texts(files, tokenizer)
    turns = [turns_of(agent, texts, options.turns) for agent in range(2 * NUM_AGENTS)]
    short = [[replace(turn, output_tokens=1) for turn in agent] for agent in turns[NUM_AGENTS:]]
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), tokenizer)
        with live_cluster(serve_config(Path(folder))) as cluster:
            url = f"http://127.0.0.1:{cluster.http_port}"
            asyncio.run(ask(url, [{"role": "user", "content": "warm up"}], 8, Sent()))
            cost = measure(cluster, turns[:NUM_AGENTS])
            of_prompts = measure(cluster, short)
    bars = bars_of(cost, of_prompts, *bare_s(tokenizer, cost.sent.prompts))
    write(options.out, f"python -m tests.perf router_cost --turns {options.turns}", bars)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
