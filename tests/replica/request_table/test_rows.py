import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import FinishReason, Phase, Request
from quire.replica.kv_cache.blocks import IntegrityError
from quire.replica.kv_cache.groups import FULL_ATTENTION, LayerGroup
from quire.replica.request_table import table_checks
from quire.replica.request_table.decode_rows import Draft
from quire.replica.request_table.plan_writer import PlanWriter
from quire.replica.request_table.rows import RowTable

EOS = 2


def make_request(key="key", prompt=(5, 6, 7), num_emitted=0, **params):
    request = Request(key, list(prompt), SamplingParams(**params), num_emitted=num_emitted)
    request.accept((EOS,))
    request.enter(Phase.PREFILLING)
    return request


def decode(table, *rows):
    for row in rows:
        table.request(row).enter(Phase.DECODING)
    table.begin_decoding(np.array(rows))


def ended(table, rows, *tokens):
    ids = np.array(tokens)
    length = table.record(rows, ids)
    return table.ended(rows, ids, length)


def test_a_ragged_step_is_written_down_token_by_token():
    table = RowTable(max_rows=4, max_blocks=4, block_size=4, vocab_size=50)
    decoder = table.claim(
        make_request(
            "d", range(10, 16), temperature=0.5, top_k=7, top_p=0.9, seed=2**64 - 1, choice=3
        ),
        [[8, 9]],
        num_computed=5,
    )
    decode(table, decoder)
    whole = table.claim(make_request("w", range(20, 25)), [[3, 1]], num_computed=0)
    part = table.claim(make_request("p", range(30, 40)), [[7, 5, 6]], num_computed=4)
    plan, rows, sample_rows = PlanWriter(table).write(
        9, table.decode_rows(), [(whole, 5), (part, 3)]
    )
    assert (plan.step, plan.num_decode_rows, plan.num_rows, plan.num_tokens) == (9, 1, 3, 9)
    assert rows.tolist() == [decoder, whole, part]
    assert plan.cu_q.tolist() == [0, 1, 6, 9]
    assert plan.token_ids.tolist() == [-1 - decoder, 20, 21, 22, 23, 24, 34, 35, 36]
    assert plan.num_scheduled.tolist() == [1, 5, 3]
    assert plan.num_sampled.tolist() == [1, 1, 0]
    assert plan.positions.tolist() == [5, 0, 1, 2, 3, 4, 4, 5, 6]
    assert plan.kv_len.tolist() == [6, 5, 7]
    assert plan.block_tables.gather().tolist() == [[[8, 9], [3, 1], [7, 5]]]
    assert plan.slots.tolist() == [[37, 12, 13, 14, 15, 4, 20, 21, 22]]
    assert sample_rows.tolist() == [decoder, whole]
    sampling = plan.sampling
    assert sampling.token_index.tolist() == [0, 5]
    assert sampling.position.tolist() == [6, 5]
    assert [sampling.columns[name][0] for name in ("temperature", "top_k", "choice")] == [0.5, 7, 3]
    assert sampling.columns["top_p"][0] == np.float32(0.9)
    assert int(sampling.columns["seed"][0]) == 2**64 - 1
    assert sampling.suppressed == ()
    dtypes = {
        "token_ids": np.int32,
        "positions": np.int32,
        "cu_q": np.int32,
        "kv_len": np.int32,
        "slots": np.int64,
    }
    assert {name: getattr(plan, name).dtype for name in dtypes} == dtypes
    assert sampling.token_index.dtype == np.int32
    assert sampling.position.dtype == np.int64


def test_a_plan_does_not_change_with_the_table():
    table = RowTable(max_rows=2, max_blocks=2, block_size=4, vocab_size=50)
    row = table.claim(make_request(prompt=range(10, 14)), [[0, 1]], num_computed=3)
    decode(table, row)
    plan, _, _ = PlanWriter(table).write(1, table.decode_rows(), [])
    before = [array.copy() for array in (plan.kv_len, plan.cu_q)]
    positions = plan.positions.copy()
    table.record(np.array([row]), np.array([9]))
    PlanWriter(table).write(2, table.decode_rows(), [])
    table.vacate(row)
    assert [a.tolist() for a in (plan.kv_len, plan.cu_q)] == [a.tolist() for a in before]
    assert plan.positions.tolist() == positions.tolist()


@given(
    groups=st.sampled_from(
        [
            (FULL_ATTENTION,),
            (LayerGroup(window=9),),
            (FULL_ATTENTION, LayerGroup(window=3), LayerGroup(chunk=16)),
        ]
    ),
    events=st.lists(
        st.sampled_from(["step", "swap"] * 3 + ["come", "go", "chunk", "swap prefill"]),
        min_size=20,
        max_size=60,
    ).map(lambda events: ["come", "come", *events]),
)
@settings(deadline=None)
def test_planned_tables_are_those_of_the_rows_whatever_changed_between_plans(groups, events):
    size = 8  # or every row would get a block, and be copied, in every other step
    table = RowTable(6, 40, size, vocab_size=50, groups=groups)
    blocks = iter(range(10_000))
    decoding, prefilling = [], []

    def claim(num_computed):
        request = make_request(prompt=range(3, 9), max_tokens=60)
        return table.claim(request, [[next(blocks)] for _ in groups], num_computed)

    for step, event in enumerate(events):
        if event == "come" and table.num_free:
            decoding.append(claim(5))
            decode(table, decoding[-1])
        elif event == "chunk" and table.num_free:
            prefilling.append(claim(0))
        elif event == "go" and decoding:
            table.vacate(decoding.pop(len(decoding) // 2))
        elif event.startswith("swap") and (
            rows := prefilling if event == "swap prefill" else decoding
        ):
            g = step % len(groups)
            table.replace_block(g, rows[-1], int(table.first_block[g, rows[-1]]), next(blocks))
        table.trim()
        decodes = table.decode_rows()
        if not len(decodes):
            continue
        lacking = table.lacking_block(decodes)
        table.append_blocks(decodes, lacking, [next(blocks) for _ in lacking for _ in groups])
        list(table.fill_blocks(*decodes.fills()))
        chunks = [(prefilling[0], 1)] if event == "chunk" and prefilling else []
        if chunks and table.num_computed[prefilling[0]] > 4:
            chunks = []
        plan, rows, _ = PlanWriter(table).write(step, decodes, chunks)
        width, tables = plan.block_tables.width, plan.block_tables.gather()
        assert tables.tolist() == table.block_tables[:, rows, :width].tolist()
        newest = plan.cu_q[1:] - 1
        own = tables[:, np.arange(len(rows)), plan.positions[newest] // size]
        assert (plan.slots[:, newest] == own * size + plan.positions[newest] % size).all()
        assert width * size >= plan.kv_len.max() > (width - 1) * size
        table.record(decodes.ids, np.full(len(decodes), 7, np.int32))
        for row in [row for row in decoding if table.length[row] == table.run_length[row]]:
            decoding.remove(row)
            table.vacate(row)


@given(
    prompt_len=st.integers(1, 20),
    tokens=st.lists(st.integers(3, 49), max_size=40),
    block_size=st.sampled_from([2, 4, 8]),
)
@settings(deadline=None)
def test_generated_tokens_reach_the_request_in_order(prompt_len, tokens, block_size):
    """As in the scheduler: a block is flushed in the step that computes its last token."""
    table = RowTable(2, 40, block_size, vocab_size=50)
    prompt = list(range(prompt_len))
    request = make_request(prompt=prompt, max_tokens=64)
    row = table.claim(request, [list(range(32))], num_computed=prompt_len)
    rows = np.array([row])
    blocks = []
    for step, token in enumerate(tokens):
        table.record(rows, np.array([token]))
        if not step:
            decode(table, row)
        decodes = table.decode_rows()
        for full, owner, i, own, token_bytes in table.fill_blocks(*decodes.fills()):
            assert (full, owner, own) == (row, request, [i])
            assert len(request.token_ids) == table.length[row]
            assert token_bytes == request.token_ids[i * block_size :].tobytes()
            blocks.append(i)
        PlanWriter(table).write(step, decodes, [])
    assert blocks == list(range(prompt_len // block_size, (prompt_len + len(tokens)) // block_size))
    table.vacate(row)
    assert request.token_ids.tolist() == prompt + tokens
    assert request.row == -1


def test_ends_are_found_by_length_and_by_each_rows_own_stop_ids():
    table = RowTable(5, 2, 8, vocab_size=50)
    settings_of = [
        {"max_tokens": 1},
        {"max_tokens": 9, "stop_token_ids": (11,)},
        {"max_tokens": 9},
        {"max_tokens": 9, "ignore_eos": True},
        {"max_tokens": 9, "min_tokens": 2},
    ]
    rows = np.array(
        [table.claim(make_request(i, **params), [[i]], 3) for i, params in enumerate(settings_of)]
    )

    def step(*tokens):
        return ended(table, rows, *tokens)

    assert step(9, 11, 11, EOS, EOS) == {0: FinishReason.LENGTH, 1: FinishReason.STOP}
    assert step(9, 9, EOS, 9, 9) == {0: FinishReason.LENGTH, 2: FinishReason.STOP}
    assert step(EOS, 9, 9, 9, EOS)[4] is FinishReason.STOP


def test_an_ending_token_at_max_tokens_is_a_stop():
    table = RowTable(1, 2, 8, vocab_size=50)
    row = table.claim(make_request(max_tokens=1), [[0]], 3)
    assert ended(table, np.array([row]), EOS) == {0: FinishReason.STOP}


def test_stop_ids_are_masked_until_min_tokens_earlier_attempts_included():
    table = RowTable(3, 2, 8, vocab_size=50)
    rows = [
        table.claim(make_request(0, min_tokens=1, stop_token_ids=(9,)), [[0]], 2),
        table.claim(make_request(1, num_emitted=1, min_tokens=1), [[1]], 2),
        table.claim(make_request(2, min_tokens=1, ignore_eos=True), [[2]], 2),
    ]
    plan, _, _ = PlanWriter(table).write(1, table.decode_rows(), [(row, 1) for row in rows])
    assert plan.sampling.suppressed == ((0, (EOS, 9)),)


def test_rows_are_reused_clean():
    table = RowTable(1, 3, 8, vocab_size=50)
    table.vacate(table.claim(make_request("a", stop_token_ids=(9,)), [[4, 5, 6]], 3))
    assert table.num_free == 1
    row = table.claim(make_request(("b", 1), max_tokens=5), [[7]], 3)
    assert table.keys[row] == ("b", 1)
    assert table.block_tables[0, row].tolist() == [7, 0, 0]
    assert ended(table, np.array([row]), 9) == {}


def test_blocks_are_asked_for_only_when_the_next_token_has_none():
    table = RowTable(2, 3, 4, vocab_size=50)
    full = table.claim(make_request("f", range(4)), [[0]], num_computed=4)
    room = table.claim(make_request("r", range(4)), [[1]], num_computed=3)
    decode(table, full, room)
    decodes = table.decode_rows()
    assert decodes.ids[table.lacking_block(decodes)].tolist() == [full]
    assert [filled[0] for filled in table.fill_blocks(*decodes.fills())] == [room]
    table.append_blocks(decodes, np.array([0]), [2])
    assert table.blocks(full) == [0, 2]
    assert table.lacking_block(decodes).tolist() == []


@pytest.mark.parametrize(("temperature", "column"), [(0.0, 0.0), (1e-6, 0.0), (1e-3, 1e-3)])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature, column):
    table = RowTable(1, 1, 4, vocab_size=50)
    row = table.claim(make_request(temperature=temperature, top_p=1e-60), [[0]], 0)
    assert table.sampling["temperature"][row] == np.float32(column)
    assert table.sampling["top_p"][row] > 0


def test_the_check_sees_a_shared_block_that_would_be_written():
    table = RowTable(2, 2, 4, vocab_size=50)
    table.claim(make_request("a", range(6)), [[0, 1]], num_computed=5)
    table_checks.check(table, table_checks.num_owners(table, 4))
    table.claim(make_request("b", range(6)), [[0, 1]], num_computed=5)
    with pytest.raises(IntegrityError, match="would write to a block that it shares"):
        table_checks.check(table, table_checks.num_owners(table, 4))


def test_a_plan_tells_what_has_changed_and_only_that():
    table = RowTable(max_rows=3, max_blocks=4, block_size=4, vocab_size=50)
    row = table.claim(make_request(prompt=range(10, 17), seed=5, temperature=0.5), [[8, 9]], 0)
    changes = PlanWriter(table).write(1, table.decode_rows(), [(row, 7)])[0].changes
    at, blocks = changes.flat(table.block_tables[0].size)
    assert (at.tolist(), blocks.tolist()) == ([4 * row, 4 * row + 1], [8, 9])
    assert (changes.claimed.tolist(), changes.sampling["seed"].tolist()) == ([row], [5])
    decode(table, row)
    assert PlanWriter(table).write(2, table.decode_rows(), [])[0].changes.flat(16)[0].tolist() == []
    decodes = table.decode_rows()
    table.append_blocks(decodes, table.lacking_block(decodes), [3])
    table.replace_block(0, row, 2, 7)  # of a place that changes twice the last counts
    changes = PlanWriter(table).write(3, decodes, [])[0].changes
    at, blocks = changes.flat(table.block_tables[0].size)
    assert (at.tolist(), blocks.tolist(), len(changes.claimed)) == ([4 * row + 2], [7], 0)


def test_a_block_in_every_group_is_told_for_every_group():
    groups = (FULL_ATTENTION, LayerGroup(layers=(1,), window=8))
    table = RowTable(max_rows=2, max_blocks=4, block_size=4, vocab_size=50, groups=groups)
    row = table.claim(make_request(prompt=range(10, 14)), [[8], [6]], 0)
    PlanWriter(table).write(1, table.decode_rows(), [(row, 4)])
    decode(table, row)
    decodes = table.decode_rows()
    table.append_blocks(decodes, table.lacking_block(decodes), [3, 2])
    changes = PlanWriter(table).write(2, decodes, [])[0].changes
    stride = table.block_tables[0].size
    at, blocks = changes.flat(stride)
    assert at.tolist() == [4 * row + 1, stride + 4 * row + 1]
    assert blocks.tolist() == [3, 2]


def test_after_a_plan_that_did_not_arrive_the_next_tells_all_rows():
    table = RowTable(max_rows=3, max_blocks=4, block_size=4, vocab_size=50)
    first = table.claim(make_request("a", prompt=range(7)), [[8, 9]], 0)
    other = table.claim(make_request("b", prompt=range(4), seed=3), [[5]], 0)
    PlanWriter(table).write(1, table.decode_rows(), [(first, 7)])
    table.vacate(first)
    table.report_again()
    changes = PlanWriter(table).write(2, table.decode_rows(), [(other, 4)])[0].changes
    at, blocks = changes.flat(table.block_tables[0].size)
    assert (at.tolist(), blocks.tolist()) == ([4 * other], [5])
    assert (changes.claimed.tolist(), changes.sampling["seed"].tolist()) == ([other], [3])


@pytest.mark.parametrize("window", [1, 2])
def test_the_blocks_of_a_draft_in_flight_are_kept_until_it_is_verified(window):
    """The newest token, at position 3, fills its block, and no later query sees it if the window is one token."""
    groups = (FULL_ATTENTION, LayerGroup(window=window))
    table = RowTable(max_rows=1, max_blocks=4, block_size=4, vocab_size=50, groups=groups)
    row = table.claim(make_request(prompt=(5, 6, 7)), [[1, 2], [3, 4]], num_computed=3)
    table.record(np.array([row]), np.array([8], np.int32))
    decode(table, row)
    draft = Draft(row, int(table.owners[row]), 3, np.array([9, 9], np.int32))
    PlanWriter(table).write(1, table.some_decode_rows([]), [], drafts=[draft])
    assert table.num_computed[row] == 6
    table.begin_drafts([draft])
    assert table.trim() == [], "the block of the newest token is not indexed yet"
    table.record(np.array([row]), np.array([9], np.int32))
    table.end_drafts(np.array([row]))
    assert table.num_computed[row] == 4
    assert table.trim() == ([3] if window == 1 else [])
