"""Sampling by kernels: the tokens and log-probs of torch's sampler, and no host array that is not pinned.

The kernels run in Triton's interpreter, the rest on `FakeDevice`, or on the meta device where only copies count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import test_awaited_tokens
import torch
from device_harness import config_of, prompt
from fake_device import HOST, FakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_drafts import OracleDrafts
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Request
from quire.replica.core.step_plan import PromptTargets, SamplingBatch
from quire.replica.device.cpu_device import CpuDevice
from quire.replica.device.device import Stream
from quire.replica.device.staging import Staging
from quire.replica.runner.device_sampler import DeviceSampler
from quire.replica.runner.device_table import DeviceTable
from quire.replica.runner.gpu_kernels import GpuKernels
from quire.replica.runner.runner import Runner
from quire.replica.runner.step_inputs import DecodeInputs
from quire.replica.runner.step_outputs import StepOutputs
from quire.replica.sampling.logprobs import (
    SCORE_COLUMNS,
    log_distribution,
    score_by_kernels,
    score_prompt,
    score_tokens,
    token_logprobs,
)
from quire.replica.sampling.sampler import sample
from quire.replica.sampling.token_counts import TokenCounts
from tests.kernels.compile.interpreter import repair_interpreter
from tests.replica.sampling.test_sampler import ANY, ROW, VOCAB, columns

WORDS = -(-VOCAB // 32)


@pytest.fixture(scope="module", autouse=True)
def _interpreter():
    repair_interpreter()


class Mask:
    """A grammar that allows what `seed` says."""

    def __init__(self, seed: int):
        self.words = np.random.default_rng(seed).integers(-(1 << 31), 1 << 31, WORDS)

    def mask(self) -> np.ndarray:
        return self.words.astype(np.int32)


def filled(batch: SamplingBatch) -> Future | None:
    if not batch.grammars:
        return None
    masks: Future = Future()
    masks.set_result(np.stack([grammar.mask() for _, grammar in batch.grammars]))
    return masks


def queue(device, sampler: DeviceSampler, logits, batch: SamplingBatch, found: list) -> None:
    """Stage a draw and queue it."""
    scores = device.empty((len(logits), SCORE_COLUMNS), torch.float32)
    staged = sampler.stage(batch, filled(batch), has_limits=False)
    device.run(
        Stream.COMPUTE,
        lambda: found.append((sampler.sample(logits, staged, None, None, scores), scores)),
        name="draw",
    )
    sampler.queued()


def by_torch(logits, batch: SamplingBatch, counts: TokenCounts):
    """Tokens, and log-probs by index."""
    logits = logits.float().clone()
    scores = torch.full((len(logits), SCORE_COLUMNS), float("nan"))
    distribution = log_distribution(logits, batch)
    tokens = sample(logits, batch, counts)
    if distribution is not None:
        score_tokens(distribution, batch, tokens, scores)
    return tokens, token_logprobs(batch.logprobs, scores[: len(batch.logprobs)].numpy())


def assert_same(found, expected, batch: SamplingBatch) -> None:
    tokens, scores = found
    assert tokens.tolist() == expected[0].tolist()
    told = token_logprobs(batch.logprobs, scores[: len(batch.logprobs)].numpy())
    assert told.keys() == expected[1].keys()
    for i, own in told.items():
        if tokens[i] >= 0:  # a row without a token ends
            assert abs(own.logprob - expected[1][i].logprob) < 2e-5
        assert own.top_ids == expected[1][i].top_ids
        np.testing.assert_allclose(own.top_logprobs, expected[1][i].top_logprobs, atol=2e-5)


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(ROW | ANY, min_size=1, max_size=5), data=st.data())
def test_tokens_and_log_probs_are_those_of_torch(rows, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(len(rows), VOCAB, generator=generator) * 3
    logits = logits.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    some = st.lists(st.sampled_from(range(len(rows))), unique=True)
    banned = tuple((i, (i, 5, 40)) for i in data.draw(some))
    batch = columns(rows, banned)._replace(
        grammars=tuple((i, Mask(i)) for i in sorted(data.draw(some))),
        logprobs=tuple(
            (i, data.draw(st.sampled_from([0, 1, 20]))) for i in sorted(data.draw(some))
        ),
    )
    device, found = FakeDevice(1), []
    before = logits.clone()
    queue(device, DeviceSampler(device, VOCAB), logits, batch, found)
    device.synchronize()
    assert torch.equal(logits, before)
    assert_same(found[0], by_torch(logits, batch, TokenCounts(VOCAB)), batch)


def steps_of_two_rows(number: int) -> SamplingBatch:
    """Both have penalties from the first step on; what else they ask for changes in length from step to step."""
    rows = [dict(prompt=[1, 2, 3], output=[4], repetition=3.0, presence=4.0, frequency=2.0, seed=i)
            for i in range(2)]  # fmt: skip
    rows[0]["bias"] = {j: 2.0 for j in range(number, 3 * number + 1)}
    batch = columns(rows)._replace(logprobs=((number % 2, 3),))
    return batch._replace(
        penalties=batch.penalties if number == 0 else dataclasses.replace(batch.penalties, begun=())
    )


def run_steps(device, num_steps: int = 6) -> list:
    """Draws queued one behind the other, as a loop that runs ahead does."""
    logits = torch.linspace(-1, 1, VOCAB).repeat(2, 1)
    sampler, found = DeviceSampler(device, VOCAB), []
    for number in range(num_steps):
        queue(device, sampler, logits, steps_of_two_rows(number), found)
    device.synchronize()
    return found


def test_steps_that_are_queued_ahead_keep_their_own_arrays_and_counts():
    logits, counts = torch.linspace(-1, 1, VOCAB).repeat(2, 1), TokenCounts(VOCAB)
    batches = [steps_of_two_rows(number) for number in range(6)]
    expected = [by_torch(logits, batch, counts) for batch in batches]
    for seed in range(4):
        for found, right, batch in zip(run_steps(FakeDevice(seed)), expected, batches, strict=True):
            assert_same(found, right, batch)


def test_the_wait_for_the_staging_is_needed_and_its_lack_is_found():
    def differs(seed: int) -> bool:
        device = FakeDevice(seed, ignored_waits=[(HOST, "inputs copied")])
        try:
            return [tokens.tolist() for tokens, _ in run_steps(device)] != expected
        except (RuntimeError, IndexError):
            return True

    expected = [tokens.tolist() for tokens, _ in run_steps(FakeDevice(0))]
    assert any(differs(seed) for seed in range(10))


def test_staging_grows_to_what_is_asked_for():
    device = FakeDevice(0)
    staging = Staging(device)
    for size in (1, 100_000, 10, 400_000, 5):
        array, found = np.arange(size), []
        staged = staging.write([(array, np.int64), (array[:3] / 2, np.float32)])
        work = partial(lambda staged, found: found.extend(staged.copy()), staged, found)
        device.run(Stream.COMPUTE, work, name="work")
        staging.queued()
        device.synchronize()
        assert torch.equal(found[0], torch.arange(size))
        assert found[1].tolist() == [0.0, 0.5, 1.0][: len(array[:3])]


def draws_by_kernels(runner: Runner) -> None:
    """Attention stays the CPU's, since the interpreter takes its time; everything behind the logits is a GPU's."""
    runner.steps.table._sample = GpuKernels().sample
    runner.steps._sampler = DeviceSampler(runner._device, runner.config.vocab_size)


def everything() -> list[Request]:
    """Requests with penalties, bias, masks, a minimum of tokens and log-probs, and plain ones, for several steps."""
    kinds = (
        dict(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logprobs=3),
        dict(logit_bias=((5, 3.0), (9, -4.0)), min_tokens=4, stop_token_ids=tuple(range(3, 60))),
        dict(allowed_token_ids=tuple(range(3, 43)), bad_words=((7,), (5, 5)), temperature=0.0),
        dict(top_p=0.9, min_p=0.02),
        dict(temperature=0.0, logprobs=0),
    )
    return [
        Request(i, prompt(3 + 5 * i % 17, i), SamplingParams(**{
            **dict(max_tokens=5 + i % 4, seed=i, ignore_eos=True), **kinds[i % len(kinds)]
        }))
        for i in range(7)
    ]  # fmt: skip


def tokens_of(told) -> dict:
    return {key: (tokens, reason, error) for key, (tokens, _, reason, error) in told.items()}


@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize(
    "requests", [everything, test_awaited_tokens.crowd], ids=["mixed", "grammars"]
)
def test_what_is_served_is_what_torch_samples(harness, requests, has_drafts):
    model = harness("llama")
    config = config_of(model.spec)
    expected = model.serve(config, CpuDevice(), requests(), plans_ahead=False)
    source = None
    if has_drafts:
        outputs = {key: own[0] for key, own in expected.items()}
        source = OracleDrafts(outputs, model.spec.vocab_size, max_draft_tokens=3)
    told = model.serve(
        config,
        FakeDevice(3),
        requests(),
        plans_ahead=True,
        prepare=draws_by_kernels,
        draft_source=source,
    )
    assert tokens_of(told) == tokens_of(expected)
    assert source is None or source.num_accepted > 10
    for key, (_, scores, *_) in told.items():
        for own, right in zip(scores, expected[key][1], strict=True):
            assert abs(own[0] - right[0]) < 1e-4 and own[1] == right[1]
            np.testing.assert_allclose(own[2], right[2], atol=1e-4)


def test_every_variant_of_the_kernels_has_run_when_serving_begins(harness, monkeypatch):
    """A variant is built when it first runs: it differs by types, by arguments that are absent and by constants."""
    variants: set[tuple] = set()
    run = InterpretedFunction.run

    def noted(self, *args, grid, warmup, **kwargs):
        kinds = [arg.dtype if isinstance(arg, torch.Tensor) else type(arg) for arg in args]
        constants = sorted((name, value) for name, value in kwargs.items())
        variants.add((self.fn.__name__, *kinds, *constants))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    known: set[tuple] = set()

    def prepare(runner: Runner) -> None:
        draws_by_kernels(runner)
        runner.run_largest()
        known.update(variants)

    model = harness("llama")
    model.serve(
        config_of(model.spec), FakeDevice(0), everything(), plans_ahead=True, prepare=prepare
    )
    assert len(known) >= 10
    assert variants == known


# -- what travels ----------------------------------------------------------------------------------------------


class MetaDevice(CpuDevice):
    """A device without memory; knows what is pinned."""

    torch_device = torch.device("meta")
    is_immediate = False

    def __init__(self) -> None:
        super().__init__()
        self.pinned_ranges: list[tuple[int, int]] = []

    def empty(self, shape, dtype):
        return torch.empty(tuple(shape), dtype=dtype, device="meta")

    def pinned(self, shape, dtype):
        tensor = torch.empty(tuple(shape), dtype=dtype)
        self.pinned_ranges.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        return tensor

    def copy(self, stream, target, source, name):
        if target.is_meta:
            target.copy_(source, non_blocking=True)
        else:  # which this device cannot
            begin, end = target.data_ptr(), target.data_ptr() + target.nbytes
            assert any(low <= begin and end <= high for low, high in self.pinned_ranges)


class OnlyPinned(TorchDispatchMode):
    """Forbids what makes the host wait for a GPU: copies of memory that is not pinned, and values read from the
    device."""

    def __init__(self, device: MetaDevice):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise AssertionError(f"{func} waits for the device")
        result = func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        tensors = given + [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if any(x.is_meta for x in tensors):
            for x in tensors:
                if not x.is_meta and not (self._is_pinned(x) and self._is_copy(func, args, kwargs)):
                    raise AssertionError(f"{func} copies memory that is not pinned: {x.shape}")
        return result

    @staticmethod
    def _is_copy(func, args, kwargs) -> bool:
        return func is torch.ops.aten.copy_.default and (
            args[2] if len(args) > 2 else kwargs["non_blocking"]
        )

    def _is_pinned(self, x: torch.Tensor) -> bool:
        begin = x.data_ptr()
        return any(
            low <= begin and begin + x.nbytes <= high for low, high in self._device.pinned_ranges
        )


class NoValues(TorchFunctionMode):
    """Forbids `torch.tensor(..., device=)`: its copy is hidden from `OnlyPinned`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and result.is_meta:
            raise AssertionError(f"{func.__name__} copies memory that is not pinned")
        return result


@contextmanager
def without_waits(device: MetaDevice) -> Iterator[None]:
    with torch.inference_mode(), OnlyPinned(device), NoValues():
        yield


@pytest.mark.parametrize(
    "copy",
    [
        lambda: torch.tensor([1, 2], device="meta"),
        lambda: torch.from_numpy(np.arange(3)).to("meta"),
        lambda: torch.empty(3, device="meta").copy_(torch.zeros(3), non_blocking=True),
        lambda: torch.empty(3, device="meta")[torch.zeros(3, dtype=torch.bool, device="meta")],
        lambda: torch.empty(3, device="meta").sum().item(),
        lambda: torch.empty(3, device="meta").cpu(),
    ],
)
def test_what_would_wait_for_the_device_is_found(copy):
    with (
        pytest.raises((AssertionError, NotImplementedError, RuntimeError)),
        without_waits(MetaDevice()),
    ):
        copy()


def test_no_array_of_a_step_is_copied_from_memory_that_is_not_pinned(monkeypatch):
    monkeypatch.setattr(InterpretedFunction, "run", lambda self, *args, **kwargs: None)
    monkeypatch.setattr("quire.kernels.sampling.row_survey.device_arch", lambda device: "sm_90")
    monkeypatch.setattr(
        "quire.kernels.sampling.sampling_kernel.device_arch", lambda device: "sm_90"
    )
    monkeypatch.setattr("quire.kernels.sampling.log_probs.device_arch", lambda device: "sm_90")
    device = MetaDevice()
    histories = dict(prompt=[1, 2], output=[3], repetition=1.5, presence=1.0, frequency=1.0)
    rows = [dict(allow=[3, 4], bias={5: 1.0}), histories, dict(temperature=0.0), dict(top_p=0.5)]
    batch = columns(rows, ((0, (3,)), (2, (7,))))._replace(
        grammars=((2, Mask(1)),), logprobs=((1, 5), (3, 0))
    )
    with without_waits(device):
        table = DeviceTable(device, 1, 8, 4, 0, GpuKernels().sample)
        outputs = StepOutputs(device, 9)
        sampler = DeviceSampler(device, VOCAB)
        logits = device.empty((4, VOCAB), torch.bfloat16)
        places = device.empty((4,), torch.int64)
        for has_limits in (True, False):
            slot = outputs.take(4)
            slot.asked = batch.logprobs
            staged = sampler.stage(batch, filled(batch), has_limits=has_limits)
            limits = table.limits.index_select(0, places) if has_limits else None
            keys = places if has_limits else None
            tokens = sampler.sample(logits, staged, limits, keys, slot.scores)
            sampler.queued()
            outputs.keep(
                slot, tokens, DecodeInputs(places, *[places] * (len(DecodeInputs._fields) - 1))
            )
            outputs.send(slot, device.record(Stream.COMPUTE, "step done"))
        targets = PromptTargets(0, 1, 1, np.arange(5), 3)
        hidden, ids = device.empty((9, 16), torch.bfloat16), device.empty((5,), torch.int64)
        scores = score_prompt(
            hidden, targets, ids, lambda x: x.new_empty(len(x), VOCAB), score_by_kernels, 2
        )
    assert scores.top.shape == (5, 3) and scores.ranks.shape == (5,)
