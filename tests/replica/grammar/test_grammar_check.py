"""Grammars that would exhaust the machine: refused by name, in time, and at the cost of a child process alone."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.protos.errors import InvalidRequest, Overloaded, QuireError, Unavailable
from quire.protos.sampling_params import Grammar
from quire.replica.builtin_model import CHECKPOINT
from quire.replica.grammar import compiler as module
from quire.replica.grammar.compiler import GrammarCompiler
from quire.replica.grammar.grammar_check import Budget
from quire.replica.grammar.state import GrammarState
from tests.cpu_time import least_cpu_s

# Quire installs llguidance. A machine that only tests the GPU's path may lack it, and still collects this module.
check_process = pytest.importorskip(
    "quire.replica.grammar.check_process", exc_type=ModuleNotFoundError
)

VOCAB = 1024
EOS = (0, 2)
FIELD = "structured_outputs.json"


def patterns(count: int, first: int = 0) -> str:
    """The schema that took a replica to 8 GB: an intersection whose derivatives grow exponentially."""
    parts = [{"type": "string", "pattern": f".*a{first + i}.*"} for i in range(count)]
    return json.dumps({"allOf": parts})


INTERSECTION = " & ".join(f"/.*a{i}.*/" for i in range(24))
OPTIONAL = [
    {"anyOf": [{"properties": {f"k{i}": {"type": t}}} for t in ("string", "integer")]}
    for i in range(24)
]
DOUBLED = [f'd{i}: d{i + 1} | "[" d{i + 1} "]"' for i in range(1100)]
NESTED = "(" * 30_000 + '"a"' + ")" * 30_000

HOSTILE = {
    "24 patterns": ("json_schema", patterns(24)),
    "an intersection of terminals": ("lark", f"start: A\nA: {INTERSECTION}"),
    "an intersection behind a prefix": (
        "lark",
        f'start: A\nA: "x" B | /[a-w]*/\nB: {INTERSECTION}',
    ),
    "a schema in a grammar": ("lark", f"start: %json {patterns(24)}"),
    "a large divisor": ("json_schema", '{"type": "integer", "multipleOf": 999983}'),
    "1,500 properties": (
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(1500)}}),
    ),
    "a product of alternatives": ("json_schema", json.dumps({"allOf": OPTIONAL})),
    "rules that double": (
        "lark",
        "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60)) + '\na60: "x"',
    ),
    "a row of 2,200 items": ("lark", "\n".join(["start: d0", *DOUBLED, 'd1100: "c"'])),
    "30,000 parentheses": ("lark", f"start: {NESTED}"),
}
# Compiled lazily: a few states and masks cost little, and the limits of a step hold for the rest.
BOUNDED = {
    "nested repetition": ("regex", "(a{1,500}){1,500}"),
    "nested repetition of anything": ("regex", "(.{1,300}x){1,300}"),
    "a long string": ("json_schema", json.dumps({"type": "string", "maxLength": 10**7})),
    "a long array": ("json_schema", json.dumps({"type": "array", "minItems": 10**6})),
    "a large enum": ("json_schema", json.dumps({"enum": [f"v{i:05}" for i in range(6000)]})),
    "an exponential automaton": ("regex", "(a|b)*a(a|b){24}"),
    "a pattern that is an alternative of patterns": (
        "regex",
        "|".join(f".*w{i}.*" for i in range(200)),
    ),
}


@pytest.fixture(scope="module")
def compiler():
    compiler = GrammarCompiler(CHECKPOINT / "tokenizer.json", VOCAB, EOS)
    yield compiler
    compiler.close()


def ask(compiler, kind: str, text: str, tenant: str = "", field: str = FIELD) -> queue.Queue:
    told: queue.Queue = queue.Queue()
    compiler.submit(Grammar(kind, text, field), [], told.put, tenant)
    return told


def answer_of_another_tenant(compiler, number: int) -> float:
    """Seconds until a choice that is not known yet has its matcher."""
    began = time.monotonic()
    outcome = ask(compiler, "choice", json.dumps(["yes", "no", str(number)]), "victim").get(
        timeout=30
    )
    assert isinstance(outcome, GrammarState), outcome
    return time.monotonic() - began


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> set[int]:
    """All processes that descend from one."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(path.parent.name)] = int(fields[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def stop_children(pid: int) -> bool:
    """Stop all that run now, and say whether one is stopped: the child of an earlier check may be ending."""
    stopped = []
    for child in children(pid):
        with contextlib.suppress(OSError):  # it has ended
            os.kill(child, signal.SIGSTOP)
            stopped.append(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0])
    return "T" in stopped


def wait_for(condition, timeout_s: float = 30.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_by_name_and_others_are_answered(compiler, name):
    before = resident_bytes()
    told = ask(compiler, *HOSTILE[name], tenant="attacker")
    answer_of_another_tenant(compiler, len(name))
    outcome = told.get(timeout=30)
    assert isinstance(outcome, InvalidRequest), outcome
    assert outcome.field == FIELD
    assert outcome.message.startswith(f"the grammar is not valid or too complex; {FIELD}: ")

    def ask_again() -> None:
        again = ask(compiler, *HOSTILE[name], tenant="another attacker").get_nowait()
        assert again.message == outcome.message, "the verdict is remembered"

    assert least_cpu_s(ask_again, 0.1) < 0.1
    assert resident_bytes() - before < 30 << 20


@pytest.mark.parametrize("name", BOUNDED)
def test_a_large_language_costs_little(compiler, name):
    before = resident_bytes()
    state = ask(compiler, *BOUNDED[name]).get(timeout=30)
    assert isinstance(state, GrammarState), state
    assert state.mask().any()
    assert resident_bytes() - before < 30 << 20


def test_the_schema_of_the_fault_is_as_it_was():
    assert len(json.dumps(json.loads(patterns(24)), separators=(",", ":"))) < 1100


def test_a_storm_of_hostile_grammars_does_not_hold_up_another_tenant(compiler):
    before = resident_bytes()
    tellers = [ask(compiler, "json_schema", patterns(24, i), "attacker") for i in range(1, 9)]
    waited_s = [answer_of_another_tenant(compiler, 100 + i) for i in range(5)]
    assert max(waited_s) < 5
    for told in tellers:
        outcome = told.get(timeout=60)
        # The slow thread takes one after the other: the last ones may wait for too long.
        assert isinstance(outcome, InvalidRequest | Overloaded) and outcome.field == FIELD, outcome
    assert answer_of_another_tenant(compiler, 200) < 5
    assert resident_bytes() - before < 100 << 20


def test_who_waits_too_long_is_told_so(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.5)
    compiler = GrammarCompiler(CHECKPOINT / "tokenizer.json", VOCAB, EOS)
    tellers = [ask(compiler, "json_schema", patterns(24, i)) for i in range(4)]
    outcomes = [told.get(timeout=30) for told in tellers]
    compiler.close()
    late = [outcome for outcome in outcomes if isinstance(outcome, Overloaded)]
    assert late
    for outcome in late:
        assert outcome.message == (
            f"the grammar waited too long to be compiled; {FIELD}: at most 0.5 s, got more"
        )


def test_choices_of_a_request_are_checked_and_compiled_once(compiler, monkeypatch):
    checked, compiled = [], []
    checker = compiler._quick.checker
    real_check, real_compiled = checker.check, module.CompiledGrammar
    monkeypatch.setattr(checker, "check", lambda *a: checked.append(a) or real_check(*a))
    monkeypatch.setattr(
        module, "CompiledGrammar", lambda build: compiled.append(build) or real_compiled(build)
    )
    text = json.dumps(["one", "verdict"])
    states = [told.get(timeout=10) for told in [ask(compiler, "choice", text) for _ in range(16)]]
    assert all(isinstance(state, GrammarState) for state in states)
    assert len(checked) == len(compiled) == 1
    ask(compiler, "choice", text, "another tenant").get(timeout=10)
    assert (len(checked), len(compiled)) == (1, 2), "tenants share no lexer"


def test_what_is_remembered_is_bounded(compiler, monkeypatch):
    monkeypatch.setattr(module, "MAX_REFUSALS", 3)
    for i in range(8):
        assert isinstance(ask(compiler, "regex", f"b{i}").get(timeout=10), GrammarState)
    assert len(compiler._refusals) == 3
    assert len(compiler._recent) == len(compiler._compiled) == module.MAX_RECENT


def test_no_process_is_left_after_close_even_while_it_judges(monkeypatch):
    patient = Budget(cpu_s=30, wall_s=60, nice=0)  # it still judges when a busy machine looks
    monkeypatch.setattr(module, "QUICK", patient)
    compiler = GrammarCompiler(CHECKPOINT / "tokenizer.json", VOCAB, EOS)
    ask(compiler, "choice", '["warm"]').get(timeout=30)
    checker = compiler._quick.checker.pid
    numbers = itertools.count(50, 50)
    told = ask(compiler, "json_schema", patterns(24, next(numbers)))

    def judges() -> bool:
        nonlocal told
        if not told.empty():  # it has judged within the time that a busy machine needs for one look
            told = ask(compiler, "json_schema", patterns(24, next(numbers)))
        return stop_children(checker)

    wait_for(judges)
    family = children(checker) | {checker}
    compiler.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in family), "not even a zombie"
    assert compiler._quick.checker.pid is None


def test_a_judge_that_was_killed_is_replaced(compiler):
    ask(compiler, "choice", '["before"]').get(timeout=30)
    pid = compiler._quick.checker.pid
    os.kill(pid, signal.SIGKILL)
    assert isinstance(ask(compiler, "choice", '["after"]').get(timeout=30), GrammarState)
    assert compiler._quick.checker.pid not in (None, pid)


PARENT = """
import json, sys, threading, time
from quire.replica.builtin_model import CHECKPOINT
from quire.replica.grammar.grammar_check import Budget, GrammarChecker
patient = Budget(cpu_s=30, wall_s=60, nice=0)
checker = GrammarChecker(CHECKPOINT / "tokenizer.json", 1024, (0, 2), "any", patient)
checker.check("choice", '["a"]')
modules = sorted({line.split("/")[-1] for line in open(f"/proc/{checker.pid}/maps") if "/" in line})
def judge():
    while True:
        checker.check("json_schema", sys.argv[1])
threading.Thread(target=judge, daemon=True).start()
print(json.dumps({"pid": checker.pid, "maps": "".join(modules)}), flush=True)
time.sleep(60)
"""


def test_the_judge_dies_with_its_parent_and_loads_neither_torch_nor_ray():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, patterns(24, 70)], stdout=subprocess.PIPE, text=True
    ) as parent:
        told = json.loads(parent.stdout.readline())
        assert "torch" not in told["maps"] and "_raylet" not in told["maps"]
        wait_for(lambda: stop_children(told["pid"]))  # it judges, and no limit of its own ends it
        family = children(told["pid"]) | {told["pid"]}
        parent.kill()
    wait_for(lambda: not any(runs(pid) for pid in family), 3)


def test_the_address_space_is_measured_without_proc():
    code = (
        "from quire.replica.grammar.check_process import address_space_bytes as measure\n"
        "import resource; print(measure(), open('/proc/self/statm').read().split()[0],"
        "resource.getrlimit(resource.RLIMIT_AS)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    measured, pages, limit = map(int, done.stdout.split())
    assert abs(measured - pages * os.sysconf("SC_PAGE_SIZE")) < 3 << 20
    assert limit == -1, "the limit is as it was"


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (signal.SIGPROF, "slow"),
        (signal.SIGABRT, "large"),
        (signal.SIGSEGV, "crash"),
        (256, "crash"),
    ],
)
def test_the_end_of_a_child_says_why(status, outcome):
    assert check_process._outcome_of(int(status))["outcome"] == outcome


def test_an_engine_that_is_closed_judges_nothing():
    compiler = GrammarCompiler(CHECKPOINT / "tokenizer.json", VOCAB, EOS)
    checker = compiler._quick.checker
    compiler.close()
    with pytest.raises(QuireError, match="closed"):
        checker.check("choice", '["a"]')


def test_an_answer_that_the_engine_cannot_take_does_not_end_the_thread(compiler):
    def closed(outcome) -> None:
        raise Unavailable("the engine is closed")

    compiler.submit(Grammar("choice", '["lost"]', FIELD), [], closed)
    assert isinstance(ask(compiler, "choice", '["kept"]').get(timeout=10), GrammarState)
