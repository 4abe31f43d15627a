"""Long streams leave a node that is drained, and take their KV along.

Real Ray: a head and three workers on this machine. `CHAOS_SIZE=long` has 64 streams of 8,000 prompt tokens, of a model
with the embedded one's size and 16k positions; all of them decode while the node is drained. Then it has as many on one
replica, and 8 streams of a model with the shape of Qwen3-0.6B.
"""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pytest
from chaos_load import until_changed
from live import CHANGE_TIMEOUT_S, SIZE, Cluster, wait_until, write_bars
from node_cluster import Nodes, explained, running_nodes

from quire.cluster.bench.engines.checkpoints import build
from quire.cluster.bench.results.measures import percentile
from quire.cluster.bench.results.report import Bar
from quire.protos.sampling_params import SamplingParams
from quire.replica.builtin_model import CHECKPOINT
from quire.replica.engine import Engine

BLOCK_SIZE = 32
# Tokens that a client reads after the drain before it leaves.
TOKENS_AFTER = 40


@dataclass(frozen=True)
class Case:
    """Streams of one model."""

    num_streams: int
    prompt_tokens: int
    max_tokens: int  # of an answer
    token_bytes: int  # of KV
    shape: str = ""  # of a model with random weights; empty: the embedded one's
    # Part of the streams for which each replica and each node's pool has room.
    replica_share: float = 1.0
    num_replicas: int = 3
    bars: str = "kv_drain_long.json"

    @property
    def gib(self) -> float:
        """Memory of a replica, and of a node's pool, for KV."""
        tokens = self.num_streams * (self.prompt_tokens + self.max_tokens)
        return round(self.replica_share * tokens * self.token_bytes / 2**30, 2)


CASES = {
    "ci": [Case(6, 2000, 6000, 2048)],
    "long": [
        Case(64, 8000, 1500, 2048),
        Case(64, 8000, 3000, 2048, num_replicas=1, bars="kv_drain_whole.json"),
        Case(8, 600, 1000, 229_376, "halfb", 0.5, bars="kv_drain_halfb.json"),
    ],
}[SIZE]

pytestmark = [
    pytest.mark.system,
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.timeout(900 if SIZE == "ci" else 3600),
]


@dataclass
class Stream:
    """What a client has got."""

    prompt: list[int]
    answer_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)


def case_name(case: Case) -> str:
    return f"{case.shape or 'embedded'}-{case.num_replicas}"


@pytest.fixture(scope="module", params=CASES, ids=case_name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, case: Case) -> Path:
    """The model of a shape, or the embedded one with 16k positions."""
    folder = tmp_path_factory.mktemp("long") / "model"
    if case.shape:
        return build(case.shape, folder)
    shutil.copytree(CHECKPOINT, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 16_384
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, case: Case, model: Path) -> Iterator[Nodes]:
    engine = {
        "kv_cache_gib": case.gib,
        "node_pool_gib": case.gib,
        "block_size": BLOCK_SIZE,
        "num_threads": 1,
        # Otherwise a replica of the large model takes three, and a stream may wait until others have ended.
        "max_running_requests": case.num_streams,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
        folder = tmp_path_factory.mktemp("nodes")
        yield from running_nodes(folder, engine, str(model), case.num_replicas)


def follow(cluster: Cluster, stream: Stream, max_tokens: int, ends: threading.Event) -> None:
    """Read a stream until told to stop."""
    client = cluster.openai(timeout=3600)  # The last prompt is computed after all others.
    answer = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=stream.prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    with answer:
        for chunk in answer:
            stream.answer_id = chunk.id.removeprefix("cmpl-")
            if chunk.choices and (ids := getattr(chunk.choices[0], "token_ids", None)):
                stream.token_ids += ids
                stream.arrivals_s.append(time.time())  # as the router tells of its decisions
            if ends.is_set():
                return


def test_long_streams_leave_with_their_blocks(case: Case, nodes: Nodes, model: Path) -> None:
    cluster, ends = nodes.cluster, threading.Event()
    streams = [
        Stream([3 + (7 * i * i + 31 * number + i) % 1000 for i in range(case.prompt_tokens)])
        for number in range(case.num_streams)
    ]
    imported = cluster.metric("quire_peer_imported_blocks_total")
    with ThreadPoolExecutor(case.num_streams) as threads:
        readers = [threads.submit(follow, cluster, s, case.max_tokens, ends) for s in streams]
        try:

            def have_begun() -> bool:
                for reader in readers:
                    if reader.done():
                        reader.result()  # raises its error
                return all(len(stream.token_ids) >= 4 for stream in streams)

            took_s = wait_until(have_begun, 1800, "all prompts are computed")
            print(f"{case.num_streams} prompts in {took_s:.0f} s", flush=True)
            placed = nodes.placed()
            # A stream cannot leave its router.
            with_replicas = [node for node, found in placed.items() if found["Replica"]]
            node_id = min(with_replicas, key=lambda node: (placed[node]["Router"], node))
            nodes.add()
            began_s = time.monotonic()
            result = nodes.drain(node_id)
            print(result.stdout, f"{time.monotonic() - began_s:.1f} s", flush=True)
            assert result.returncode == 0, result.stdout + result.stderr
            counts = [len(s.token_ids) for s in streams]
            go_on = lambda: all(  # noqa: E731
                len(s.token_ids) >= min(n + TOKENS_AFTER, case.max_tokens)
                for s, n in zip(streams, counts, strict=True)
            )
            wait_until(go_on, CHANGE_TIMEOUT_S, "all streams go on")
            decisions = [explained(cluster, s.answer_id) for s in streams]
        finally:
            ends.set()
        for reader in readers:
            reader.result()
    until_changed(nodes.is_complete, "all replicas and routers run")
    moved = [(s, d) for s, d in zip(streams, decisions, strict=True) if len(d) > 1]
    print(Counter(d["ranking"][0]["replica"] for ds in decisions for d in ds), flush=True)
    assert moved, "no stream was on the drained node"
    pulled = cluster.metric("quire_peer_imported_blocks_total") - imported
    print(f"{pulled:.0f} blocks were pulled, {len(moved)} streams moved", flush=True)
    write_bars(case.bars, bars(case, moved, int(pulled)))
    assert pulled * BLOCK_SIZE >= case.prompt_tokens, "no stream has taken its prompt along"
    nodes.end()  # The engine that computes the expected tokens needs its memory.
    options = dict(device="cpu", dtype="float32", deterministic=True, num_threads=2)
    with Engine(model=str(model), **options) as engine:
        for stream, _ in moved:
            params = SamplingParams(
                max_tokens=len(stream.token_ids), temperature=0, ignore_eos=True
            )
            (output,) = engine.generate([stream.prompt], params, progress=False)
            assert output.token_ids == stream.token_ids


def bars(case: Case, moved: list[tuple[Stream, list[dict]]], pulled: int) -> list[Bar]:
    """What moving has cost.

    Parameters
    ----------
    pulled
        Blocks that replicas have got from other nodes. No two streams share one.
    """
    stalls_s, decided_s, resumed_s, steps_s, recomputed = [], [], [], [], []
    for stream, decisions in moved:
        decided_s.append(decisions[-1]["decided"])
        # Tokens of the replica that it left may still arrive.
        late = (pair for pair in itertools.pairwise(stream.arrivals_s) if pair[1] > decided_s[-1])
        before_s, after_s = max(itertools.islice(late, 4), key=lambda pair: pair[1] - pair[0])
        step_s = median(b - a for a, b in itertools.pairwise(stream.arrivals_s))
        steps_s.append(step_s)
        resumed_s.append(after_s)
        stalls_s.append(after_s - before_s - 2 * step_s)
        recomputed.append(case.prompt_tokens - decisions[-1]["outcome"]["cached_tokens"])
    num_tokens = sum(decisions[-1]["prompt_tokens"] for _, decisions in moved)
    total_bytes = case.token_bytes * num_tokens
    # What the transport copies alone (`kv/transport_64_KiB`, `kv/transport_8_MiB`).
    bytes_per_s = 0.616e9 if case.shape else 0.386e9
    whole = "_whole" if case.num_replicas == 1 else ""
    prefix = f"kv/drain_{case.shape}" if case.shape else f"kv/drain{whole}"
    details = {
        "streams": len(moved),
        "prompt_tokens": case.prompt_tokens,
        "step_ms": round(1e3 * median(steps_s), 1),
        "megabytes": round(total_bytes / 1e6),
    }
    return [
        Bar(
            f"{prefix}/recomputed_prompt_tokens",
            max(recomputed),
            "tokens of a stream, at most",
            BLOCK_SIZE,
            details=details | {"pulled_blocks": pulled},
        ),
        Bar(
            f"{prefix}/stall_beyond_2_steps_p99",
            percentile(stalls_s, 99),
            "s",
            0.05,
            details=details | {"median": round(median(stalls_s), 3)},
        ),
        Bar(
            f"{prefix}/switches",
            max(resumed_s) - min(decided_s),
            "s from the first stream that leaves to the last one that goes on",
            1.3 * total_bytes / bytes_per_s,
            details=details,
        ),
    ]
