"""Layers in one call: the bits of separate calls, with any team of threads, and bad arguments never reach C."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from quire.kernels.cpu import (
    cpu_attention_native,
    cpu_call_sequence,
    cpu_decoder_layer,
    native_library,
)
from quire.kernels.cpu.cpu_attention import has_native, plan_attention
from quire.kernels.cpu.cpu_call_sequence import CallSequence, NormPart, ProductPart, Workspace
from quire.kernels.cpu.cpu_decoder_layer import LayerParts, LayerStep, PreparedLayer, Selection
from quire.kernels.cpu.cpu_layer_stack import LayerStack
from quire.kernels.cpu.cpu_linear import PackedWeight, packed_linear
from quire.kernels.cpu.cpu_lm_head import NormedProduct
from quire.kernels.cpu.cpu_row_ops import (
    GatedCall,
    NormCall,
    gated,
    pad_weight,
    rms_norm,
    rotate_and_write,
)

pytestmark = pytest.mark.skipif(not has_native(), reason="installed without a C compiler")


def isas() -> tuple[str, ...]:
    return native_library.load().isas


TOKENS = [1, 3, 16, 130]
PARTS = [
    "attention_norm",
    "qkv",
    "rotate and write",
    "attention",
    "output",
    "mlp_norm",
    "gate_up",
    "gated",
    "down",
]
CONTEXT = 70  # tokens of each row before the step's
BLOCK = 16


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Layer:
    """A small decoder layer with all options or with none, and the cache of some rows."""

    def __init__(
        self, dtype=torch.float32, int8=False, plain=False, num_blocks=64, context=CONTEXT
    ):
        self.context = context
        hidden, inner, heads, kv_heads, dim = 96, 200, 6, 2, 24
        self.heads, self.dtype = heads, dtype

        def product(columns, depth, seed, with_bias):
            weight = PackedWeight.pack(
                [normal(columns, depth, dtype=dtype, seed=seed) * depth**-0.5], int8=int8
            )
            bias = normal(columns, seed=seed + 1) if with_bias else None
            return ProductPart(weight, None if bias is None else weight.pad_bias(bias))

        def norm(columns, seed):
            return NormPart(pad_weight(1.0 + normal(columns, seed=seed) / 4), 1e-5)

        # A pool of two layers; this is the second.
        self.pool = normal(num_blocks, 2, 2, kv_heads, BLOCK, dim, dtype=dtype, seed=11)
        flat = self.pool.view(-1, dim)
        plane = kv_heads * BLOCK
        self.block_rows = 4 * plane
        self.parts = LayerParts(
            attention_norm=norm(hidden, 1),
            qkv=product((heads + 2 * kv_heads) * dim, hidden, 2, not plain),
            head_norms=None if plain else (norm(dim, 3), norm(dim, 4)),
            num_heads=heads,
            scale=dim**-0.5,
            softcap=None if plain else 20.0,
            sinks=None if plain else torch.linspace(-2, 3, heads),
            output=product(hidden, heads * dim, 5, not plain),
            mlp_norm=norm(hidden, 6),
            gate_up=product(2 * inner, hidden, 7, not plain),
            gelu=not plain,
            down=product(hidden, inner, 8, not plain),
            k_cache=self.pool[:, 1, 0],
            v_cache=self.pool[:, 1, 1],
            k_pages=flat[2 * plane :],
            v_pages=flat[3 * plane :],
        )
        self.sequence = PreparedLayer(self.parts)
        self.stack = LayerStack([self.sequence])

    def rows(self, tokens, seed):
        """`cu_q`, lengths and block tables of the rows of `step`."""
        sizes = [n for n in (min(1, tokens), min(3, tokens - 1), tokens - 4) if n > 0]
        cu_q, lengths = np.cumsum([0, *sizes]), np.array(sizes) + self.context
        width = -(-int(lengths.max()) // BLOCK)
        tables = np.random.default_rng(seed).permutation(len(self.pool))[: len(sizes) * width]
        return cu_q, lengths, tables.reshape(len(sizes), width)

    def selection(self, tokens, chosen, seed=0, **span) -> Selection:
        """A selection of the tokens of `step`; each is a row that ends with this token."""
        cu_q, lengths, tables = self.rows(tokens, seed)
        row = np.searchsorted(cu_q, chosen, side="right") - 1
        plan = plan_attention(
            np.arange(len(chosen) + 1),
            lengths[row] - (cu_q[row + 1] - 1 - chosen),
            tables[row],
            self.parts.k_cache,
            self.heads,
            **span,
        )
        return Selection(torch.from_numpy(chosen), plan)

    def step(self, tokens, seed=0, **span) -> dict:
        """Rows with one token, with three, and one row with all others, after some context."""
        cu_q, lengths, tables = self.rows(tokens, seed)
        slots = np.concatenate(
            [
                table[np.arange(self.context, length) // BLOCK] * self.block_rows
                + np.arange(self.context, length) % BLOCK
                for table, length in zip(tables, lengths, strict=True)
            ]
        )
        rows = torch.from_numpy(slots[:, None] + np.arange(2) * BLOCK).reshape(-1)
        return dict(
            x=normal(tokens, 96, dtype=self.dtype, seed=seed),
            cos=normal(tokens, 16, dtype=self.dtype, seed=seed + 1),
            sin=normal(tokens, 16, dtype=self.dtype, seed=seed + 2),
            rows=rows,
            plan=plan_attention(cu_q, lengths, tables, self.parts.k_cache, self.heads, **span),
        )

    def together(self, workspace, x, cos, sin, rows, plan, isa=None):
        """Run the layer as one call."""
        return self.stack(x, LayerStep.of(plan, rows, cos, sin), workspace, isa=isa)

    def apart(self, x, cos, sin, rows, plan, isa=None):
        """Run the layer as separate calls."""
        p = self.parts
        q_norm, k_norm = p.head_norms or (None, None)
        normed = rms_norm(x, *p.attention_norm, isa=isa)
        qkv = packed_linear(normed, p.qkv.weight, bias=p.qkv.bias, isa=isa)
        norms = {}
        if q_norm is not None:
            norms = dict(q_norm=q_norm.weight, k_norm=k_norm.weight, eps=q_norm.eps)
        pages = (p.k_pages, p.v_pages, rows, cos, sin)
        q = rotate_and_write(qkv, p.num_heads, *pages, isa=isa, **norms)
        mixed = torch.empty_like(q)
        cpu_attention_native.attend(
            q,
            p.k_cache,
            p.v_cache,
            p.scale,
            plan,
            softcap=p.softcap,
            sinks=p.sinks,
            out=mixed,
            isa=isa,
        )
        middle = packed_linear(
            mixed.view(len(x), -1), p.output.weight, bias=p.output.bias, residual=x, isa=isa
        )
        normed = rms_norm(middle, *p.mlp_norm, isa=isa)
        inner = gated(
            packed_linear(normed, p.gate_up.weight, bias=p.gate_up.bias, isa=isa),
            gelu=p.gelu,
            isa=isa,
        )
        out = packed_linear(inner, p.down.weight, bias=p.down.bias, residual=middle, isa=isa)
        return out, q


KINDS = {
    "float32": dict(dtype=torch.float32),
    "bfloat16": dict(dtype=torch.bfloat16),
    "int8": dict(dtype=torch.bfloat16, int8=True),
    "plain": dict(dtype=torch.bfloat16, plain=True),
}


@pytest.mark.parametrize("isa", native_library.ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_has_the_bits_of_its_parts_one_by_one(kind, isa, threads):
    if isa not in isas():
        pytest.skip("not this processor's")
    layer, workspace = Layer(**KINDS[kind]), Workspace()
    for tokens in TOKENS + TOKENS[::-1]:
        for span in ({}, dict(window=9), dict(chunk=32)):
            step = layer.step(tokens, seed=tokens, **span)
            before = layer.pool.clone()
            expected, expected_q = layer.apart(**step, isa=isa)
            expected_pool = layer.pool.clone()
            layer.pool.copy_(before)
            kept = step["x"].clone()
            out = layer.together(workspace, isa=isa, **step)
            assert torch.isfinite(out).all()
            assert torch.equal(out, expected), (tokens, span)
            assert torch.equal(layer.pool, expected_pool)
            assert torch.equal(layer.sequence.queries(workspace), expected_q)
            assert torch.equal(step["x"], kept)


def test_layers_of_other_shapes_share_a_workspace():
    layers = [Layer(), Layer(plain=True), Layer(dtype=torch.bfloat16)]
    workspace = Workspace()
    for tokens in (3, 130, 1):
        for layer in layers:
            step = layer.step(tokens)
            out = layer.together(workspace, **step)
            assert torch.equal(out, layer.apart(**step)[0])
    widest = cpu_decoder_layer.workspace_columns(96, 6, 2, 24, 200) * 130 * 4
    assert widest <= len(workspace.memory) < widest + 1024


def test_a_result_is_not_touched_by_later_calls():
    layer, workspace = Layer(), Workspace()
    step = layer.step(16)
    first = layer.together(workspace, **step)
    kept = first.clone()
    second = layer.together(workspace, **(step | dict(x=first)))
    layer.together(workspace, **(step | dict(x=second)))
    assert torch.equal(first, kept)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_thousands_of_runs_have_the_same_bits(tokens):
    layer, workspace = Layer(dtype=torch.bfloat16), Workspace()
    before = torch.get_num_threads()
    torch.set_num_threads(4)  # more threads than cores: they are preempted at any moment
    try:
        step = layer.step(tokens)
        expected, _ = layer.apart(**step)
        for _ in range(2000):
            assert torch.equal(layer.together(workspace, **step), expected)
    finally:
        torch.set_num_threads(before)


def test_two_layers_run_at_the_same_time_in_two_threads():
    """Two threads run sequences at the same time, as two engines of a process do."""
    layers = [Layer(), Layer(dtype=torch.bfloat16)]
    steps = [layer.step(5) for layer in layers]
    expected = [layer.apart(**step)[0] for layer, step in zip(layers, steps, strict=True)]
    wrong = []

    def run(i):
        workspace = Workspace()
        for _ in range(300):
            if not torch.equal(layers[i].together(workspace, **steps[i]), expected[i]):
                wrong.append(i)

    both = [threading.Thread(target=run, args=[i]) for i in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert not wrong


# ----------------------------------------------------------------------------------------------------------
# Teams of other sizes than requested
# ----------------------------------------------------------------------------------------------------------

_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PARALLEL = ctypes.CFUNCTYPE(None, _WORK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def one_of_many(work, argument, num_threads, flags):
    work(argument)


def one_after_the_other(work, argument, num_threads, flags):
    """A team whose second thread starts when all units are complete."""
    for _ in range(num_threads):
        thread = threading.Thread(target=work, args=[argument])
        thread.start()
        thread.join()


def one_late(work, argument, num_threads, flags):
    late = threading.Timer(0.001, work, args=[argument])
    late.start()
    work(argument)
    late.join()


@pytest.mark.parametrize("context", [CONTEXT, 1500], ids=["short", "split"])
@pytest.mark.parametrize("parallel", [one_of_many, one_after_the_other, one_late])
def test_any_team_finishes_with_the_same_bits(parallel, context, monkeypatch):
    """All layers in one call. The last of the threads that share a row's keys resets the counters."""
    layers = [Layer(num_blocks=400, context=context) for _ in range(3)]
    stack, workspace = LayerStack([layer.sequence for layer in layers]), Workspace()
    callback = _PARALLEL(parallel)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for tokens in (1, 130):
            step = layers[0].step(tokens)
            assert bool(len(step["plan"].partials)) == (context > CONTEXT)
            expected = step["x"]
            for layer in layers:
                expected, _ = layer.apart(**(step | dict(x=expected)))
            tables = LayerStep.of(step["plan"], step["rows"], step["cos"], step["sin"])
            with monkeypatch.context() as patch:
                library = dataclasses.replace(native_library.load(), parallel=address)
                patch.setattr(stack, "_library", library)
                for _ in range(10):
                    assert torch.equal(stack(step["x"], tables, workspace), expected)
    finally:
        torch.set_num_threads(before)


def test_a_runtime_with_fewer_threads_than_asked_for():
    """OpenMP's own limit, which is read when the process starts."""
    code = "import test_cpu_layer_stack as t; t.test_thousands_of_runs_have_the_same_bits(3)"
    path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | dict(OMP_THREAD_LIMIT="2", OMP_DYNAMIC="true", PYTHONPATH=path),
        check=True,
        timeout=120,
    )


# ----------------------------------------------------------------------------------------------------------
# Times, and arguments
# ----------------------------------------------------------------------------------------------------------


def test_times_are_those_of_the_parts():
    layer, workspace = Layer(), Workspace()
    told = []
    workspace.on_times = told.append
    step = layer.step(130)
    out = layer.together(workspace, **step)
    workspace.on_times = None
    assert torch.equal(layer.together(workspace, **step), out)
    (times,) = told
    assert list(times) == PARTS
    assert all(0 < seconds < 1 for seconds in times.values())


def test_a_row_outside_of_the_pages_is_told_and_not_written():
    layer, workspace = Layer(), Workspace()
    step = layer.step(3)
    step["rows"][[1, 4]] = torch.tensor([-1, 1 << 40])
    before = layer.pool.clone()
    with pytest.raises(IndexError, match=r"^rows: 2 are not between 0 and"):
        layer.together(workspace, **step)
    changed = (layer.pool != before).view(-1, 24).any(dim=1)
    assert changed.sum() == 2 * 4, "keys and values of the other four"
    step = layer.step(3)
    assert torch.equal(layer.together(workspace, **step), layer.apart(**step)[0])


def test_no_tokens_give_no_tokens():
    layer = Layer()
    plan = plan_attention(
        np.array([0]), np.empty(0, np.int64), np.empty((0, 1)), layer.parts.k_cache, 6
    )
    empty = torch.empty(0, 16)
    rows = torch.empty(0, dtype=torch.int64)
    out = layer.together(Workspace(), torch.empty(0, 96), empty, empty, rows, plan)
    assert out.shape == (0, 96)


def test_arguments_that_do_not_fit_are_refused_by_name():
    layer, other = Layer(), Layer(num_blocks=40)
    step, workspace = layer.step(3), Workspace()
    x = step["x"]
    for wrong in (x[:, :90], x.bfloat16(), torch.empty(96, 3).t(), x[:2]):
        with pytest.raises(ValueError, match=r"^x: must be \[..., 96\] torch.float32 of 3 tokens"):
            layer.together(workspace, **(step | dict(x=wrong)))
    for name, changes in {
        "plan: made for 16 tokens of 6 heads": dict(plan=layer.step(16)["plan"]),
        "plan: made for 3 tokens of 6 heads and a cache (40,": dict(plan=other.step(3)["plan"]),
        "step: must have tables of torch.float32": {
            table: step[table].bfloat16() for table in ("cos", "sin")
        },
        "rows: must be [6] torch.int64": dict(rows=step["rows"][:5]),
        "cos: must have an even number": dict(cos=step["cos"][:, :7]),
        "sin: must be [3, 16]": dict(sin=step["sin"][:2]),
        "isa: ": dict(isa=next(iter(set(native_library.ISAS) - set(isas())), None)),
    }.items():
        if changes == dict(isa=None):  # this processor has all instruction sets
            continue
        with pytest.raises(ValueError) as error:
            layer.together(workspace, **(step | changes))
        assert str(error.value).startswith(name)


def test_parts_that_do_not_fit_each_other_are_refused_by_name():
    parts, half = Layer().parts, Layer(dtype=torch.bfloat16).parts
    for name, changes in {
        "qkv: must be [240, 96]": dict(qkv=parts.gate_up),
        "output: must be [96, 144]": dict(output=parts.down),
        "gate_up: must be [400, 96]": dict(gate_up=parts.qkv),
        "gate_up: must be [400, 96] torch.float32": dict(gate_up=half.gate_up),
        "down: must be [96, 200]": dict(
            down=parts.down._replace(weight=PackedWeight.pack([normal(90, 200)]))
        ),
        "weight: must come from pad_weight": dict(
            mlp_norm=parts.mlp_norm._replace(weight=torch.ones(90))
        ),
        "q_norm: must come from pad_weight": dict(head_norms=(parts.mlp_norm, parts.mlp_norm)),
        "bias: must come from pad_bias": dict(down=parts.down._replace(bias=torch.ones(96))),
        "sinks: must be [6]": dict(sinks=torch.ones(5)),
        "k_cache is torch.bfloat16": dict(k_cache=half.k_cache, v_cache=half.v_cache),
        "k_cache: heads of a block": dict(
            k_cache=parts.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
        ),
        "k_pages: must be": dict(k_pages=half.k_pages),
        "v_pages: must be": dict(v_pages=half.v_pages),
    }.items():
        with pytest.raises(ValueError) as error:
            PreparedLayer(dataclasses.replace(parts, **changes))
        assert str(error.value).startswith(name)
    norm = NormCall.of(parts.mlp_norm.weight, 96, torch.float32, 1e-6)
    with pytest.raises(ValueError, match=r"^calls: must be at most 20, got 21"):
        CallSequence({str(i): norm for i in range(21)})
    with pytest.raises(ValueError, match=r"^calls: must be distinct"):
        CallSequence({"a": norm, "b": norm})
    sequence, other = PreparedLayer(parts), Layer(torch.bfloat16).sequence
    gate_up, down = (
        ProductPart(PackedWeight.pack([normal(*shape)]), None) for shape in ((320, 96), (96, 160))
    )
    wider = dataclasses.replace(parts, gate_up=gate_up, down=down)
    for layers in ([], [sequence, other], [sequence, PreparedLayer(wider)]):
        with pytest.raises(ValueError, match=r"^layers: must have one shape, dtype and cache"):
            LayerStack(layers)
    with pytest.raises(ValueError, match=r"^layers: must be distinct"):
        LayerStack([sequence, sequence])


def test_a_stack_is_its_layers_one_after_the_other():
    layers = [Layer() for _ in range(3)]
    step, workspace = layers[0].step(9), Workspace()
    x, tables = step["x"], LayerStep.of(step["plan"], step["rows"], step["cos"], step["sin"])
    given = x.clone()
    alone = [LayerStack([layer.sequence]) for layer in layers]
    expected = x
    for layer in alone:
        expected = layer(expected, tables, workspace)
    stack = LayerStack([layer.sequence for layer in layers])
    timed = []
    for on_times in (None, timed.append):
        workspace.on_times = on_times
        assert torch.equal(stack(x, tables, workspace), expected)
        assert torch.equal(x, given)
    assert len(timed) == 3 and all(seconds["attention"] > 0 for seconds in timed)


@pytest.mark.parametrize("isa", native_library.ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 3])
def test_selected_tokens_have_the_bits_of_a_whole_step(kind, isa, depth, threads):
    if isa not in isas():
        pytest.skip("not this processor's")
    layers = [Layer(**KINDS[kind]) for _ in range(depth)]
    last, workspace = layers[-1], Workspace()
    stack = LayerStack([layer.sequence for layer in layers])
    before_last = [layer.sequence for layer in layers[:-1]]
    rng = np.random.default_rng(5)
    for tokens in (5, 130):
        for count in (0, 1, tokens // 2, tokens):
            for span in ({}, dict(window=9)):
                step = last.step(tokens, seed=tokens, **span)
                x, tables = (
                    step["x"],
                    LayerStep.of(step["plan"], step["rows"], step["cos"], step["sin"]),
                )
                chosen = np.sort(rng.choice(tokens, count, replace=False))
                selection = last.selection(tokens, chosen, seed=tokens, **span)
                given = x.clone()
                before = last.pool.clone()
                whole = stack(x, tables, workspace, isa=isa)
                kept = LayerStack(before_last)(x, tables, workspace, isa=isa) if before_last else x
                expected_pool = last.pool.clone()
                last.pool.copy_(before)
                found = stack(x, tables, workspace, selection=selection, isa=isa)
                assert torch.equal(last.pool, expected_pool)
                assert torch.equal(x, given)
                expected = kept.clone()
                expected[chosen] = whole[chosen]
                assert torch.equal(found, expected)
                # A step of all tokens, with as many as were selected before: no address of the selection is left.
                if count:
                    other = last.step(count, seed=count)
                    assert torch.equal(
                        last.together(workspace, isa=isa, **other),
                        last.apart(isa=isa, **other)[0],
                    )


def test_the_parts_of_a_selection_are_timed_as_one_layer():
    layer, workspace = Layer(), Workspace()
    step, timed = layer.step(16), []
    workspace.on_times = timed.append
    tables = LayerStep.of(step["plan"], step["rows"], step["cos"], step["sin"])
    stack = LayerStack([layer.sequence])
    stack(step["x"], tables, workspace, selection=layer.selection(16, np.array([0, 15])))
    assert len(timed) == 1 and list(timed[0]) == PARTS
    assert all(seconds >= 0 for seconds in timed[0].values()) and timed[0]["attention"] > 0


def test_a_selection_of_another_cache_is_refused():
    layer, other, workspace = Layer(), Layer(num_blocks=80), Workspace()
    step = layer.step(16)
    tables = LayerStep.of(step["plan"], step["rows"], step["cos"], step["sin"])
    selection = other.selection(16, np.array([3]))
    before = layer.pool.clone()
    with pytest.raises(ValueError, match=r"^plan: made for 1 tokens of 6 heads"):
        layer.stack(step["x"], tables, workspace, selection=selection)
    assert torch.equal(layer.pool, before)


def test_tokens_that_pad_a_step_change_no_other():
    layer, workspace = Layer(), Workspace()
    step, short = layer.step(5), layer.step(4)
    pad = step["rows"].clone()
    pad[:8] = short["rows"]  # the last goes anywhere
    step |= dict(rows=pad, plan=short["plan"])
    rows = {name: step[name][:4].contiguous() for name in ("x", "cos", "sin")}
    alone = layer.together(workspace, **(short | rows))
    assert torch.equal(layer.together(workspace, **step)[:4], alone)


def test_a_sequence_of_calls_that_differ_in_size():
    """A call with one unit, then one with more units than threads: its results must be visible."""
    x, weight = normal(1, 64), pad_weight(normal(64, seed=1))
    normed, out = torch.empty(1, 64), torch.empty(1, 32)
    norm = NormCall.of(weight, 64, torch.float32, 1e-6)
    norm.x, norm.out, norm.rows = x.data_ptr(), normed.data_ptr(), 1
    norm.x_stride = 256
    act = GatedCall.of(32, torch.float32, False)
    act.x, act.out, act.rows = normed.data_ptr(), out.data_ptr(), 1
    CallSequence({"norm": norm, "act": act}).run(2)
    assert torch.equal(out, gated(rms_norm(x, weight, 1e-6)))


@pytest.mark.parametrize("isa", native_library.ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5, 130])
def test_a_norm_and_its_product_have_the_bits_of_both(rows, dtype, isa, threads):
    if isa not in isas():
        pytest.skip(f"this processor lacks {isa}")
    depth, columns = 96, 173
    norm = NormPart(pad_weight(1.0 + normal(depth, seed=1) / 4), 1e-5)
    weight = PackedWeight.pack([normal(columns, depth, dtype=dtype, seed=2)])
    bias = weight.pad_bias(normal(columns, seed=3))
    # Rows with gaps between them, as in a slice of hidden states.
    x = normal(rows, 2 * depth, dtype=dtype)[:, :depth]
    workspace = Workspace()
    head = NormedProduct(norm, ProductPart(weight, bias))
    found = head(x, workspace, isa=isa)
    expected = packed_linear(rms_norm(x, *norm, isa=isa), weight, bias=bias, isa=isa)
    assert found.dtype == dtype and torch.equal(found, expected)
    kept = found.clone()
    times = []
    workspace.on_times = times.append
    head(-x, workspace, isa=isa)
    assert torch.equal(found, kept)
    assert [sorted(seconds) for seconds in times] == [["lm_head", "norm"]] * (rows > 0)


def test_a_norm_and_its_product_refuse_what_does_not_fit():
    weight = PackedWeight.pack([normal(8, 96)])
    with pytest.raises(ValueError, match="weight: must come from pad_weight"):
        NormedProduct(NormPart(pad_weight(normal(32)), 1e-5), ProductPart(weight, None))
    head = NormedProduct(NormPart(pad_weight(normal(96)), 1e-5), ProductPart(weight, None))
    for x in (normal(2, 95), normal(96), normal(2, 96).bfloat16(), normal(96, 2).T):
        with pytest.raises(ValueError, match=r"x: must be \[rows, 96\] torch.float32 on the CPU"):
            head(x, Workspace())


def test_structures_have_the_size_that_c_gives_them():
    functions = native_library.load().functions
    assert ctypes.sizeof(cpu_call_sequence._Sequence) == functions.quire_sequence_bytes()
    assert ctypes.sizeof(cpu_decoder_layer.NativeLayer) == functions.quire_layer_bytes()
