"""Ranks on GPUs: the real loop, scheduler and runners serve on devices that run queued work in any order.

The leader's device is random. The other ranks' run their work at once, because nothing runs a fake device while its
thread waits for a message; copies between the tiers may be late. Then Triton's kernels, interpreted, compute the parts
of two ranks.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import model_zoo
import numpy as np
import pytest
import torch
import triton
from adapter_folders import save_adapter
from fake_device import FakeDevice, FakeEvent
from interpreted_runner import logits_of
from rank_engines import (
    FEW_BLOCKS,
    SHARED,
    adapted,
    always_draft,
    engine,
    of_one_rank,
    params,
    prompts,
    told,
)
from step_driver import engine_config

from quire.protos.adapter_ref import AdapterRef
from quire.protos.sampling_params import SamplingParams
from quire.replica import engine as engine_module
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineArgs
from quire.replica.device.device import Event, Stream
from quire.replica.device.kv_pool import KVPool
from quire.replica.engine import Engine
from quire.replica.model.loader import load_model
from quire.replica.model.sharded.rank_group import RankGroup
from quire.replica.node_pool.pool_file import PoolPlace
from quire.replica.ranks import following_rank
from quire.replica.ranks.leading_ranks import gpu_of_rank, start_thread
from quire.replica.ranks.rank_links import LeaderLink, RankLinks
from quire.replica.ranks.rank_runners import FollowingRunner, LeadingRunner
from quire.replica.ranks.step_message import decode
from quire.replica.runner.runner import Runner
from quire.replica.startup import device_memory, runtime
from quire.replica.startup.rank_sizing import rank_spec
from tests.kernels.compile.interpreter import repair_interpreter

SEEDS = 3
HANG = """
f.END_S = 0.1
f._follow = lambda *_: time.sleep(600)
f.main()
"""


class Devices:
    """Opens a device for each rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._monkeypatch = monkeypatch
        self.leader = FakeDevice(0)
        self.others: list[FakeDevice] = []
        self.options: dict[str, object] = {}  # of the others
        self.kind: type[FakeDevice] = FakeDevice  # of the others

    def ranks(self, folder: Path, num_ranks: int = 2, **changes: object) -> Engine:
        """An engine whose ranks are on these devices; engines before it are on the CPU."""
        self._monkeypatch.setattr(runtime, "open_device", lambda name, use_nvtx: self.leader)
        self._monkeypatch.setattr(following_rank, "open_device", self._open_other)
        options = dict(async_batching="on", check_graphs=True, q_padding=16, max_running_requests=6)
        options |= dict(start_rank=self._start)
        return engine(folder, num_ranks, num_ranks, **{**options, **changes})

    def _start(self, folder: Path, rank: int) -> Callable[[], None]:
        end, leader = start_thread(folder, rank), self.leader

        def finish() -> None:
            leader.synchronize()  # A fake device runs nothing on its own.
            end()

        return finish

    def _open_other(self, name: str) -> FakeDevice:
        device = self.kind(0, **self.options)
        device._pace.eagerness = 1.0
        self.others.append(device)
        return device


class LateCopies(FakeDevice):
    """Copies between the tiers run when a step waits for them, or when the rank has often looked for their end."""

    LOOKS = 200

    def __init__(self, seed: int, **options: Any):
        super().__init__(seed, **options)
        self._looks, self._runs_all = 0, False

    def record(self, stream: Stream, name: str, *, timed: bool = False) -> Event:
        event = super().record(stream, name, timed=timed)
        if stream is Stream.OFFLOAD:
            event.is_done = lambda: self._look(event)
        return event

    def _look(self, event: FakeEvent) -> bool:
        self._looks += 1
        if self._looks % self.LOOKS == 0:
            self.synchronize()
        return event.has_passed

    def host_wait(self, event: FakeEvent) -> None:
        self._runs_all = event.name == "blocks saved"
        super().host_wait(event)
        self._runs_all = False

    def synchronize(self) -> None:
        self._runs_all = True
        super().synchronize()
        self._runs_all = False

    def _is_ready(self, stream: Stream) -> bool:
        if not super()._is_ready(stream):
            return False
        queued = self._queues[Stream.COMPUTE]
        is_awaited = bool(queued and queued[0].awaits) and not queued[0].awaits.has_passed
        return stream is not Stream.OFFLOAD or is_awaited or self._runs_all


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    return Devices(monkeypatch)


@pytest.mark.parametrize(
    ("name", "num_ranks", "seed"),
    [
        *(("llama", 2, seed) for seed in range(SEEDS)),
        ("gemma2", 2, 3),  # two layer groups
    ],
)
def test_ranks_on_gpus_generate_the_bits_of_one(zoo, devices, name, num_ranks, seed):
    """Chunks, batches, prefix hits, forks and log-probabilities, with a step in flight, with graphs and without."""
    devices.leader = FakeDevice(seed)
    folder = zoo(name)
    expected, scored, forked = of_one_rank(folder, num_ranks)
    with devices.ranks(folder, num_ranks) as ranks:
        assert told(ranks.generate(prompts(), params())) == expected
        assert told(ranks.generate(prompts(), params())) == expected
        assert told(ranks.generate(prompts(), params(prompt_logprobs=2))) == scored
        assert told(ranks.generate(prompts(), params(), n=2)) == forked
        ranks.check()
        replays = [devices.leader.num_replays, *(d.num_replays for d in devices.others)]
        assert min(replays) > 0 and len(set(replays)) == 1, (
            "ranks use the graphs that the leader uses"
        )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("glm4_moe_lite", {}),  # latent attention
        ("qwen3_next", dict(deterministic=True)),  # recurrent layers
    ],
)
def test_latents_and_states_of_ranks_on_gpus(tmp_path, devices, name, options):
    folder = tmp_path / name
    model_zoo.build_proven(name, folder)
    expected, scored, forked = of_one_rank(folder, 2, **options)
    with devices.ranks(folder, **options) as ranks:
        for _ in range(2):
            assert told(ranks.generate(prompts(), params())) == expected
        assert told(ranks.generate(prompts(), params(prompt_logprobs=2))) == scored
        assert told(ranks.generate(prompts(), params(), n=2)) == forked
        ranks.check()
        replays = [devices.leader.num_replays, *(d.num_replays for d in devices.others)]
        assert min(replays) > 0 and len(set(replays)) == 1


def test_adapters_of_ranks_on_gpus(zoo, tmp_path, devices):
    """A slot is loaded between two steps in flight, in the order of the leader."""
    folder = zoo("llama")
    paths = [save_adapter(tmp_path / str(i), folder, seed=i) for i in range(2)]
    refs = [None, *(AdapterRef.of_folder(path.name, str(path)) for path in paths)]
    options = dict(max_loaded_adapters=1, max_adapter_rank=8)
    with engine(folder, 1, 2, **options) as alone:
        expected = adapted(alone, refs)
    with devices.ranks(folder, **options) as ranks:
        assert adapted(ranks, refs) == expected
        assert adapted(ranks, refs) == expected
        ranks.check()


def test_a_draft_model_on_the_first_gpu_drafts_for_all_ranks(zoo, devices, monkeypatch):
    folder = zoo("llama")
    greedy = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
    with engine(folder, 1, 2) as alone:
        expected = tokens(alone.generate(prompts(), greedy))
        num_steps = alone.telemetry()["host"]["num_steps"]
    monkeypatch.setattr(engine_module, "open_draft_source", always_draft)
    options = dict(speculation=dict(method="draft_model", draft_model=str(folder)))
    with devices.ranks(folder, **options) as ranks:
        assert tokens(ranks.generate(prompts(), greedy)) == expected
        assert ranks.telemetry()["host"]["num_steps"] < num_steps / 1.5


def plain(**changes: object) -> list[SamplingParams]:
    """Parameters with which a graph samples."""
    return [
        SamplingParams(
            max_tokens=20, ignore_eos=True, temperature=0.8, top_k=20, seed=i + 1, **changes
        )
        for i in range(len(prompts()))
    ]


def tokens(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("seed", range(2))
def test_plain_steps_sample_in_the_graph(zoo, devices, seed):
    """The next step is planned before the leader knows the tokens; the other ranks get them on their devices."""
    devices.leader = FakeDevice(seed)
    folder = zoo("llama")
    with engine(folder, 1, 2) as alone:
        expected = tokens(alone.generate(prompts(), plain()))
    with devices.ranks(folder) as ranks:
        assert tokens(ranks.generate(prompts(), plain())) == expected
        assert ranks.telemetry()["graphs"]["num_hits"] > 0


def test_each_rank_restores_its_part_from_its_own_host_memory(zoo, devices):
    folder = zoo("llama")
    expected, *_ = of_one_rank(folder, 2)
    changes = dict(num_blocks=FEW_BLOCKS, safety_margin=0.0, restore="always", node_pool_gib=0.001)
    with devices.ranks(folder, **changes) as ranks:
        assert told(ranks.generate(prompts(), params())) == expected
        assert ranks.load().num_preemptions > 0
        assert ranks.telemetry()["tiers"]["num_restored"] > 0
        ranks.check()


@pytest.mark.parametrize("kind", [FakeDevice, LateCopies])
def test_ranks_on_gpus_share_the_pool_of_the_node(zoo, tmp_path, devices, kind):
    """A block is published once all ranks have copied their parts, by an idle leader too. A request computes with
    restored blocks once all ranks have them."""
    folder = zoo("llama")
    expected, *_ = of_one_rank(folder, 2)
    devices.kind = kind
    pool = dict(node_pool=PoolPlace("ranks", folder=tmp_path), node_pool_gib=0.001)
    with devices.ranks(folder, **pool) as first:
        assert told(first.generate(prompts(), params())) == expected
        num_blocks = sum(len(prompt) // 8 for prompt in prompts()) - SHARED // 8
        host_blocks = first._loop._scheduler.memory.host.pool_blocks
        wait_until(lambda: host_blocks.num_sealed >= num_blocks)
        devices.leader = FakeDevice(1)
        devices.leader._pace.eagerness = 1.0  # its copies are over before those of the other rank
        with devices.ranks(folder, restore="always", **pool) as second:
            beside = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.0)
            with (
                ThreadPoolExecutor() as threads
            ):  # Blocks are restored while another request decodes.
                long = threads.submit(second.generate, [[9]], beside)
                wait_until(lambda: second.load().num_decode_tokens > 0)
                assert told(second.generate(prompts(), params())) == expected
                assert not long.done()
            num_restored = second.telemetry()["tiers"]["num_restored"]
            assert num_restored >= num_blocks - len(prompts())
            second.check()
        first.check()
    assert not list(tmp_path.iterdir())


def wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_drafts_are_verified_by_ranks_on_gpus(zoo, devices):
    folder = zoo("llama")
    repeated = [[5, 6, 7, 8] * 6 for _ in range(3)]
    greedy = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    with engine(folder, 1, 2) as alone:
        expected = [o.token_ids for o in alone.generate(repeated, greedy)]
    with devices.ranks(folder, speculation=dict(method="ngram")) as ranks:
        assert [o.token_ids for o in ranks.generate(repeated, greedy)] == expected


def test_an_idle_leader_captures_with_all_ranks(zoo, devices):
    """At the start there is no graph of 24 rows, so that 20 rows use that of 32."""
    folder = zoo("llama")
    with devices.ranks(folder, max_running_requests=40, max_batch_tokens=40) as ranks:
        captured = ranks.telemetry()["graphs"]["num_captures"]
        asked = [[9, i] for i in range(20)], plain()[0]
        expected = tokens(ranks.generate(*asked))
        wait_until(lambda: ranks.telemetry()["graphs"]["num_captures"] > captured)
        padding = ranks.telemetry()["graphs"]["num_padding"]
        assert tokens(ranks.generate(*asked)) == expected
        assert 0 < ranks.telemetry()["graphs"]["num_padding"] - padding < padding


def test_all_ranks_have_the_same_graphs(zoo, devices, caplog):
    """One device breaks after four graphs that are measured and two of mixed steps."""
    devices.options = dict(breaks_after=6)
    folder = zoo("llama")
    with engine(folder, 1, 2) as alone:
        expected = tokens(alone.generate(prompts(), plain()))
    with devices.ranks(folder) as ranks:
        assert tokens(ranks.generate(prompts(), plain())) == expected
        (other,) = devices.others
        assert devices.leader.num_replays == other.num_replays > 0
        assert ranks.telemetry()["graphs"]["num_cached"] == 2
    assert "a rank cannot capture a decode step of 6 rows" in caplog.text


def test_the_rank_with_the_least_memory_decides_the_number_of_blocks(zoo, devices, monkeypatch):
    monkeypatch.setattr(device_memory, "LEAST_GRAPH_BYTES", 1)
    folder, total, num_blocks = zoo("llama"), 1_500_000, []
    devices.leader = FakeDevice(0, total_bytes=2 * total, graph_bytes=1000)
    for other in (total, 2 * total):
        devices.options = dict(total_bytes=other, graph_bytes=1000)
        with devices.ranks(folder, num_blocks=None, max_memory_percent=0.8) as ranks:
            num_blocks.append(ranks.config.num_blocks)
            assert tokens(ranks.generate([[5, 6]], plain()[0]))
    assert 0 < num_blocks[0] < num_blocks[1]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["1", "3"]), ("4,5, 6,7", ["5", "7"]), ("GPU-a,GPU-b", ["GPU-b", ""]), ("", ["", ""])],
)
def test_each_rank_has_a_gpu_of_its_own(visible, expected):
    assert [gpu_of_rank(visible, rank) for rank in (1, 3)] == expected


def test_sums_in_a_free_order_are_those_of_the_library():
    """On GPUs without `deterministic`: one all-reduce instead of a gather."""
    calls: list[str] = []

    class Backend:
        def allreduce(self, tensors: list[torch.Tensor]) -> Backend:
            calls.append("allreduce")
            tensors[0] += 10.0
            return self

        def wait(self) -> None:
            calls.append("wait")

    group = RankGroup(0, 2, Backend(), fixed_order=False)
    assert group.sum([torch.ones(3), torch.ones(3)]).tolist() == [12.0] * 3
    assert calls == ["allreduce", "wait"]


def test_a_rank_whose_leader_was_killed_ends():
    """Its step would wait for the leader without an end, as NCCL does."""
    code = f"from quire.replica.ranks import following_rank as f\nimport sys, time\n{HANG}"
    links = RankLinks(2)
    command = [sys.executable, "-c", code, str(links.folder), "1"]
    with subprocess.Popen(command) as rank:
        links.accept()
        links.close()
        assert rank.wait(60) == 1


def test_the_leader_ends_calls_that_wait_for_a_rank_which_has_ended():
    ended, aborted = threading.Event(), threading.Event()
    links = RankLinks(2)
    link = LeaderLink(links.folder, 1)
    links.accept()
    links.on_end(lambda end: ended.set())
    links.watch(aborted.set)
    link._link.close()
    assert ended.wait(30) and aborted.wait(30)
    links.close()


class TurnGroup(RankGroup):
    """Ranks that compute in turns: Triton's interpreter changes its module while a kernel runs."""

    turn = threading.Lock()

    def gather(self, x):
        self.turn.release()
        try:
            return super().gather(x)
        finally:
            self.turn.acquire()

    def gather_to_first(self, x):
        self.turn.release()
        try:
            return super().gather_to_first(x)
        finally:
            self.turn.acquire()


def interpreted(kind: type[Runner], path: Path, group: RankGroup, **options: object) -> Runner:
    """The runner of a rank with the kernels of a GPU."""
    args = EngineArgs(model=str(path), tensor_parallel=group.size)
    spec = rank_spec(ModelSpec.from_checkpoint(path), args)
    config = engine_config(spec, tensor_parallel=2, reduction_splits=2, deterministic=False)
    model = load_model(spec, "cpu", "float32", group=group, num_splits=2)
    pool = KVPool(config.num_blocks, spec.groups, config.block_size, torch.float32)
    if kind is not Runner:
        options["group"] = group
    return kind(config, spec, model, pool, attention_backend="triton", **options)


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the kernels are not interpreted")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "layers"),
    [("llama", (2, [2])), ("qwen3_moe", (1, [1]))],  # experts in one of the layers
)
def test_kernels_of_a_gpu_compute_the_parts_of_two_ranks(tmp_path, name, layers):
    repair_interpreter()
    path = model_zoo.build(name, tmp_path, num_hidden_layers=2, head_dim=64)
    expected = logits_of(interpreted(Runner, path, RankGroup()))
    links = RankLinks(2)
    store = links.folder / "store"

    def follow() -> None:
        link = LeaderLink(links.folder, 1)
        group = TurnGroup.join(store, 1, 2)
        with group.turn:
            runner = interpreted(FollowingRunner, path, group)
        link.send({"ready": True})
        while (message := link.receive()) is not None:
            with group.turn:
                runner.follow(decode(message))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    links.accept()
    group = TurnGroup.join(store, 0, 2)
    with group.turn:
        runner = interpreted(LeadingRunner, path, group, links=links)
    links.receive()
    with group.turn:
        found = logits_of(runner)
    links.close()
    thread.join(30)
    assert (runner.fused.fused["layers"], runner.fused.chains) == layers, runner.fused
    assert np.abs(found - expected).max() < 1e-4 * expected.std()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
def test_two_gpus_generate_the_tokens_of_one(tmp_path, cuda_graphs):
    """Real processes, joined by NCCL; sums have a fixed order."""
    path = model_zoo.build("llama", tmp_path, num_hidden_layers=2, head_dim=64)
    options = dict(
        device="cuda", dtype="float32", deterministic=True, cuda_graphs=cuda_graphs, prove=False
    )
    answers = []
    for num_ranks in (1, 2):
        args = dict(model=str(path), tensor_parallel=num_ranks, reduction_splits=2)
        with Engine(**args, **options) as ranks:
            answers.append(tokens(ranks.generate(prompts(), params())))
    assert answers[0] == answers[1]
