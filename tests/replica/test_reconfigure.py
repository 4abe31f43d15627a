"""An engine takes on other limits between two steps, and goes on with what it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.protos.errors import InvalidRequest
from quire.protos.sampling_params import SamplingParams
from quire.replica import Engine
from quire.replica.config import LIGHT_FIELDS, SizingError
from quire.replica.core.request import Request
from quire.replica.scheduler.scheduler import Scheduler

LIMITS = dict(device="cpu", num_blocks=64, block_size=16, max_model_len=256, num_threads=1)


@pytest.fixture(scope="module")
def engine(zoo: Callable[[str], Path]) -> Iterator[Engine]:
    with Engine(model=str(zoo("llama")), max_waiting_requests=4, **LIMITS) as engine:
        yield engine


def refusal(engine: Engine) -> str | None:
    """What the scheduler says to the third of three requests that come between two steps."""

    def add_three(scheduler: Scheduler) -> str | None:
        params = SamplingParams(max_tokens=1)
        deltas = [scheduler.add(Request(f"waits {i}", [1, 2, 3], params)) for i in range(3)]
        scheduler.abort_all()
        return None if deltas[-1] is None else deltas[-1].facts.error.message

    return engine.call(add_three).result(10)


def test_other_limits_hold_at_once_and_what_is_not_named_is_as_at_the_start(engine):
    assert refusal(engine) is None
    engine.reconfigure({"max_waiting_requests": 2, "step_timeout_s": 33.0, "safety_margin": 0.5})
    assert "the bound is 2" in refusal(engine)
    assert (engine.config.step_timeout_s, engine.config.resume_margin) == (33.0, 0.6)
    engine.reconfigure({"max_prefill_ms": None})
    assert refusal(engine) is None
    assert (engine.config.max_waiting_requests, engine.config.step_timeout_s) == (4, 10.0)
    assert engine.config.max_prefill_ms is None
    prompt = list(range(3, 40))
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    assert len(engine.generate([prompt], params)[0].token_ids) == 4


def test_what_needs_a_restart_or_is_out_of_bounds_changes_nothing(engine):
    before = engine.config
    with pytest.raises(InvalidRequest, match="block_size: only max_waiting_requests, "):
        engine.reconfigure({"block_size": 32, "max_waiting_requests": 9})
    with pytest.raises(SizingError, match="at least safety_margin"):
        engine.reconfigure({"safety_margin": 0.5, "resume_margin": 0.2})
    assert engine.config == before


def test_light_fields_are_fields_of_the_resolved_configuration(engine):
    resolved = {name: getattr(engine.config, name) for name in LIGHT_FIELDS}
    engine.reconfigure({})
    assert {name: getattr(engine.config, name) for name in LIGHT_FIELDS} == resolved | {
        "max_prefill_ms": 100.0
    }
