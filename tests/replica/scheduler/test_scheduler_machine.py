"""Random lives of a scheduler, checked against a model of the KV cache.

The stand-in for the device keeps, for every slot, the chain of all tokens up to there, computed from what the
row's block tables really hold; the next token is a pure function of the chain that a row reads. So a wrong
block, a stale block or a block written twice changes a token, and every output is compared with the output
of the request alone. Copies between the tiers are made when a step is launched, its tokens are computed when it is
committed, as late as a device may: with two steps in flight the copies of the second come before the first.

In each layer group a row reads the keys that its queries see and no other: the blocks that
nobody owns and nobody could match are spoiled before each step.
"""

import dataclasses
import itertools
import tempfile
from collections import Counter
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from oracle_drafts import OracleDrafts

from quire.protos.errors import DeadlineExceeded, EngineError
from quire.protos.routing_hash import tier_digest
from quire.protos.sampling_params import POOLINGS, SamplingParams
from quire.replica.config import DemotionOrder, EngineConfig, SchedulerName
from quire.replica.core.request import Request
from quire.replica.core.step_plan import BlockTables, CopiesDone, StepPlan, StepResult
from quire.replica.kv_cache import prefix_entries
from quire.replica.kv_cache.cache_events import Tier
from quire.replica.kv_cache.groups import LayerGroup, sequence_blocks
from quire.replica.node_pool.node_pool import open_node_pool
from quire.replica.node_pool.pool_layout import PoolLayout, State
from quire.replica.scheduler.scheduler import Scheduler

# Whoever finds a failure may look for a smaller one for 300 s: cut off before, it would be told as a timeout.
pytestmark = pytest.mark.timeout(600)

VOCAB = 11
EOS = 3
START = 17  # the chain before the first token


def link(chain, token):
    return hash((chain, token))


def hidden(chain):
    """The hidden state, of one value, after a token."""
    return float(chain % 2**20)


def choose(chain, seed, position, banned):
    token = hash((chain, seed, position)) % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def alone(prompt, params, num_emitted):
    """The whole output of a request from here on, computed without any cache, and how it ends."""
    chain, position = START, len(prompt)
    for token in prompt:
        chain = link(chain, token)
    if params.pooling:
        return [], "stop"
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    output = []
    while True:
        index = num_emitted + len(output)
        banned = stops if index < params.min_tokens else set()
        token = choose(chain, params.seed, position, banned)
        output.append(token)
        chain, position = link(chain, token), position + 1
        if token in stops and index >= params.min_tokens:
            return output, "stop"
        if index + 1 == params.max_tokens:
            return output, "length"


def embedding_alone(prompt, params):
    """The embedding of a request, computed without any cache; None if it generates."""
    states = [hidden(chain) for chain in itertools.accumulate(prompt, link, initial=START)][1:]
    found = {"last": states[-1:], "mean": states, "": []}[params.pooling]
    return [np.float32(sum(found) / len(found))] if found else None


class ModelDevice:
    """Slots of chains in two tiers, the last token of each row and a table that only differences come to; runs a
    plan as the contract says: all KV is written before any is read."""

    def __init__(
        self, num_blocks, num_host_blocks, block_size, groups, max_rows, max_row_blocks, num_states
    ):
        self.block_size = block_size
        # [rows, the trash slot, snapshots of the device and of the host] the chain that a recurrent state stands for
        self.states = np.full(num_states, None, dtype=object)
        self.groups = groups
        # The group whose queries see the token before theirs: it tells what a row continues.
        self.leader = next(
            g for g, group in enumerate(groups) if group.chunk is None and (group.window or 2) >= 2
        )
        self.before = np.zeros(num_blocks * block_size, dtype=object)
        self.after = np.zeros(num_blocks * block_size, dtype=object)
        self.last_token = np.full(max_rows, -1)
        self.tables = np.full((len(groups), max_rows + 1, max_row_blocks), -1, np.int32)
        self.seeds = np.zeros(max_rows, np.uint64)
        # [host blocks, 2, block_size]: `before` and `after` of the blocks copied there
        self.host = np.full((num_host_blocks, 2, block_size), None, dtype=object)
        # (step, restores) that no step has needed so far, the oldest first
        self.late = []
        self.unsaved = []  # (step, host blocks) of saves that may not have ended, the oldest first
        self.newest_step = 0

    def slots_of(self, block):
        return slice(block * self.block_size, (block + 1) * self.block_size)

    def transfer(self, plan):
        saves, restores = plan.saves.tolist(), plan.restores.tolist()
        targets = [[pair[1] for pair in pairs] for pairs in (saves, restores)]
        assert all(len(set(of_kind)) == len(of_kind) for of_kind in targets)
        self.newest_step = plan.step
        # A block's save must not find what was to be restored there earlier: the copies have one order.
        if plan.uses_restores or {block for block, _ in saves} & self.late_blocks():
            self.restore_late()
        for block, host_block in saves:
            slots = self.slots_of(block)
            self.host[host_block] = self.before[slots], self.after[slots]
        if saves:
            self.unsaved.append((plan.step, targets[0]))
        for _, block in restores:
            slots = self.slots_of(block)
            self.before[slots] = self.after[slots] = None
        if restores:  # what the host's blocks hold now, whatever this engine saves there meanwhile
            self.late.append(
                (plan.step, [(block, copy, self.host[copy].copy()) for copy, block in restores])
            )
        if plan.uses_restores:
            self.restore_late()

    def late_blocks(self):
        return {block for _, restores in self.late for block, *_ in restores}

    def copied_host_blocks(self):
        """The host blocks that copies in flight read or write."""
        read = {copy for _, restores in self.late for _, copy, _ in restores}
        return read.union(*(blocks for _, blocks in self.unsaved))

    def copies_done(self, step):
        """Let copies end up to three steps after their own."""
        saved = []
        if self.late and self.late[0][0] + step % 4 <= step:
            self.restore_late(1)
        while self.unsaved and self.unsaved[0][0] + step % 3 <= step:
            saved += self.unsaved.pop(0)[1]
        are_all = not self.late and not self.unsaved
        return CopiesDone((), self.restored_step, tuple(saved), are_all)

    def restore_late(self, count=None):
        """The oldest steps' restores arrive; all of them by default."""
        for _, restores in self.late[:count]:
            for block, _, (before, after) in restores:
                slots = self.slots_of(block)
                self.before[slots], self.after[slots] = before, after
        self.late = self.late[len(self.late) if count is None else count :]

    @property
    def has_states(self):
        return len(self.states) > 0

    @property
    def restored_step(self):
        return self.late[0][0] - 1 if self.late else self.newest_step

    def run(self, plan: StepPlan) -> StepResult:
        token_ids = plan.token_ids.copy()
        is_last = token_ids < 0
        token_ids[is_last] = self.last_token[-1 - token_ids[is_last]]
        num_written = plan.num_tokens * len(self.groups)
        assert len(set(plan.slots.ravel().tolist())) == num_written, "a slot is written twice"
        size = self.block_size
        targets = {target for _, target in plan.copies}
        assert len(targets) == len(plan.copies), "a block is copied over twice"
        assert not targets & {source for source, _ in plan.copies}, "a copy reads a copied block"
        for source, target in plan.copies:
            for chains in (self.before, self.after):
                chains[target * size : (target + 1) * size] = chains[
                    source * size : (source + 1) * size
                ]
        tables = plan.block_tables.gather()
        assert tables.shape[:2] == (len(self.groups), plan.num_rows)
        starts = plan.kv_len - np.diff(plan.cu_q)
        self.take_changes(plan, starts, tables)
        for source, target in plan.state_copies.tolist():
            self.states[target] = self.states[source]
        saves = {(row, count): slot for row, count, slot in plan.state_saves.tolist()}
        assert len({*saves.values()}) == len(plan.state_saves), "a slot gets two snapshots"
        hidden_states = np.zeros(plan.num_tokens)
        # Rows may continue blocks that an earlier row of this very step writes.
        for row in range(plan.num_rows):
            start = int(starts[row])
            chain = START
            if start:
                block = tables[self.leader, row, (start - 1) // size]
                chain = self.after[block * size + (start - 1) % size]
                if self.has_states:
                    own = self.states[plan.rows[row]]
                    assert own == chain, "the row's state is of another history"
            for t in range(plan.cu_q[row], plan.cu_q[row + 1]):
                position = int(plan.positions[t])
                assert position == start + t - plan.cu_q[row]
                slots = plan.slots[:, t]
                expected = (
                    tables[:, row, position // size].astype(np.int64) * size + position % size
                )
                assert slots.tolist() == expected.tolist()
                self.before[slots] = chain
                chain = link(chain, int(token_ids[t]))
                self.after[slots] = chain
                hidden_states[t] = hidden(chain)
                slot = saves.pop((row, position + 1 - start), None)
                if slot is not None:
                    self.states[slot] = chain
            if self.has_states:
                self.states[plan.rows[row]] = chain
        assert not saves, "a snapshot after no token of the step"
        kv_len = plan.kv_len.tolist()
        heads = [
            self.read(tables[:, row], int(starts[row]), length) for row, length in enumerate(kv_len)
        ]
        sampling = plan.sampling
        banned = dict(sampling.suppressed)
        row_of = np.repeat(np.arange(plan.num_rows), np.diff(plan.cu_q))
        tokens = []
        refused = set()  # rows with a drafted token that was not drawn
        for i, index in enumerate(sampling.token_index.tolist()):
            row, position = int(row_of[index]), int(sampling.position[i])
            assert position == plan.positions[index] + 1
            offset = index + plan.num_sampled[row] - plan.cu_q[row + 1]
            if offset and token_ids[index] != tokens[-1]:
                refused.add(row)
            head = heads[row]
            if position < kv_len[row]:
                head = self.read(tables[:, row], int(starts[row]), position)
            seed = int(sampling.columns["seed"][i])
            tokens.append(choose(head, seed, position, banned.get(i, ())))
            if row not in refused:
                self.last_token[sampling.rows[i]] = tokens[-1]
        return StepResult(
            np.array(tokens, np.int64),
            0.001 * plan.num_tokens,
            pooled=tuple(
                hidden_states[targets.begin : targets.end].sum(keepdims=True)
                for targets in plan.pooling
            ),
        )

    def take_changes(self, plan, starts, tables):
        """What the differences have made of the table is what the plan's rows see."""
        places, blocks = plan.changes.flat(self.tables[0].size)
        assert len(set(places.tolist())) == len(places), "a place is written twice"
        self.tables.reshape(-1)[places] = blocks
        self.seeds[plan.changes.claimed] = plan.changes.sampling["seed"]
        for i, row in enumerate(plan.rows.tolist()):
            end = -(-int(plan.kv_len[i]) // self.block_size)
            for g, group in enumerate(self.groups):
                first = int(group.first_key(int(starts[i]))) // self.block_size
                told = self.tables[g, row, first:end].tolist()
                assert told == tables[g, i, first:end].tolist()
        assert self.seeds[plan.sampling.rows].tolist() == plan.sampling.columns["seed"].tolist()

    def read(self, tables, start, length):
        """What a row's new queries see in all groups: the ends of one and the same unbroken chain."""
        heads = set()
        for table, group in zip(tables, self.groups, strict=True):
            first = int(group.first_key(start))
            positions = np.arange(first, length)
            slots = table[positions // self.block_size] * self.block_size
            slots += (positions % self.block_size).astype(slots.dtype)
            chain = self.before[slots[0]] if first else START
            for slot in slots.tolist():
                assert self.before[slot] == chain, "the row reads KV of another history"
                chain = self.after[slot]
            heads.add(chain)
        (head,) = heads
        return head


class Client:
    """What a request's owner knows: its tokens by index, and how it ended."""

    def __init__(self, request, expected, reason):
        self.request, self.expected, self.reason = request, expected, reason
        self.output = []
        self.ended = None

    def take(self, delta):
        assert self.ended is None, "a delta after the end"
        assert delta.index == self.request.num_emitted + len(self.output), "indices have a gap"
        self.output += delta.token_ids
        assert self.output == self.expected[: len(self.output)]
        self.ended = delta.finish_reason
        embedding = None
        if self.ended in ("stop", "length"):
            assert (self.output, self.ended) == (self.expected, self.reason)
            request = self.request
            prompt = request.token_ids[: request.num_prompt_tokens].tolist()
            embedding = embedding_alone(prompt, request.params)
        assert (
            None if delta.facts.embedding is None else delta.facts.embedding.tolist()
        ) == embedding
        if self.ended is not None:
            assert delta.facts.num_output_tokens == self.request.num_emitted + len(self.output)
            cached, on_host = delta.facts.num_cached_tokens, delta.facts.num_host_cached_tokens
            assert on_host <= cached <= delta.facts.num_prompt_tokens
            assert delta.facts.num_peer_cached_tokens is None, "it was not pulled"


FULL = LayerGroup()
# Windows shorter than a block, of whole blocks and across them; chunks that divide a block and that do not.
MIXES = {
    "full": [(FULL,)],
    "sliding": [
        (LayerGroup(window=2),),
        (LayerGroup(window=9),),
        (LayerGroup(window=24), LayerGroup(window=24)),
    ],
    "mixed": [
        (FULL, LayerGroup(window=1)),
        (FULL, LayerGroup(window=17), LayerGroup(window=17)),
        (FULL, LayerGroup(window=40), LayerGroup(chunk=16)),
        (FULL, FULL, LayerGroup(window=8), LayerGroup(chunk=20)),
        (LayerGroup(window=30), LayerGroup(chunk=12, window=5)),
    ],
}


POLICIES = st.fixed_dictionaries(
    {
        "scheduler": st.sampled_from(get_args(SchedulerName)),
        "max_prefill_ms": st.sampled_from([None, 1.0, 20.0, 45.0]),  # a token takes 1 ms
        "resume_margin": st.sampled_from([0.0, 0.3, 0.7, 1.0]),
        "demotion_order": st.sampled_from(get_args(DemotionOrder)),
    }
)


# Of a request's later tokens, some of them wrong.
DRAFTS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 99),
        "max_draft_tokens": st.integers(1, 20),
        "wrong": st.sampled_from([0.0, 0.05, 0.3]),
        "silent": st.sampled_from([0.0, 0.3]),
        # The share of rows with a draft in flight for which the next plan waits; above 1 it never does.
        "share": st.sampled_from([0.1, 2.0, 2.0]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    block_size = 8
    mix = "full"
    max_in_flight = 1
    has_states = False

    @initialize(
        num_blocks=st.integers(3, 20),
        max_batch_tokens=st.integers(6, 80),
        max_running=st.integers(1, 6),
        margin=st.sampled_from([0.0, 0.2, 0.5]),
        caching=st.sampled_from([True, True, True, False]),
        num_host_blocks=st.one_of(st.just(0), st.integers(1, 20)),
        pick=st.integers(0, 30),
        policy=POLICIES,
        copy_s=st.sampled_from([None, 1e-6, 10.0]),
        max_share=st.sampled_from([0.0, 0.4, 1.0]),
        num_snapshots=st.integers(0, 7),
        num_host_snapshots=st.integers(0, 3),
        spacing=st.integers(1, 4),
        drafts=st.one_of(st.none(), DRAFTS),
        device=st.sampled_from(["cpu", "cuda"]),
    )
    def start(
        self,
        num_blocks,
        max_batch_tokens,
        max_running,
        margin,
        caching,
        num_host_blocks,
        pick,
        policy,
        copy_s,
        max_share,
        num_snapshots,
        num_host_snapshots,
        spacing,
        drafts,
        device,
    ):
        if self.has_states:
            caching = caching and num_snapshots > 0
        else:
            num_snapshots = num_host_snapshots = 0
        self.copy_s = copy_s  # that a block takes, as far as the scheduler knows
        groups = MIXES[self.mix][pick % len(MIXES[self.mix])]
        # Room for one row of a few blocks at least.
        num_blocks += sequence_blocks(groups, 3 * self.block_size, 1, self.block_size) - 3
        self.config = EngineConfig(
            model_name="m",
            revision="r",
            device=device,
            dtype="float32",
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            max_model_len=14 * self.block_size,
            block_size=self.block_size,
            num_blocks=num_blocks,
            max_batch_tokens=max_batch_tokens,
            max_running_requests=max_running,
            max_waiting_requests=8,
            safety_margin=margin,
            # Without snapshots of its states a recurrent model caches no prefix.
            prefix_caching=caching,
            deterministic=True,
            num_threads=1,
            groups=groups,
            num_host_blocks=num_host_blocks,
            session_max_share=max_share,
            has_states=self.has_states,
            num_snapshots=num_snapshots if caching else 0,
            num_host_snapshots=num_host_snapshots if caching else 0,
            snapshot_spacing=spacing,
            **policy,
        )
        config = self.config
        num_states = config.num_rows + 1 + config.num_snapshots + config.num_host_snapshots
        self.outputs = {}  # by key
        self.draft_share = None if drafts is None else drafts.pop("share")
        self.source = None if drafts is None else OracleDrafts(self.outputs, VOCAB, **drafts)
        self.scheduler = self.make_scheduler()
        self.device = ModelDevice(
            num_blocks,
            num_host_blocks,
            self.block_size,
            groups,
            self.config.num_rows,
            self.config.max_row_blocks,
            num_states if self.has_states else 0,
        )
        self.clients = {}
        self.paused = set()
        self.plans = []  # in flight
        self.reading = []  # (step, host blocks) of restores that may not have arrived, as the scheduler knows
        self.idle_turns = 0
        self.now_s = 0.0
        self.replayed, self.seq = (set(), set()), 0  # by tier

    def make_scheduler(self, node_pool=None):
        scheduler = Scheduler(
            self.config, max_event_batches=4, draft_source=self.source, node_pool=node_pool
        )
        if self.draft_share is not None:
            scheduler.book.drafting.LOCKSTEP_SHARE = self.draft_share
        return scheduler

    # -- what can happen ---------------------------------------------------------------------------------

    @rule(
        trunk=st.integers(0, 2),
        blocks=st.integers(0, 9),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=0, max_size=20),
        max_tokens=st.integers(1, 60),
        min_tokens=st.integers(0, 12),
        emitted=st.sampled_from([0, 0, 0, 1, 5]),
        seed=st.integers(0, 2),
        stops=st.sampled_from([(), (5,), (3, 4)]),
        ignore_eos=st.booleans(),
        tenant=st.sampled_from(["", "", "other"]),
        patience_s=st.sampled_from([None, None, None, 3.0]),
        priority=st.integers(-1, 1),
        retain_s=st.sampled_from([0.0, 0.5, 4.0]),
        pooling=st.sampled_from(["", "", "", *POOLINGS]),
    )
    def submit(
        self,
        trunk,
        blocks,
        tail,
        max_tokens,
        min_tokens,
        emitted,
        seed,
        stops,
        ignore_eos,
        tenant,
        patience_s,
        priority,
        retain_s=0.0,
        pooling="",
    ):
        shared = [(trunk + i * i) % VOCAB for i in range(blocks * self.block_size)]
        prompt = (shared + tail) or [1]
        limit = min(self.config.max_model_len, self.config.max_cache_tokens)
        if pooling:
            emitted, max_tokens, min_tokens = 0, 1, 0
        prompt = prompt[: limit if pooling else limit - 1]
        emitted = min(emitted, len(prompt) - 1, max_tokens - 1)
        if not pooling:
            max_tokens = min(max_tokens, limit - (len(prompt) - emitted))
        params = SamplingParams(
            pooling=pooling,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            seed=seed,
            stop_token_ids=stops,
            ignore_eos=ignore_eos,
        )
        key = ("router", len(self.clients))
        request = Request(
            key,
            prompt,
            params,
            num_emitted=emitted,
            tenant=tenant,
            arrival_s=self.now_s,
            deadline_s=None if patience_s is None else self.now_s + patience_s,
            priority=priority,
            retain_s=retain_s,
        )
        self.add(request)

    def add(self, request):
        expected = alone(request.token_ids.tolist(), request.params, request.num_emitted)
        client = self.clients[request.key] = Client(request, *expected)
        self.outputs[request.key] = client.expected
        full = self.scheduler.num_waiting >= self.config.max_waiting_requests
        refusal = self.scheduler.add(request)
        assert (refusal is not None) == full
        if refusal is not None:
            assert refusal.facts.error.code == "overloaded"
            client.take(refusal)

    @rule(
        pick=st.integers(0, 30),
        count=st.integers(1, 4),
        max_tokens=st.integers(1, 40),
        min_tokens=st.integers(0, 12),
        alive=st.sampled_from([True, True, True, False]),
        patience_s=st.sampled_from([None, None, None, 3.0]),
    )
    def fork(self, pick, count, max_tokens, min_tokens, alive, patience_s):
        """Children of a parent in any phase; of one that has ended, too."""
        parents = [c.request for c in self.clients.values() if (c.ended is None) == alive]
        if not parents:
            return
        parent = parents[pick % len(parents)]
        prompt = parent.token_ids[: parent.num_prompt_tokens].tolist()
        limit = min(self.config.max_model_len, self.config.max_cache_tokens)
        max_tokens = max(1, min(max_tokens, limit - len(prompt)))
        for seed in range(count):
            params = dataclasses.replace(
                parent.params,
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                seed=7 + seed,
            )
            key = ("router", len(self.clients))
            deadline_s = None if patience_s is None else self.now_s + patience_s
            self.add(
                Request(
                    key,
                    prompt,
                    params,
                    tenant=parent.tenant,
                    arrival_s=self.now_s,
                    deadline_s=deadline_s,
                    fork_of=parent.key,
                )
            )

    @rule(pick=st.integers(0, 30), tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))
    def next_turn(self, pick, tail):
        """The next turn of a conversation, which is retained again."""
        ended = [c.request for c in self.clients.values() if c.ended is not None]
        if ended:
            before = ended[pick % len(ended)]
            room = min(self.config.max_model_len, self.config.max_cache_tokens) - 1
            prompt = [*before.token_ids.tolist(), *tail][:room]
            key = ("router", len(self.clients))
            params = dataclasses.replace(before.params, max_tokens=1, min_tokens=0)
            self.add(Request(key, prompt, params, tenant=before.tenant, retain_s=2.0))

    @rule(pick=st.integers(0, 30))
    def drop_retained(self, pick):
        keys = list(self.clients)
        if keys:
            self.scheduler.drop_retained(keys[pick % len(keys)])

    @rule(
        sizes=st.lists(
            st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(20, 60)),
            min_size=2,
            max_size=4,
        ),
        count=st.integers(1, 30),
    )
    def crowd(self, sizes, count):
        """Long outputs side by side, more than most caches hold."""
        for trunk, blocks, max_tokens in sizes:
            tail = [trunk, len(self.clients) % VOCAB]
            options = dict(stops=(), ignore_eos=True, tenant="", patience_s=None, priority=0)
            self.submit(trunk, blocks, tail, max_tokens, 0, 0, trunk, **options)
        self.steps(count)

    @precondition(lambda self: len(self.plans) < self.max_in_flight)
    @rule()
    def launch(self):
        self.now_s += 0.25
        live = [c for c in self.clients.values() if c.ended is None]
        started = set(self.scheduler.book.prefilling)
        plan = self.scheduler.plan(self.now_s)
        if plan is None and self.plans:
            return
        if plan is None:
            self.deliver(self.scheduler.take_ended())
            self.end_copies()
            running = [c for c in live if not c.ended and c.request.key not in self.paused]
            assert not running, "requests live and no step for them"
            return
        assert plan.num_tokens <= self.config.max_batch_tokens
        assert plan.num_rows <= self.config.max_running_requests
        assert (np.diff(plan.cu_q)[: plan.num_decode_rows] == 1).all()
        single = slice(plan.num_decode_rows)
        assert (plan.num_sampled[single] == 1).all()
        drafted = slice(plan.num_decode_rows, self.scheduler.steps.newest.num_decodes)
        assert (plan.num_sampled[drafted] == plan.num_scheduled[drafted]).all()
        assert (plan.num_sampled[drafted.stop :] <= 1).all()
        assert len(plan.sampling.rows) <= self.config.max_samples
        newest = plan.token_ids < 0
        newest_rows = plan.rows[: drafted.stop]
        assert newest.nonzero()[0].tolist() == plan.cu_q[: drafted.stop].tolist()
        assert plan.token_ids[newest].tolist() == (-1 - newest_rows).tolist()
        assert (plan.num_sampled <= plan.num_scheduled).all()
        ends = zip(plan.cu_q[1:].tolist(), plan.num_sampled.tolist(), strict=True)
        sampled = [i for end, count in ends for i in range(end - count, end)]
        assert plan.sampling.token_index.tolist() == sampled
        rows = self.scheduler.rows
        planned = {rows.requests[row].key for row in self.scheduler.steps.newest.rows.tolist()}
        assert not planned & self.paused
        unfinished = rows.decoding & ~rows.paused & (rows.num_computed + 1 < rows.run_length)
        unfinished &= rows.num_drafted == 0
        if set(unfinished.nonzero()[0].tolist()) - set(self.scheduler.steps.newest.rows.tolist()):
            assert self.config.scheduler == "prefill_first"
            assert drafted.stop == 0, "the decoding rows go together"
            assert started >= set(self.scheduler.book.prefilling), "a new prompt kept them waiting"
        tables = BlockTables.of(plan.block_tables.gather())  # as a runner does at the launch
        self.plans.append(plan._replace(block_tables=tables))
        if len(plan.restores):
            self.reading.append((plan.step, plan.restores[:, 0].tolist()))
        self.spoil_what_nobody_may_read()
        self.device.transfer(plan)

    def spoil_what_nobody_may_read(self):
        """Blocks that a row gave back hold what another wrote by now, in the host tier too. What the step saves
        or restores is spoiled after it."""
        snapshot = self.scheduler.snapshot()
        pinned = {h for plan in self.plans for h, _ in plan.restores.tolist()}
        pinned |= {h for plan in self.plans for _, h in plan.saves.tolist()}
        for queue in ("returning", "paused"):
            pinned |= {h for entry in snapshot[queue] for h in entry.get("host_blocks", ())}
        for block in set(range(self.config.num_host_blocks)) - pinned:
            if not self.may_be_restored(block):
                self.device.host[block] = None
        held = {slot for step in self.scheduler.steps for slot, *_ in step.snapshots}
        held |= {taken.slot for step in self.scheduler.steps for taken in step.taken}
        held |= {slot for p in self.plans for pair in p.state_copies.tolist() for slot in pair}
        held |= {slot for p in self.plans for *_, slot in p.state_saves.tolist()}
        held |= {e.snapshot for e in self.scheduler.memory.prefix.entries()}
        for slot in range(self.config.num_rows, len(self.device.states)):
            if slot not in held:
                self.device.states[slot] = None
        owned = {b for row in snapshot["rows"] for b in row["blocks"]}
        owned |= set(self.scheduler.memory.deferred_frees.num_owners().nonzero()[0].tolist())
        owned |= {d for d, _ in self.plans[-1].saves.tolist()}
        written = {b for p in self.plans for b in (p.slots // self.block_size).ravel().tolist()}
        for block in range(self.config.num_blocks):
            if block not in owned | written and not self.scheduler.memory.blocks.has_content(block):
                slots = slice(block * self.block_size, (block + 1) * self.block_size)
                self.device.before[slots] = self.device.after[slots] = None

    def may_be_restored(self, host_block):
        return self.scheduler.memory.host.blocks.has_content(host_block)

    @precondition(lambda self: self.plans)
    @rule()
    def commit(self):
        plan = self.plans.pop(0)
        result, copies = self.device.run(plan), self.device.copies_done(plan.step)
        if self.copy_s is not None:
            copies = copies._replace(restores=((1, self.copy_s),))
        result = dataclasses.replace(result, copies=copies)
        self.deliver(self.scheduler.commit(plan, result, self.now_s))
        self.forget_read(copies.restored_step)

    def end_copies(self):
        """An idle engine learns of copies that have ended."""
        self.idle_turns += 1
        copies = self.device.copies_done(self.device.newest_step + self.idle_turns % 5)
        self.scheduler.note_copies(copies)
        self.forget_read(self.device.newest_step if copies.are_all else copies.restored_step)

    def forget_read(self, through):
        self.reading = [read for read in self.reading if read[0] > through]

    @rule(count=st.integers(1, 30))
    def steps(self, count):
        for _ in range(count):
            while len(self.plans) < self.max_in_flight:
                num_before = len(self.plans)
                self.launch()
                if len(self.plans) == num_before:
                    break
            if self.plans:
                self.commit()

    @precondition(lambda self: self.plans)
    @rule(spoil=st.booleans())
    def fail(self, spoil):
        failed, self.plans = self.plans, []
        result = self.device.run(failed[0])
        if spoil and len(result.token_ids):
            result.token_ids[-1] = VOCAB
            result = dataclasses.replace(result, copies=self.device.copies_done(failed[0].step))
            deltas = self.scheduler.commit(failed[0], result, self.now_s)
            self.forget_read(result.copies.restored_step)
        else:
            deltas = self.scheduler.fail_step(failed[0], EngineError("the device is gone"))
        assert self.scheduler.num_in_flight == 0
        # What the steps wrote must not be trusted: no later row may read it. Their copies may have failed too.
        steps = {plan.step for plan in failed}
        self.device.late = [late for late in self.device.late if late[0] not in steps]
        for plan in failed:
            self.device.before[plan.slots.ravel()] = None
            for _, block in plan.restores.tolist():
                self.device.before[self.device.slots_of(block)] = None
            self.device.host[plan.saves[:, 1]] = None
            if self.has_states:
                self.device.states[plan.state_saves[:, 2]] = None
                self.device.states[plan.state_copies[:, 1]] = None
        self.deliver(deltas)

    @rule(pick=st.integers(0, 30))
    def abort(self, pick):
        live = [key for key, client in self.clients.items() if client.ended is None]
        if live:
            key = live[pick % len(live)]
            # A deadline that passed in the step in flight has ended it already, its delta is on its way.
            delta = self.scheduler.abort(key)
            if delta is not None:
                assert delta.finish_reason == "abort"
                self.clients[key].take(delta)
            assert self.scheduler.abort(key) is None

    @rule(pick=st.integers(0, 30))
    def pause(self, pick):
        live = [key for key, client in self.clients.items() if client.ended is None]
        if live:
            key = live[pick % len(live)]
            self.scheduler.pause(key)
            self.scheduler.pause(key)
            self.paused.add(key)

    @precondition(lambda self: self.paused)
    @rule(pick=st.integers(0, 30))
    def resume(self, pick):
        key = sorted(self.paused)[pick % len(self.paused)]
        self.paused.discard(key)
        self.scheduler.resume(key)
        self.scheduler.resume(key)

    @rule()
    def clear_cache(self):
        self.scheduler.clear_cache()

    def deliver(self, deltas):
        for delta in deltas:
            self.clients[delta.key].take(delta)
            if isinstance(delta.facts.error, DeadlineExceeded):
                assert self.clients[delta.key].request.deadline_s <= self.now_s

    # -- what always holds -------------------------------------------------------------------------------

    @invariant()
    def books_agree(self):
        if not hasattr(self, "scheduler"):
            return
        blocks = self.scheduler.memory.blocks
        self.scheduler.check()
        assert blocks.num_free + blocks.num_cached + blocks.num_in_use == self.config.num_blocks
        snapshot = self.scheduler.snapshot()
        owned = Counter(b for row in snapshot["rows"] for b in set(row["blocks"]))
        held = self.scheduler.memory.deferred_frees.num_owners()
        owned.update({b: int(held[b]) for b in held.nonzero()[0].tolist()})
        assert self.plans or not held.any()
        assert len(owned) == blocks.num_in_use
        assert all(blocks.ref_count(block) == count for block, count in owned.items())
        host = self.scheduler.memory.host.blocks
        if self.scheduler.memory.host.pool_blocks is None:
            self.host_books_agree(host, snapshot)
            assert host.num_retained <= self.config.session_max_share * self.config.num_host_blocks
        retention = self.scheduler.memory.retention
        ends_s = retention.next_end_s()
        # The books are also looked at between a step and the next plan, which is at most one step later.
        assert ends_s is None or ends_s > self.now_s - 0.5
        assert blocks.num_retained <= self.config.session_max_share * self.config.num_blocks
        if not self.config.prefix_caching:
            assert blocks.num_cached == 0
            if self.scheduler.memory.host.pool_blocks is None:
                assert host.num_cached == 0
        self.rows_hold_what_they_see()

    def host_books_agree(self, host, snapshot):
        assert host.num_free + host.num_cached + host.num_in_use == self.config.num_host_blocks
        offloaded = Counter(
            block
            for queue in ("returning", "paused")
            for entry in snapshot[queue]
            for block in entry.get("host_blocks", ())
        )
        for _, blocks in self.reading:  # held until they have been copied
            offloaded.update(blocks)
        if not self.scheduler.memory.host._planned.restores:  # which wait for a step
            assert len(offloaded) == host.num_in_use
            assert all(host.ref_count(block) == count for block, count in offloaded.items())

    def rows_hold_what_they_see(self):
        rows = self.scheduler.rows
        for row in np.flatnonzero(rows.active).tolist():
            for g, group in enumerate(self.config.groups):
                held = int(rows.num_blocks[g, row] - rows.first_block[g, row])
                # Trimmed when a step is planned: window, the step's chunk, and one step's before it.
                tokens = 2 * self.config.max_batch_tokens
                # A row keeps the blocks of rejected tokens.
                num_drafted = 0 if self.source is None else 20
                length = int(rows.length[row]) + len(self.plans) + num_drafted
                assert held <= group.max_blocks(length, tokens, self.block_size)

    @invariant()
    def events_replay_to_what_is_held(self):
        if not hasattr(self, "scheduler"):
            return
        events = self.scheduler.events
        seq, *hashes = events.snapshot()
        assert (seq, *(set(of_tier.tolist()) for of_tier in hashes)) == (self.seq, *self.replayed)
        batch = events.flush()
        if batch is not None:
            assert batch.seq == self.seq + 1
            self.replay(batch)
            self.seq = batch.seq
            assert events.since(self.seq - 1)[-1] is batch
        assert events.seq == self.seq
        assert self.replayed == (events.held(Tier.GPU), events.held(Tier.HOST))
        digests = [0, 0]
        for tier in Tier:
            for routing_hash in self.replayed[tier]:
                digests[tier] ^= routing_hash
        assert tier_digest(*digests) == events.digest

    def replay(self, batch):
        gpu, host = self.replayed
        if batch.cleared:
            gpu.clear()
            host.clear()
        for held, removed in ((gpu, batch.removed), (host, batch.host_removed)):
            removed = set(removed.tolist())
            assert removed <= held
            held -= removed
        for held, stored in ((gpu, batch.stored), (host, batch.host_stored)):
            stored = set(stored.tolist())
            assert not stored & (gpu | host)
            held |= stored

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for key in sorted(self.paused):
            self.scheduler.resume(key)
        self.paused.clear()
        for _ in range(20_000):
            self.steps(1)
            if not self.plans and self.scheduler.num_running == self.scheduler.num_waiting == 0:
                break
        while self.plans:
            self.commit()
        while self.device.late or self.device.unsaved:
            self.end_copies()
        self.end_copies()
        assert all(client.ended is not None for client in self.clients.values())
        self.scheduler.memory.host.begin_plan()  # nothing stays pinned
        self.books_agree()
        self.events_replay_to_what_is_held()
        assert self.scheduler.memory.blocks.num_in_use == 0
        assert self.scheduler.memory.host.blocks.num_in_use == 0
        assert self.scheduler.abort_all() == []
        for later_s in (0.25, 5.0):  # the last retention begins, and all are over
            assert self.scheduler.plan(self.now_s + later_s) is None
        assert len(self.scheduler.memory.retention) == 0
        assert self.scheduler.load().blocks_retained == 0
        assert self.scheduler.load().host_blocks_retained == 0
        self.books_agree()


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize(
    ("mix", "block_size", "max_in_flight"),
    [
        ("full", 8, 1),
        ("full", 32, 1),
        ("full", 64, 1),
        ("sliding", 8, 1),
        ("mixed", 8, 1),
        ("mixed", 32, 1),
        ("full", 8, 2),
        ("full", 64, 2),
        ("mixed", 8, 2),
    ],
)
def test_any_life_keeps_the_books_and_the_tokens(mix, block_size, max_in_flight):
    attributes = {"block_size": block_size, "mix": mix, "max_in_flight": max_in_flight}
    machine = type(f"Machine{mix}{block_size}", (SchedulerMachine,), attributes)
    run_state_machine_as_test(machine, settings=SETTINGS)


@pytest.mark.parametrize(
    ("mix", "block_size", "max_in_flight"),
    [("full", 8, 1), ("full", 32, 2), ("full", 64, 1), ("sliding", 8, 2), ("mixed", 8, 2)],
)
def test_any_life_of_a_recurrent_model_keeps_the_states(mix, block_size, max_in_flight):
    attributes = dict(block_size=block_size, mix=mix, max_in_flight=max_in_flight, has_states=True)
    machine = type(f"Recurrent{mix}{block_size}", (SchedulerMachine,), attributes)
    run_state_machine_as_test(machine, settings=SETTINGS)


@pytest.mark.parametrize("mix", MIXES)
def test_colliding_names_never_change_a_token(monkeypatch, mix):
    real = prefix_entries.block_digest
    monkeypatch.setattr(prefix_entries, "block_digest", lambda *args: bytes([real(*args)[0] % 4]))
    machine = type(f"Machine{mix}", (SchedulerMachine,), {"mix": mix})
    run_state_machine_as_test(machine, settings=SETTINGS)


class SharedPoolMachine(SchedulerMachine):
    """Its host tier is in a pool that others use: they evict, drop and damage blocks. The engine may be killed; the
    next one finds what it published, whose chains are still in `ModelDevice.host`."""

    def make_scheduler(self):
        if not self.config.num_host_blocks:
            return super().make_scheduler()
        if not hasattr(self, "folder"):
            self.folder = Path(tempfile.mkdtemp())
            self.rival = self.join()
        scheduler = super().make_scheduler(self.join())
        # Copies take the same time in each run.
        memory, clock = scheduler.memory, itertools.count()
        memory.host.pool_blocks._clock = lambda: 0.0005 * next(clock)
        if memory.publishing is not None:
            memory.publishing._clock = memory.host.pool_blocks._clock
        return scheduler

    def join(self):
        layout = PoolLayout(self.config.num_host_blocks, 64)
        return open_node_pool("machine", layout, folder=self.folder)

    @property
    def pool(self):
        return self.scheduler.memory.host.pool_blocks.pool

    def may_be_restored(self, host_block):
        if not hasattr(self, "folder"):
            return super().may_be_restored(host_block)
        # Blocks that wait to be published are leased.
        return self.pool.is_complete(host_block) or self.pool.is_leased(host_block)

    @precondition(lambda self: hasattr(self, "folder"))
    @rule(kind=st.sampled_from(["evict", "drop", "damage"]), pick=st.integers(0, 30))
    def let_a_rival_act(self, kind, pick):
        slots = np.flatnonzero(self.pool._views.state == State.COMPLETE).tolist()
        slot = slots[pick % len(slots)] if slots else 0
        if kind == "evict":
            claimed = self.rival.claim(1 + slot // 2)
            in_copies = self.device.copied_host_blocks() & set(claimed or ())
            assert not in_copies, "a rival gets blocks that a copy in flight reads or writes"
            for taken in claimed or ():
                self.device.host[taken] = None
            self.rival.release(claimed or ())
        elif kind == "drop":
            self.rival.drop([slot])
        elif self.pool.is_complete(slot) and not self.pool.is_leased(slot):
            self.rival.slots[slot, 3] ^= 1
            if slot not in self.scheduler.memory.host.pool_blocks._verified:
                self.device.host[slot] = None

    @precondition(lambda self: hasattr(self, "folder"))
    @rule()
    def kill(self):
        """The process ends without a word, and its clients ask the next one."""
        self.pool._file.close(remove=False)
        prompts = [(c.request.token_ids.tolist(), c.request.tenant) for c in self.clients.values()]
        self.clients = {key: c for key, c in self.clients.items() if c.ended is not None}
        for number, key in enumerate(list(self.clients)):
            # New clients get the number after the last one.
            self.clients["router", number] = self.clients.pop(key)
        self.paused, self.plans, self.reading = set(), [], []
        self.device.late, self.device.unsaved = [], []
        self.device.before[:] = self.device.after[:] = None
        self.scheduler = self.make_scheduler()
        self.device.tables[:] = -1
        self.replayed, self.seq = (set(), set()), 0
        room = min(self.config.max_model_len, self.config.max_cache_tokens) - 1
        for prompt, tenant in prompts[-4:]:
            key = ("router", len(self.clients))
            params = SamplingParams(max_tokens=1, seed=1)
            self.add(Request(key, prompt[:room], params, tenant=tenant, arrival_s=self.now_s))
        self.steps(2)

    def teardown(self):
        try:
            super().teardown()
            if hasattr(self, "folder"):
                self.rival.check()
        finally:
            if hasattr(self, "folder"):
                self.pool.close()
                self.rival.close()
                self.folder.rmdir()


@pytest.mark.parametrize(("mix", "max_in_flight"), [("full", 1), ("full", 2), ("mixed", 1)])
def test_any_life_in_a_shared_pool_keeps_the_books_and_the_tokens(mix, max_in_flight):
    attributes = {"block_size": 8, "mix": mix, "max_in_flight": max_in_flight}
    machine = type(f"Shared{mix}", (SharedPoolMachine,), attributes)
    run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=25))
