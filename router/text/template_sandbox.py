"""Jinja's sandbox with bounds on the work and the memory of each rendering.

A template is a program, and messages are its input: two nested loops over 4,000 messages are 16 million steps, and 30
lines that double a text make 4 GB. So each operation that can repeat or grow is counted before it happens:

| in the template | counted by |
|---|---|
| loops, macros, calls, filters | a step each; a loop also for each value that its `if` skips |
| `+ * % ** ~`, slices, `{% set %}...{% endset %}` | characters of the result |
| filters, methods | characters that they read, or can make if that is more |
| `[...]`, `(...)`, `{...}`, comparisons, output | the size of all values inside |

The syntax tree of a template is changed before it is compiled, because Jinja compiles slices, `~`, comparisons and
literals to plain Python without hooks.
"""

from __future__ import annotations

import functools
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.router.text.special_tokens import with_guards

# Most bits of an integer.
_MAX_BITS = 4096
_MAX_EXPONENT = 64
# Largest width of padding and indentation.
_MAX_WIDTH = 1000
_MAX_PATTERN_CHARS = 256
# Cost in steps. A step takes about 1 us, as long as an iteration of a loop.
_CALL_STEPS, _FILTER_STEPS = 4, 2
# Copying this many characters takes at most a step.
_CHARS_PER_STEP = 256
# An item of a list takes as much memory as this many characters.
_ITEM_CHARS = 8
# A format with a width of four digits, or with a width from another argument.
_WIDE_PERCENT = re.compile(r"%(\([^()]{0,64}\))?[^a-zA-Z%()]*?(\d{4}|\*)")
_WIDE_FORMAT = re.compile(r"\{[^{}]*(\d{4}|\{)")

# Allowed methods of plain values. Others are refused: `int.to_bytes`, for example, makes any number of bytes.
_METHODS = {
    str: frozenset(
        "capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii"
        " isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip"
        " partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines"
        " startswith strip swapcase title upper zfill".split()
    ),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    int: frozenset(("bit_length",)),
    float: frozenset(("is_integer",)),
}
_PADDING = frozenset(("center", "expandtabs", "ljust", "rjust", "zfill"))
# Chat templates do not need these filters, and each can make long output, or take long, for a short input.
_REFUSED_FILTERS = (
    "filesizeformat",
    "groupby",
    "pprint",
    "random",
    "slice",
    "striptags",
    "sum",
    "urlize",
    "wordwrap",
    "xmlattr",
)
_CHEAP_FILTERS = frozenset(("count", "d", "default", "first", "items", "last", "length"))
# These filters read the items of a list, not the contents of the items.
_SHALLOW_FILTERS = frozenset(
    ("batch", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr")
)
_SEQUENCES: tuple[Any, ...] = (list, tuple, type({}.keys()), type({}.values()), type({}.items()))
_COMPARING_TESTS = tuple(
    "!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lt ne".split()
)


class OutOfWork(SecurityError):
    """The rendering has used all of its steps or characters."""


class Work:
    """The remaining work of one rendering.

    Parameters
    ----------
    max_steps
        A step is an iteration, or `_CHARS_PER_STEP` characters that are read or made. Calls and filters cost several.
    max_chars
        Characters of all texts that the template makes, intermediate ones included.
    """

    def __init__(self, max_steps: int, max_chars: int):
        self._max_steps, self._max_chars = max_steps, max_chars
        self._steps, self._chars = max_steps, max_chars

    def step(self, num_steps: int = 1) -> None:
        self._steps -= num_steps
        if self._steps < 0:
            raise OutOfWork(f"it takes more than {self._max_steps} steps")

    def read(self, num_chars: int) -> None:
        self.step(1 + num_chars // _CHARS_PER_STEP)

    def make(self, num_chars: int) -> None:
        self._chars -= num_chars
        if self._chars < 0:
            raise OutOfWork(f"its texts are longer than {self._max_chars} characters together")
        self.step(num_chars // _CHARS_PER_STEP)

    def size(self, value: Any) -> int:
        """Estimate the characters of a value as text, with all values inside. It costs a step for each item."""
        total = 0
        pending: list[Any] = [value]
        while pending:
            item = pending.pop()
            if isinstance(item, str):
                total += len(item)
                continue
            total += _ITEM_CHARS
            if isinstance(item, _SEQUENCES):
                self.step(len(item))
                pending += item
            elif isinstance(item, dict):
                self.step(len(item))
                pending += item
                pending += item.values()
            elif isinstance(item, range):
                total += len(item) * _ITEM_CHARS
        return total


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. `compile_bounded` compiles a template; render it within the context `spending`.

    Parameters
    ----------
    max_text
        Longest text or list that the template may make.
    filters
        Further filters; they replace Jinja's filters of the same name.
    """

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, max_text: int, filters: Mapping[str, Callable[..., Any]], **options: Any):
        super().__init__(finalize=self._printed, **options)
        self.max_text = max_text
        self._spending = threading.local()  # Each rendering runs in one thread.
        self.concat = self._concat  # type: ignore[method-assign, assignment]
        refused = {name: _refused(name) for name in _REFUSED_FILTERS}
        for name, function in {**self.filters, **filters, **refused}.items():
            self.filters[name] = self._guarded(name, function)
        tests: dict[str, Any] = self.tests
        for name in _COMPARING_TESTS:
            tests[name] = self._guarded("==", tests[name])
        self.filters.update(
            {
                _STEP: jinja2.pass_context(lambda context, value: self._step(value)),
                _SIZED: self._sized,
                _JOINED: self._joined,
                _CUT: self._cut,
            }
        )
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)

    def compile_bounded(self, source: str, work: Work) -> tuple[nodes.Template, jinja2.Template]:
        """Return the syntax tree of a template as it was written, and the compiled template.

        Raises
        ------
        jinja2.TemplateError
            `source` is not a valid template.
        """
        written = self.parse(source)
        # Jinja evaluates constant expressions when it compiles.
        with self.spending(work):
            code = self.compile(_counted(self.parse(source), self))
        return written, self.template_class.from_code(self, code, self.make_globals(None))

    @contextmanager
    def spending(self, work: Work) -> Iterator[None]:
        """Count the work of renderings in this thread within the context."""
        self._spending.work = work
        try:
            yield
        finally:
            del self._spending.work

    @property
    def work(self) -> Work:
        work: Work = self._spending.work
        return work

    # -- what the tree calls -----------------------------------------------------------------------

    def _step(self, value: Any) -> Any:
        self.work.step()
        return value

    def _sized(self, value: Any) -> Any:
        if isinstance(value, str):
            if len(value) >= _CHARS_PER_STEP:
                self.work.read(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self._check_text(self.work.size(value))
            return with_guards(value)
        return value

    def _joined(self, values: list[Any]) -> str:
        self._make(sum(map(self.work.size, values)))
        return str_join(values)

    def _cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        part = value[start:stop:step]  # Never longer than the value.
        self._make(_length(part))
        return part

    def _concat(self, pieces: Sequence[str]) -> str:
        pieces = list(pieces)
        self._make(sum(map(len, pieces)))
        return "".join(pieces)

    def _printed(self, value: Any) -> Any:
        if isinstance(value, str) or value is None or isinstance(value, (bool, float)):
            return value
        if isinstance(value, jinja2.utils.Namespace):
            raise SecurityError("a namespace is no text")
        if not isinstance(value, (int, jinja2.Undefined)):
            self._make(self.work.size(value))
        return value

    # -- Jinja's own hooks -------------------------------------------------------------------------

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.work.step()
        if isinstance(left, str) and operator == "%":
            self._check_format(left, right, _WIDE_PERCENT, left.count("%"))
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                    self._make(_length(sequence) * max(0, count), "a product")
        elif operator == "**":
            if abs(right) > _MAX_EXPONENT:
                raise SecurityError(f"a power with an exponent beyond {_MAX_EXPONENT}")
            if isinstance(left, int):
                _check_bits(left.bit_length() * abs(right))
        elif operator == "+":
            self._make(_length(left) + _length(right))
        result = super().call_binop(context, operator, left, right)
        if type(result) is int:
            _check_bits(result.bit_length())
        return result

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self, function = __self, __obj
        self.work.step(_CALL_STEPS)
        function_of = getattr(function, "__wrapped__", function)  # The sandbox wraps `format`.
        owner = getattr(function_of, "__self__", None)
        for kind, names in _METHODS.items():
            if isinstance(owner, kind):
                name = function_of.__name__
                if name not in names:
                    raise SecurityError(f"{kind.__name__}.{name} is not offered")
                args = self._bounded_arguments(name, owner, args, kwargs)
                break
        if isinstance(owner, LoopContext):  # `changed` compares its arguments.
            self._sized(args)
        result = super().call(__context, function, *args, **kwargs)
        if isinstance(result, (str, list)) and owner is not None:
            self._make(_length(result))
        elif isinstance(result, (tuple, dict)):
            self._sized(result)
        return with_guards(result)

    def _bounded_arguments(
        self, name: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Return the arguments for a method of a plain value; raise `SecurityError` if the result would be too long."""
        work = self.work
        work.read(_length(owner))
        if not isinstance(owner, str):
            for value in args:
                self._sized(value)
        elif name in _PADDING:
            _check_widths((*args, *kwargs.values()))
            if name == "expandtabs":
                self._check_text(len(owner) + owner.count("\t") * (args[0] if args else 8))
        elif name == "replace":
            self._check_replaced(owner, *args[:2])
        elif name == "join" and args:
            args = (self._list(args[0]), *args[1:])
            self._check_text(len(owner) * len(args[0]) + work.size(args[0]))
        elif name in ("format", "format_map"):
            values = [*args, *kwargs.values()]
            self._check_format(owner.replace("{{", ""), values, _WIDE_FORMAT, owner.count("{"))
        return args

    # -- filters -----------------------------------------------------------------------------------

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter or test that counts its work before it runs."""
        # Number of arguments that Jinja adds, such as the context.
        num_jinjas = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            jinjas, args = args[:num_jinjas], args[num_jinjas:]
            args = self._bounded_filter(name, args, kwargs)
            result = function(*jinjas, *args, **kwargs)
            if isinstance(result, (str, list)):
                self._make(_length(result))
            return with_guards(result)

        return counted

    def _bounded_filter(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        work = self.work
        work.step(_FILTER_STEPS)
        if not args:
            return args
        value, *options = args
        if name in _CHEAP_FILTERS:
            return args
        if name in _SHALLOW_FILTERS:
            work.step(_length(value) // (_ITEM_CHARS * _ITEM_CHARS))
            if name == "batch":
                _check_widths((*options, *kwargs.values()))
            return args
        if name in ("sort", "unique", "max", "min", "join", "dictsort"):
            value = self._list(value) if name != "dictsort" else value
        size = sum(map(work.size, (value, *options, *kwargs.values())))
        self._check_text(size)
        work.read(size)
        options_and = (*options, *kwargs.values())
        if name in ("center", "indent", "tojson", "round", "truncate"):
            if name != "truncate":
                _check_widths(options_and)
            widths = [len(o) if isinstance(o, str) else o for o in options_and]
            width = max((w for w in widths if isinstance(w, int)), default=0)
            # Each line is indented once by `indent`, each item by `tojson` once for each level of its depth.
            if name in ("indent", "tojson"):
                lines = value.count("\n") + 1 if isinstance(value, str) else size // _ITEM_CHARS
                self._check_text(size + lines * width * (1 if name == "indent" else _depth(value)))
        elif name == "join":
            separator = options[0] if options else kwargs.get("d", "")
            self._check_text(size + work.size(separator) * len(value))
        elif name == "replace":
            old, new = (*options, kwargs.get("old", ""), kwargs.get("new", ""))[:2]
            self._check_replaced(str(value), old, kwargs.get("new", new))
        elif name == "format":
            self._check_format(str(value), options_and, _WIDE_PERCENT, str(value).count("%"))
        return (value, *options)

    def _list(self, values: Any) -> Any:
        """Return the values of an iterator as a list of bounded length; other values unchanged."""
        if isinstance(values, (str, list, tuple, dict)) or not hasattr(values, "__iter__"):
            return values
        listed = list(itertools.islice(values, self.max_text // _ITEM_CHARS))
        self._make(_length(listed))
        return listed

    # -- bounds ------------------------------------------------------------------------------------

    def _make(self, num_chars: int, noun: str = "a text") -> None:
        self._check_text(num_chars, noun)
        self.work.make(num_chars)

    def _check_text(self, num_chars: int, noun: str = "a text") -> None:
        if num_chars > self.max_text:
            raise SecurityError(f"{noun} longer than {self.max_text}")

    def _check_replaced(self, text: str, old: Any = "", new: Any = "") -> None:
        num_places = text.count(old) if isinstance(old, str) else len(text)
        self._check_text(len(text) + num_places * self.work.size(new))

    def _check_format(self, text: str, values: Any, wide: re.Pattern[str], num_fields: int) -> None:
        if len(text) > _CHARS_PER_STEP * _MAX_PATTERN_CHARS or wide.search(text):
            raise SecurityError(f"a format with a width beyond {_MAX_WIDTH - 1}, or a long one")
        self._make(len(text) + num_fields * self.work.size(values))


def check_pattern(pattern: str) -> str:
    """Check the pattern of `strftime_now`: long patterns can make long output."""
    if len(pattern) > _MAX_PATTERN_CHARS:
        raise SecurityError(f"a pattern longer than {_MAX_PATTERN_CHARS} characters")
    return pattern


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise SecurityError(f"the filter {name} is not offered")

    return refuse


def _length(value: Any) -> int:
    """Return the size of a value in characters, without the contents of its items."""
    if isinstance(value, str):
        return len(value)
    return len(value) * _ITEM_CHARS if isinstance(value, (list, tuple, dict)) else 0


def _depth(value: Any) -> int:
    """Return how deep lists and objects nest; counted level by level, without recursion."""
    depth, level = 0, [value]
    while level:
        containers = [item for item in level if isinstance(item, (list, tuple, dict))]
        parts = (item.values() if isinstance(item, dict) else item for item in containers)
        level = [item for part in parts for item in part]
        depth += 1
    return depth


def _check_widths(options: Sequence[Any]) -> None:
    for option in options:
        width = len(option) if isinstance(option, str) else option
        if isinstance(width, int) and abs(width) > _MAX_WIDTH:
            raise SecurityError(f"a width beyond {_MAX_WIDTH}")


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_BITS:
        raise SecurityError(f"an integer of more than {_MAX_BITS} bits")


# --------------------------------------------------------------------------------------------------
# The tree
# --------------------------------------------------------------------------------------------------

# Names of the filters in the changed tree. With a space in its name, a template cannot use them.
_STEP, _SIZED, _JOINED, _CUT = " step", " sized", " joined", " cut"


def _counted(template: nodes.Template, environment: jinja2.Environment) -> nodes.Template:
    """Wrap everything that Jinja compiles to plain Python in counting filters; return the changed tree."""
    for loop in template.find_all(nodes.For):
        step = _filter(nodes.Const(True), _STEP)
        loop.body.insert(0, nodes.ExprStmt(step))
        if loop.test is not None:
            loop.test = nodes.And(_filter(nodes.Const(True), _STEP), loop.test)
    _rewrite(template)
    template.set_environment(environment)
    template.set_lineno(1)
    return template


def _rewrite(node: nodes.Node) -> nodes.Node:
    """Rewrite the children of a node, then the node; return the new node."""
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, name, _rewrite(value))
        elif isinstance(value, list):
            setattr(node, name, [_rewrite(v) if isinstance(v, nodes.Node) else v for v in value])
    if isinstance(node, nodes.Compare):
        node.expr = _filter(node.expr, _SIZED)
        for operand in node.ops:
            operand.expr = _filter(operand.expr, _SIZED)
    elif isinstance(node, nodes.Concat):
        return _filter(nodes.List(node.nodes), _JOINED)
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        bounds = [
            part or nodes.Const(None) for part in (node.arg.start, node.arg.stop, node.arg.step)
        ]
        return _filter(node.node, _CUT, bounds)
    elif isinstance(node, (nodes.List, nodes.Dict)) or (
        isinstance(node, nodes.Tuple) and node.ctx == "load"
    ):
        return _filter(node, _SIZED)
    return node


def _filter(node: nodes.Expr, name: str, args: Sequence[nodes.Expr] = ()) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None)
