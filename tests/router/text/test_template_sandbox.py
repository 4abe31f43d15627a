"""Hostile chat templates, and hostile conversations for ordinary ones: bounded in time and memory."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest

from quire.protos.errors import InvalidRequest
from quire.router.text.chat_template import ChatTemplate
from tests.cpu_time import least_cpu_s

MAX_CPU_S = 4.0  # on a slow core under load; without bounds each takes minutes or gigabytes
MAX_BYTES = 100 << 20

# What grows in one operation: refused however little it would take.
AMPLIFIERS = [
    "{{ 'x' * 10**9 }}",
    "{{ ([1] * 10**9)|length }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%s'|format('x' * 10**9) }}",
    "{{ '%.1000000000f'|format(1.5) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**9) }}",
    "{{ '{x:>1000000000}'.format_map({'x': 1}) }}",
    "{{ 'x'.center(10**9) }}",
    "{{ 'x'.ljust(10**9) }}",
    "{{ 'x'.rjust(10**9) }}",
    "{{ 'x'.zfill(10**9) }}",
    "{{ '\t'.expandtabs(10**9) }}",
    "{{ 'x'|center(10**9) }}",
    "{{ 'x\ny'|indent(10**9) }}",
    "{{ ('x\n' * 10**6)|indent(999) }}",
    "{{ 'x\ny'|indent('x' * 10**6) }}",
    "{{ [[[1]]]|tojson(indent=10**9) }}",
    "{{ ('x' * 10**6).replace('x', 'x' * 10**6) }}",
    "{{ ('x' * 10**6)|replace('x', 'x' * 10**6) }}",
    "{{ ('x' * 10**6)|replace(old='x', new='x' * 10**6) }}",
    "{{ ('x' * 10**6).replace('', 'x' * 10**6) }}",
    "{{ ('x' * 10**6).join('x' * 10**6) }}",
    "{{ range(9999)|list|join('x' * 10**6) }}",
    "{{ range(9999)|map('string')|join(d='x' * 10**6) }}",
    "{{ [1]|batch(10**9, 'x')|list }}",
    "{{ [1]|slice(10**9)|list }}",
    "{{ 'x'|wordwrap(1, wrapstring='x' * 10**6) }}",
    "{{ lipsum(n=10**7) }}",
    "{{ (1).to_bytes(10**9, 'big') }}",
    "{{ 'x'.encode().zfill(10**9) }}",
    "{{ 'x'.translate({120: 'x' * 10**6}) }}",
    "{{ strftime_now('%Y' * 10**6) }}",
    "{{ 1.5|round(10**9) }}",
    "{{ ((((2**64)**64)**64)**64) }}",
    "{{ [['x' * 10**6] * 10**6]|string|length }}",
    "{{ ['x' * 10**6] * 400000 }}",
    "{{ {'a': ['x' * 10**6] * 10000}|tojson|length }}",
    "{{ ('x' * 10**6 ~ ['x' * 10**6] * 9000)|length }}",
    "{{ '{0}{0}{0}{0}{0}'.format('x' * 10**6) }}",
    "{{ '%(a)s%(a)s%(a)s%(a)s%(a)s' % {'a': 'x' * 10**6} }}",
]
TWICE = {
    "sum": "{% set ns.x = ns.x + ns.x %}",
    "tilde": "{% set ns.x = ns.x ~ ns.x %}",
    "product": "{% set ns.x = ns.x * 2 %}",
    "block": "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}",
    "filter block": "{% set x %}{% filter upper %}{{ ns.x }}{{ ns.x }}{% endfilter %}{% endset %}{% set ns.x = x %}",
    "join": "{% set ns.x = [ns.x, ns.x]|join %}",
    "str.join": "{% set ns.x = ''.join([ns.x, ns.x]) %}",
    "replace": "{% set ns.x = ns.x.replace('x', 'xx') %}",
    "format": "{% set ns.x = '%s%s'|format(ns.x, ns.x) %}",
    "percent": "{% set ns.x = '%s%s' % (ns.x, ns.x) %}",
    "str.format": "{% set ns.x = '{}{}'.format(ns.x, ns.x) %}",
    "kept": "{% set ns.l = ns.l + [ns.y[1:] + 'x'] %}",
    "kept slices": "{% set ns.l = ns.l + [ns.y[1:]] %}",
    "kept slices of lists": "{% set ns.l = ns.l + [ns.z[1:]] %}",
    "lists": "{% set ns.n = [ns.n, ns.n] %}{% if loop.last %}{{ ns.n }}{% endif %}",
    "tuples": "{% set ns.n = (ns.n, ns.n) %}{% if loop.last %}{{ {ns.n: 1} }}{% endif %}",
    "objects": "{% set ns.n = {'a': ns.n, 'b': ns.n} %}{% if loop.last %}{{ ns.n|tojson }}{% endif %}",
    "dicts": "{% set ns.n = dict(a=ns.n, b=ns.n) %}{% if loop.last %}{{ ns.n.values() }}{% endif %}",
    "equal": "{% set ns.n, ns.l = [ns.n, ns.n], [ns.l, ns.l] %}{% if loop.last and ns.n == ns.l %}x{% endif %}",
    "namespaces": "{% set ns.n = namespace(a=ns.n, b=ns.n) %}{% if loop.last %}{{ ns.n }}{% endif %}",
    "square": "{% set ns.i = ns.i * ns.i %}",
}
DOUBLING = {
    name: "{% set ns = namespace(x='x', i=3, l=[], n=[], y='y' * 10**6, z=[1] * 10**5) %}"
    "{% for i in range(9999) %}" + step + "{% endfor %}"
    for name, step in TWICE.items()
}
ENDLESS = {
    "loops": "{% for i in range(10000) %}{% for j in range(3000) %}{% endfor %}{% endfor %}",
    "filtered": "{% for i in range(9999) %}{% for j in range(9999) if false %}{% endfor %}{% endfor %}",
    "filters": "{% for i in range(9999) %}{{ range(9999)|list|map('string')|list|last }}{% endfor %}",
    "in": "{% set l = range(9999)|list %}{% for i in range(9999) %}{% if -1 in l %}x{% endif %}{% endfor %}",
    "is in": "{% set l = range(9999)|list %}{% for i in range(9999) %}{% if -1 is in l %}x{% endif %}{% endfor %}",
    "find": "{% set x = 'x' * 10**6 %}{% for i in range(9999) %}{{ x.count('y') }}{% endfor %}",
    "within": "{% set x = 'x' * 10**6 %}{% for i in range(9999) %}{% if 'y' in x %}x{% endif %}{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for i in [[[1]]] recursive %}{{ loop(range(9)) }}{{ loop(range(9)) }}{% endfor %}",
    "caller": "{% macro f() %}{% for i in range(9999) %}{{ caller() }}{% endfor %}{% endmacro %}"
    "{% call f() %}{% call f() %}{% call f() %}{% endcall %}{% endcall %}{% endcall %}",
    "sort": "{% for i in range(9999) %}{{ (range(9999)|sort(reverse=true))[0] }}{% endfor %}",
    "changed": "{% set l = range(9999)|list %}{% for i in range(9999) %}{{ loop.changed(l|list) }}{% endfor %}",
}
QUADRATIC = {
    "loops": "{% for m in messages %}{% for n in messages %}{{ n.role[:0] }}{% endfor %}{% endfor %}",
    "slices": "{% for m in messages %}{{ messages[loop.index0:]|length }}{% endfor %}",
    "filters": "{% for m in messages %}{{ messages|selectattr('role', 'eq', 'x')|list|length }}{% endfor %}",
    "texts": "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x + m.content %}{% endfor %}",
}
MANY = [{"role": "user", "content": "hello " * 20}] * 4096


def peak_bytes() -> int:
    """The most memory that this process had since the last reset."""
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def refused(source: str, messages=None) -> tuple[float, int]:
    """Processor seconds that a refused rendering takes, and memory."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, began = peak_bytes(), time.thread_time()
    with pytest.raises((InvalidRequest, ValueError)):
        ChatTemplate(source).render(messages or [{"role": "user", "content": "hi"}])
    return time.thread_time() - began, peak_bytes() - before


@pytest.mark.parametrize("source", AMPLIFIERS)
def test_no_operation_makes_much_of_little(source: str) -> None:
    seconds, num_bytes = refused(source)
    assert seconds < 1 and num_bytes < MAX_BYTES / 4


@pytest.mark.parametrize(
    "source", [*DOUBLING.values(), *ENDLESS.values()], ids=[*DOUBLING, *ENDLESS]
)
def test_a_template_that_would_not_end_is_refused(source: str) -> None:
    seconds, num_bytes = refused(source)
    assert seconds < MAX_CPU_S and num_bytes < MAX_BYTES


@pytest.mark.parametrize("name", QUADRATIC)
def test_a_long_conversation_and_a_quadratic_template_are_refused(name: str) -> None:
    template = ChatTemplate(QUADRATIC[name])
    template.render(MANY[:16])
    seconds, num_bytes = refused(QUADRATIC[name], MANY)
    assert seconds < MAX_CPU_S and num_bytes < MAX_BYTES


def test_long_conversations_are_rendered() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' and loop.index0 < messages|length %}"
        "{{ '<|' + m.role + '|>' + m.content|trim + '\n' }}{% endif %}{% endfor %}"
    )
    assert len(ChatTemplate(source).render(MANY)) == 4096 * 128
    (long,) = [{"role": "user", "content": "x" * (3 << 20)}]
    assert len(ChatTemplate(source).render([long])) == (3 << 20) + 9


def test_slow_renderings_are_not_done_on_the_event_loop() -> None:
    """The caller is the event loop."""
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert template.render_quickly(MANY[:2]) == MANY[0]["content"] * 2
    for messages in (MANY, [{"role": "user", "content": "x" * 100_000}]):
        assert template.render_quickly(messages) is None
    slow = ChatTemplate("{% for i in range(9999) %}{% endfor %}x")
    assert slow.render_quickly(MANY[:1]) is None
    assert least_cpu_s(lambda: slow.render_quickly(MANY[:1]), 0.05) < 0.05
    assert slow.render(MANY[:1]) == "x"


def test_threads_count_apart() -> None:
    template = ChatTemplate("{% for i in range(9000) %}{% endfor %}x", max_steps=10_000)
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda: results.append(template.render(MANY[:1]))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["x"] * 8


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none ~ [1, 'x'] }}", "a1None[1, 'x']"),
        ("{{ 'abcdef'[1:4] }}{{ 'abc'[::-1] }}{{ [1, 2, 3][-2:] }}", "bcdcba[2, 3]"),
        ("{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}", "x1"),
        ("{{ 1 < 2 < 3 and 'a' in 'abc' and 'user' not in ['x'] }}", "True"),
        ("{% for i in range(9) if i is even %}{{ loop.index }}/{{ loop.length }} {% endfor %}", "1/5 2/5 3/5 4/5 5/5 "),
        ("{{ '%s-%05.2f' % ('x', 1.5) }}{{ '%d'|format(3) }}", "x-01.503"),
        ("{{ '{{{}}}-{x:>3}'.format('a', x=1) }}", "{a}-  1"),
        ("{% set a, b = 1, [2] %}{{ a }}{{ b[0] }}{{ (1, 2) }}", "12(1, 2)"),
        ("{{ [3, 1, 2]|sort|join(', ') }}{{ 'a-b'.replace('-', '+')|upper }}", "1, 2, 3A+B"),
        ("{{ {'a': [{'b': none}]}|tojson(indent=2) }}", '{\n  "a": [\n    {\n      "b": null\n    }\n  ]\n}'),
        ("{{ 'a\nb'|indent(2) }}{{ 'x'.center(3) }}", "a\n  b x "),
        ("{% macro f(x) %}[{{ x }}{{ caller() }}]{% endmacro %}{% call f(1) %}c{% endcall %}", "[1c]"),
        ("{% for x in [1, [2, [3]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}", "123"),
        ("{{ missing }}{{ missing is defined }}{{ true }}{{ 2 ** 10 % 1000 }}{{ 1.5 }}", "FalseTrue241.5"),
    ],
)  # fmt: skip
def test_common_template_operations_are_unchanged(source: str, text: str) -> None:
    assert ChatTemplate(source).render([{"role": "user", "content": "hi"}]) == text
