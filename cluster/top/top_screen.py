"""Draws the state of a router for a terminal.

Names and ids come from clients and from another machine: `_clean` keeps control characters out of the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quire.protos import control_pb2 as control

# State of blocks -> its colour, in the order of a bar.
_BLOCKS = (
    ("in use", "blue"),
    ("quarantined", "dark_orange"),
    ("cached", "cyan"),
    ("free", "grey50"),
)
# Colour, words and names of the terms of the cost.
_TERMS = (
    ("red", "wait", ("wait_s",)),
    ("blue", "prefill", ("prefill_s",)),
    ("cyan", "copy", ("host_copy_s", "pull_s", "handover_s", "adapter_s")),
    ("magenta", "delay of others", ("interference_s", "later_s", "decode_s")),
    ("yellow", "memory", ("eviction_s", "memory_s")),
)
_STATES = ("lost", "syncing", "draining", "attached")
_BAR_WIDTH, _COST_WIDTH = 24, 16
# Lines besides the rows of the tables: titles, numbers, heads of tables, spaces.
_FIXED_LINES = 11
_WIDE = 130
_FULL, _LIGHT = "█", "░"


class TopScreen:
    """Turns states into screens, and keeps the last ones for rates."""

    def __init__(self) -> None:
        self._past: list[control.WatchRouterResponse] = []

    def draw(
        self, state: control.WatchRouterResponse, height: int, width: int = _WIDE
    ) -> RenderableType:
        """Draw a state in at most `height` lines; some columns need `_WIDE` characters."""
        self._remember(state)
        num_rows = max(4, height - _FIXED_LINES - min(3, len(state.moves)))
        num_replicas = min(len(state.replicas), max(2, num_rows * 3 // 5))
        parts: list[RenderableType] = [_title(state), self._numbers(state), _legend(), Text()]
        parts += [_replicas(state.replicas, num_replicas, width >= _WIDE), Text()]
        parts += [_requests(state, max(2, num_rows - num_replicas - 1), width >= _WIDE)]
        parts += [_move(move) for move in state.moves[:3]]
        return Group(*parts)

    def _remember(self, state: control.WatchRouterResponse) -> None:
        last = self._past[-1] if self._past else state
        # With another set of routers, or after the restart of one, the sums are of something else.
        if last.routers != state.routers or last.num_decisions > state.num_decisions:
            self._past.clear()
        self._past = [s for s in self._past if state.now_s - s.now_s <= 5] + [state]

    def _rate(self, field: str) -> str:
        first, last = self._past[0], self._past[-1]
        elapsed_s = last.now_s - first.now_s
        if elapsed_s <= 0:
            return "–"
        return f"{(getattr(last, field) - getattr(first, field)) / elapsed_s:,.1f}"

    def _numbers(self, state: control.WatchRouterResponse) -> Text:
        loads = [replica.load for replica in state.replicas]
        devices = [load.cache.tiers[0] for load in loads if load.cache.tiers]
        in_use = sum(tier.blocks_in_use for tier in devices)
        total = sum(tier.blocks_total for tier in devices)
        prompt = sum(replica.prompt_tokens for replica in state.replicas)
        cached = sum(replica.cached_tokens for replica in state.replicas)
        ttft = "–"
        if state.HasField("ttft_median_ms"):
            ttft = f"{_ms(state.ttft_median_ms)}, 95% {_ms(state.ttft_p95_ms)}"
        queue = state.queue
        pairs = (
            ("requests", f"{self._rate('num_decisions')}/s"),
            ("tokens", f"{self._rate('num_deltas')}/s"),
            ("hits", _percent(cached, prompt)),
            ("first token", ttft),
            ("regret", _regret(state)),
            ("running", f"{sum(load.num_running for load in loads):,}"),
            ("waiting", f"{sum(load.num_waiting for load in loads):,}"),
            (
                "queue",
                f"{queue.num_requests:,}"
                + f" ({_ms(queue.expected_wait_ms)})" * bool(queue.num_requests),
            ),
            ("KV in use", _percent(in_use, total)),
        )
        text = Text(no_wrap=True, overflow="ellipsis")
        for name, value in pairs:
            text.append(f"{name} ", "dim").append(value, "bold").append("   ")
        return text


def _regret(state: control.WatchRouterResponse) -> str:
    """What each policy's decisions cost against hindsight, per request; mostly there is one policy."""
    texts = []
    for regret in state.regrets:
        text = _ms(regret.mean_ms)
        if regret.HasField("high_ms"):
            text = f"{_ms(regret.low_ms)} to {_ms(regret.high_ms)}"
        texts.append(text if len(state.regrets) == 1 else f"{_clean(regret.policy)} {text}")
    return ", ".join(texts) or "–"


def _title(state: control.WatchRouterResponse) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("Quire ", "bold").append(_clean(state.model)).append(
        f"   {_clean(state.router)}", "dim"
    )
    num = len(state.routers)
    if num < state.num_routers:
        missing = f", {num} of {state.num_routers} routers: requests of the others are missing"
        text.append(missing, "bold red")
    elif num > 1:
        text.append(f", {num} routers", "dim")
    return text.append(time.strftime("   %H:%M:%S", time.localtime(state.now_s)), "dim")


def _legend() -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for name, colour in _BLOCKS:
        text.append(_LIGHT if name == "free" else _FULL, colour).append(f" {name}  ", "dim")
    for colour, words, _ in _TERMS:
        text.append("■", colour).append(f" {words}  ", "dim")
    return text


def _replicas(replicas: Sequence[control.ReplicaState], most: int, is_wide: bool) -> Table:
    """The replicas that need attention first: by their state, then by their load."""
    rows = []
    ranked = sorted(
        replicas,
        key=lambda r: (
            _STATES.index(r.state) if r.state in _STATES else 0,
            -r.load.num_running - r.load.num_waiting,
            r.load.replica,
        ),
    )
    for replica in ranked[:most]:
        load, tiers = replica.load, {tier.tier: tier for tier in replica.load.cache.tiers}
        name = Text(_clean(load.replica), no_wrap=True)
        if replica.state != "attached":
            name.append(f" {_clean(replica.state)}", "bold red")
        rows.append(
            (
                name,
                f"{load.num_running:,}",
                f"{load.num_waiting:,}",
                f"{load.queued_prefill_tokens:,}",
                _ms(load.decode_step_ms) if load.decode_step_ms else "–",
                _percent(replica.cached_tokens, replica.prompt_tokens),
                _blocks(tiers.get(control.TIER_DEVICE)),
                _blocks(tiers.get(control.TIER_HOST)),
            )
        )
    heads = "Replica", ">running", ">waiting", "~>to prefill", ">step", ">hits", "device", "~host"
    table = _table(heads, rows, is_wide)
    if len(ranked) > most:
        table.caption = Text(f"{len(ranked) - most} more", "dim")
    return table


def _requests(state: control.WatchRouterResponse, most: int, is_wide: bool) -> Table:
    rows = []
    shown = state.requests[:most]
    longest = max((sum(v for v in r.best.terms_ms.values() if v > 0) for r in shown), default=0.0)
    for request in shown:
        best, second = request.best, request.runner_up
        cached = request.cached_tokens if request.HasField("ttft_ms") else best.cached_tokens
        name = Text(_clean(request.request_id)[: 24 if is_wide else 16], no_wrap=True)
        if request.attempt > 1:
            name.append(f" attempt {request.attempt}", "yellow")
        runner_up = "–"
        if request.HasField("runner_up"):
            runner_up = f"+{_ms(second.cost_ms - best.cost_ms)} {_clean(second.replica)}"
        rows.append(
            (
                time.strftime("%H:%M:%S", time.localtime(request.decided_s)),
                name,
                f"{request.prompt_tokens:,}",
                _percent(cached, request.prompt_tokens),
                Text(_clean(best.replica)),
                _ms(best.cost_ms),
                _cost(best, longest),
                Text(runner_up),
                _ms(request.ttft_ms) if request.HasField("ttft_ms") else "…",
            )
        )
    heads = ["Time", "Request", "~>prompt", "~>cached", "Replica", ">cost", "by terms"]
    return _table([*heads, "~runner-up", ">first token"], rows, is_wide)


def _move(move: control.RoutedRequest) -> Text:
    text = Text("migrated ", "yellow", no_wrap=True, overflow="ellipsis")
    text.append(time.strftime("%H:%M:%S ", time.localtime(move.decided_s)), "dim")
    text.append(_clean(move.request_id)[:32]).append(
        f"  {_clean(move.left_replica)} → {_clean(move.best.replica)}"
    )
    return text


def _table(heads: Sequence[str], rows: Sequence[Sequence[RenderableType]], is_wide: bool) -> Table:
    """Make a table. `~` at the start of a head: only if wide; `>`: aligned to the right."""
    kept = [i for i, head in enumerate(heads) if is_wide or not head.startswith("~")]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    table.caption_justify = "left"
    for head in (heads[i].removeprefix("~") for i in kept):
        if head.startswith(">"):
            table.add_column(head[1:], justify="right", no_wrap=True)
        else:
            table.add_column(head, no_wrap=True)
    for row in rows:
        table.add_row(*(row[i] for i in kept))
    return table


def _blocks(tier: control.TierOccupancy | None) -> Text:
    """A bar of a tier's blocks by state; every state with blocks has a cell."""
    if tier is None or not tier.blocks_total:
        return Text("–", "dim")
    known = tier.blocks_in_use + tier.blocks_cached + tier.blocks_free
    held = max(0, tier.blocks_total - known)
    counts = (tier.blocks_in_use, held, tier.blocks_cached, tier.blocks_free)
    bar = Text()
    left = _BAR_WIDTH
    for i, ((_, colour), count) in enumerate(zip(_BLOCKS, counts, strict=True)):
        reserved = sum(1 for later in counts[i + 1 :] if later)
        exact = round(count * _BAR_WIDTH / tier.blocks_total)
        cells = min(max(1, exact), left - reserved) if count else 0
        if not reserved and count:
            cells = left
        bar.append((_LIGHT if colour == "grey50" else _FULL) * cells, colour)
        left -= cells
    return bar


def _cost(cost: control.ReplicaCost, longest_ms: float) -> Text:
    """A bar of the terms above 0."""
    bar = Text()
    for colour, _, names in _TERMS:
        ms = sum(max(0.0, cost.terms_ms[name]) for name in names if name in cost.terms_ms)
        bar.append("■" * round(ms * _COST_WIDTH / longest_ms if longest_ms else 0), colour)
    return bar


def _ms(ms: float) -> str:
    if abs(ms) >= 1000:
        return f"{ms / 1000:.2f} s"
    return f"{ms:.0f} ms" if abs(ms) >= 10 else f"{ms:.1f} ms"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "–"


def _clean(text: str) -> str:
    """Return the text without characters that a terminal would obey, in bounded length."""
    return "".join(c if c.isprintable() else "?" for c in text[:128])
