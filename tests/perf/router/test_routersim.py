"""The router's stack as a plug-in of a simulator, and the tables of its results."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quire.router.policy.by_name import make_policy
from tests.perf.router.routersim import compare, geometric_mean, markdown, parts
from tests.perf.router.routersim_stack import Stack


class Hardware:
    block, kv_tokens, max_batched_tokens = 128, 100_000, 2048
    t0, c_d, c_kv, c_p, c_a = 5e-3, 2e-5, 2.7e-8, 4e-5, 1.3e-9
    cap_blocks = kv_tokens // block

    def prefill_time(self, tokens, context):
        return tokens * (self.c_p + self.c_a * (context + tokens / 2))


def replicas(now_s, **loads):
    report = {"running": 0, "waiting": 0, "queued_prefill": 0, "kv_tokens": 0}
    report |= {"kv_free": 700, "kv_used": 0, "t": now_s}
    return [
        SimpleNamespace(rep=report | {"queued_prefill": loads.get(f"r{i}", 0)}, speed=1.0)
        for i in range(3)
    ]


def request(number, blocks):
    blocks = list(blocks)
    return SimpleNamespace(
        id=number, h=blocks, nfull=len(blocks), inp=128 * len(blocks) + 5, out=10, hit=0,
        pred_hit=0, t_first=0.0, t_end=0.0,
    )  # fmt: skip


def stack():
    plug_in = Stack(make_policy("slo"))
    plug_in.setup(3, Hardware())
    return plug_in


def test_a_request_follows_its_blocks_until_their_holder_restarts():
    plug_in = stack()
    plug_in.on_kv(1, True, [7, 8, 9])
    asked = request(1, [7, 8, 9])
    assert plug_in.choose(asked, replicas(1.0), 1.0) == 1 and asked.pred_hit == 3 * 128
    plug_in.on_kv(1, False, [9])
    assert plug_in.choose(asked, replicas(2.0), 2.0) == 1 and asked.pred_hit == 2 * 128
    assert plug_in.choose(asked, replicas(3.0, r1=100_000), 3.0) != 1
    plug_in.on_reset(1, [])
    plug_in.choose(asked, replicas(4.0), 4.0)
    assert asked.pred_hit == 0


def test_bookings_spread_a_burst_between_reports_and_come_back():
    plug_in = stack()
    asked = [request(i, range(100 * i, 100 * i + 20)) for i in range(9)]
    chosen = []
    for one in asked:
        chosen.append(plug_in.choose(one, replicas(1.0), 1.0))
        plug_in.on_route(one, chosen[-1], 1.0)
    assert sorted(chosen) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for one, i in zip(asked, chosen, strict=True):
        one.t_first = one.t_end = 2.0
        plug_in.on_first(i, one)
        plug_in.on_finish(i, one)
    fleet = plug_in._table.fleet([], 1, 3.0)
    assert not fleet.columns.unanswered_work.any() and not plug_in._bookings
    # The measured speed is the simulated hardware's without the decode steps in between.
    assert fleet.prefill_s_per_work[0] == 0  # not yet in a report
    plug_in.choose(request(99, [1]), replicas(4.0), 4.0)
    assert plug_in._table.fleet([], 1, 4.0).prefill_s_per_work == pytest.approx(
        [4e-5] * 3, rel=0.05
    )


class FoundRuns:
    """A `Simulator` with given results."""

    def run(self, workload, seed, policy):
        parts = {"own_prefill_s": 0.5, "wait_s": 1.5 + seed, "decode_s": 4.0}
        return {"ttft_mean": 2.0 + seed, "e2e_mean": 6.0, "goodput": 0.9, "hit": 0.5} | parts

    def oracle(self, workload, seed):
        parts = {"own_prefill_s": 0.25, "wait_s": 0.75, "decode_s": 3.0}
        goodput = 0.95 + 0.01 * len(workload)
        return {"ttft_mean": 1.0, "e2e_mean": 4.0, "goodput": goodput} | parts


def test_the_parts_of_a_request_add_up():
    done = SimpleNamespace(t=1.0, t_first=3.0, t_end=7.0, inp=10_000, hit=4000)
    found = parts([done, done], Hardware())
    assert found["own_prefill_s"] == pytest.approx(6000 * (4e-5 + 1.3e-9 * 7000))
    assert found["own_prefill_s"] + found["wait_s"] == pytest.approx(2.0)
    assert found["decode_s"] == pytest.approx(4.0)


def test_ratios_are_geometric_means_and_gaps_arithmetic_ones():
    row = compare(FoundRuns(), "any", ("a", "bb"), (0, 6))
    assert row["ttft"] == pytest.approx(4.0)  # sqrt(2 x 8)
    assert row["e2e"] == pytest.approx(1.5)
    assert row["gap"] == pytest.approx(0.065) and row["worst_gap"] == pytest.approx(0.07)
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    page = markdown({"Title": {"any": row, "ours:slo": row}})
    assert "| a | 0.500 / 0.250 | 4.500 / 0.750 | 4.000 / 3.000 |" in page
    assert "| any | 4.00 / 1.50 / 0.065 | 4.00 / 1.50 / 0.060 | 4.00 / 1.50 / 0.070 |" in page
