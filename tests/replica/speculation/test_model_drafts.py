"""The source of a draft model reads and writes the right blocks, in any order of drafts, moves and ends of requests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from small_config import small_config

from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepPlan
from quire.replica.speculation.model_drafts import ModelSource
from quire.replica.speculation_options import SpeculationOptions

SIZE = 8  # tokens of a block
MAX_DRAFT = 4


def likeliest(tokens: list[int]) -> int:
    """The model: the next token follows from all tokens before it."""
    return hash(tuple(tokens)) % 997


class SameLength:
    """The same length for each draft."""

    def __init__(self, length: int):
        self.length = length

    def choose(self, num_rows: int) -> tuple[int, int]:
        return self.length, num_rows

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        pass

    def observe_step(self, num_rows: int, num_drafted: int, duration_s: float) -> None:
        pass

    def observe_draft(self, step_s: float) -> None:
        assert step_s >= 0


class Memory:
    """A draft runner that knows the token in each slot of its pool, and has its own copy of the block tables."""

    def __init__(self, config):
        self.config = config
        self.held = np.full(config.num_blocks * SIZE, -1)
        self.tables = np.full((config.num_rows + 1, config.max_row_blocks), -1)
        self.last = np.zeros(config.num_rows + 1, np.int64)
        self.num_tokens = 0
        self.requests: dict[int, Request] = {}  # by row

    def launch(self, plan: StepPlan) -> np.ndarray:
        assert plan.num_tokens <= self.config.max_batch_tokens
        self.num_tokens += plan.num_tokens
        for _, at, blocks in plan.changes.blocks:
            self.tables.reshape(-1)[at] = blocks
        ids = plan.token_ids.astype(np.int64)
        ids[ids < 0] = self.last[-1 - ids[ids < 0]]
        self.held[plan.slots[0]] = ids
        given = plan.block_tables.gather()[0]
        for i, row in enumerate(plan.rows.tolist()):
            position = np.arange(plan.kv_len[i])
            table = self.tables[row]
            assert (table[position // SIZE] == given[i, position // SIZE]).all()
            read = self.held[table[position // SIZE] * SIZE + position % SIZE].tolist()
            known = self.requests[row].token_ids[: len(read)].tolist()
            assert read[: len(known)] == known, "the row reads other tokens than its own"
            self.last[row] = likeliest(read)
        return self.last[plan.rows].copy()

    def collect(self, tokens: np.ndarray) -> SimpleNamespace:
        return SimpleNamespace(token_ids=tokens)


@dataclass
class Engine:
    """Requests with rows and blocks, as a scheduler would give them."""

    seed: int
    requests: dict[int, Request] = field(default_factory=dict)  # by row
    blocks: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        speculation = SpeculationOptions(
            method="draft_model", draft_model="x", max_draft_tokens=MAX_DRAFT
        )
        self.config = small_config(
            num_blocks=400, max_running_requests=6, max_batch_tokens=40, speculation=speculation
        )
        self.random = random.Random(self.seed)
        self.free = list(range(self.config.num_blocks))
        self.memory = Memory(self.config)
        self.memory.requests = self.requests
        self.source = ModelSource(self.config, self.memory, SameLength(MAX_DRAFT))
        self.source.attach(self.reserve)
        self.num_started = 0

    def take(self) -> int:
        # The newest ones first, so that blocks soon belong to another request.
        return self.free.pop()

    def start(self, tokens: list[int], tenant: str = "", blocks: list[int] | None = None) -> int:
        """Start a request on a free row, with these leading blocks; returns the row."""
        row = next(r for r in range(self.config.num_rows) if r not in self.requests)
        self.num_started += 1
        params = SamplingParams(max_tokens=300, ignore_eos=True)
        request = Request(self.num_started, tokens, params, tenant=tenant)
        request.accept(())
        request.row = row
        self.requests[row], self.blocks[row] = request, list(blocks or ())
        self.reserve(request, 0)
        return row

    def end(self, row: int, keeps: int = 0) -> list[int]:
        """End a request and free its blocks but the first ones, which are returned."""
        self.source.end(self.requests.pop(row))
        blocks = self.blocks.pop(row)
        self.free += blocks[keeps:]
        return blocks[:keeps]

    def reserve(self, request: Request, count: int) -> np.ndarray:
        own = self.blocks[request.row]
        while len(own) * SIZE < request.num_tokens + count:
            own.append(self.take())
        return np.array(own, np.int32)

    def grow(self, row: int, draft: np.ndarray) -> int:
        """Give a request new tokens: the right ones of its draft and one more; returns the number of right ones."""
        request, num_right = self.requests[row], 0
        for token in draft.tolist():
            if self.random.random() < 0.3:
                break
            request.append(np.int32(token).tobytes())
            num_right += 1
        for _ in range(self.random.choice([1, 1, 1, 2, 3])):
            request.append(np.int32(self.random.randrange(997)).tobytes())
        self.reserve(request, 0)
        return num_right

    def propose(self, rows: list[int], room: int = 100) -> dict[int, np.ndarray]:
        drafts = self.source.propose([self.requests[row] for row in rows], room)
        assert sum(map(len, drafts)) <= room and not self.source._has_failed
        for row, draft in zip(rows, drafts, strict=True):
            tokens = self.requests[row].token_ids.tolist()
            for token in draft.tolist():
                assert token == likeliest(tokens)
                tokens.append(token)
        return dict(zip(rows, drafts, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_drafts_follow_from_the_requests_tokens(seed):
    engine = Engine(seed)
    rng = engine.random
    num_drafted = num_started = 0
    for _ in range(150):
        if len(engine.requests) < 6 and rng.random() < 0.3:
            tokens = [rng.randrange(997) for _ in range(rng.randrange(1, 70))]
            engine.start(tokens, rng.choice("ab"))
            num_started += 1
        rows = [row for row in engine.requests if rng.random() < 0.8]
        for row in rows:
            request = engine.requests[row]
            # Credit for drafts of different lengths.
            request.credit_end = (
                request.num_tokens - request.num_prompt_tokens + rng.randrange(1, 9)
            )
        for row, draft in engine.propose(rows, rng.choice([1, 3, 100])).items():
            num_drafted += len(draft)
            engine.grow(row, draft)
            choice = rng.random()
            engine.requests[row].credit_end = None
            if choice < 0.1:
                # A block with the same tokens takes the place of the row's own.
                own = engine.blocks[row]
                full = engine.requests[row].num_tokens // SIZE
                if full:
                    i = rng.randrange(full)
                    engine.free.append(own[i])
                    own[i] = engine.free.pop(0)
            elif choice < 0.15 or engine.requests[row].num_tokens > 120:
                keeps = rng.randrange(4)
                request = engine.requests[row]
                keeps = min(keeps, (request.num_tokens - 1) // SIZE)
                kept = engine.end(row, keeps)
                # The next one has the same beginning, and the same blocks for it.
                end = keeps * SIZE + rng.randrange(1, 20)
                engine.start(request.token_ids[:end].tolist(), request.tenant, kept)
    assert num_drafted > 300 and num_started > 5


def test_right_tokens_of_a_draft_are_not_computed_again():
    engine = Engine(0)
    row = engine.start(list(range(20)))
    draft = engine.propose([row])[row]
    assert engine.memory.num_tokens == 20 + MAX_DRAFT - 1
    for token in [*draft.tolist(), 5]:
        engine.requests[row].append(np.int32(token).tobytes())
    engine.propose([row])
    assert engine.memory.num_tokens == 20 + 2 * (MAX_DRAFT - 1) + 2  # the draft's last token, and 5


@pytest.mark.parametrize(("tenant", "again"), [("a", 4), ("b", 20)])
def test_blocks_of_the_same_tokens_are_used_within_a_tenant(tenant, again):
    engine = Engine(0)
    row = engine.start(list(range(20)), "a")
    engine.propose([row])
    kept = engine.end(row, keeps=2)
    computed = engine.memory.num_tokens
    engine.propose([engine.start(list(range(20)), tenant, kept)])
    assert engine.memory.num_tokens - computed == again + MAX_DRAFT - 1


def test_a_block_that_another_request_has_written_to_is_computed_again():
    engine = Engine(0)
    row = engine.start(list(range(20)))
    engine.propose([row])
    blocks = engine.end(row, keeps=3)
    row = engine.start([1, 2, 3], blocks=blocks[:1])
    engine.propose([row])
    engine.end(row, keeps=1)
    engine.propose([engine.start(list(range(20)), blocks=blocks)])


def test_a_full_step_computes_the_rows_that_lack_least_first():
    engine = Engine(0)
    long, short = engine.start(list(range(100))), engine.start([1, 2, 3])
    assert [len(draft) for draft in engine.propose([long, short]).values()] == [0, MAX_DRAFT]
    engine.grow(short, np.empty(0, np.int32))
    engine.propose([long, short])
    assert [len(draft) for draft in engine.propose([long, short]).values()] == [
        MAX_DRAFT,
        MAX_DRAFT,
    ]
