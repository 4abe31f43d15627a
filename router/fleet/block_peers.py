"""Which replicas can get KV blocks from replicas of other nodes, and how long that takes."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quire.protos.wire import BlockSource, Completion, Hello, PullHint
from quire.router.fleet.popular_prefixes import PopularPrefixes
from quire.router.policy.cost_terms import PULL_OVERHEAD_S
from quire.router.policy.fleet_view import FleetView, PeerPrefixes, prefill_work
from quire.router.policy.policy import Ranking

# Before any pull: what two busy cores copy over the loopback, with the weight of this many bytes.
_PRIOR_BYTES_PER_S = 0.25e9
_PRIOR_BYTES = 16 << 20
# Measured pulls lose their weight with this time constant, so that a slow one is tried again.
_HORIZON_S = 60.0
_MAX_NODES = 4096
# A replica waits at least this long for a pull that its router has asked for.
_LEAST_WAIT_S = 0.05
# The same for a stream that leaves a replica that still runs: nearly all blocks are there already.
_LEAST_MOVE_WAIT_S = 1.0


class _Peer(NamedTuple):
    node: str
    source: BlockSource
    token_bytes: int


class BlockPeers:
    """The replicas that export blocks, by node, and the nodes' pools.

    Attributes
    ----------
    popular
        What recent requests have shared, for replicas that join.
    """

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}
        # Node of each replica whose engine is in the node's pool.
        self._pool_nodes: dict[str, str] = {}
        # Nodes of replicas, also of former ones: their streams go on elsewhere.
        self._node_of: OrderedDict[str, str] = OrderedDict()
        # Numbers of the nodes of these replicas, [n] int64; -1: it neither exports nor pulls.
        self._names: Sequence[str] | None = None
        self._nodes = np.empty(0, np.int64)
        self._bytes, self._seconds, self._last_s = 0.0, 0.0, 0.0
        self.popular = PopularPrefixes()

    @property
    def are_there(self) -> bool:
        """Whether any replica exports blocks."""
        return bool(self._peers)

    def add(self, replica: str, hello: Hello) -> None:
        """Take in a replica's facts."""
        self.remove(replica)
        if hello.kv_token_bytes:
            self._pool_nodes[replica] = hello.node
        if hello.exports.address:
            self._node_of[replica] = hello.node
            if len(self._node_of) > _MAX_NODES:
                self._node_of.popitem(last=False)
            self._peers[replica] = _Peer(hello.node, hello.exports, hello.kv_token_bytes)

    def remove(self, replica: str) -> None:
        """Forget a replica; an unknown one is ignored."""
        self._peers.pop(replica, None)
        self._pool_nodes.pop(replica, None)
        self._names = None

    def measured(self, completion: Completion, now_s: float) -> None:
        """Take in how long a request's pull took. One that brought nothing only counts its time."""
        if completion.pull_s <= 0:
            return
        self._decay(now_s)
        self._bytes += completion.pulled_bytes
        self._seconds += max(0.0, completion.pull_s - PULL_OVERHEAD_S)

    def s_per_token(self, now_s: float) -> float:
        """Seconds to copy a token's KV to another node."""
        self._decay(now_s)
        seconds = self._seconds + _PRIOR_BYTES / _PRIOR_BYTES_PER_S
        token_bytes = max((peer.token_bytes for peer in self._peers.values()), default=0)
        return token_bytes * seconds / (self._bytes + _PRIOR_BYTES)

    def share_pool(self, replica: str, other: str) -> bool:
        """Whether two replicas use the pool of the same node."""
        node = self._pool_nodes.get(replica)
        return node is not None and node == self._pool_nodes.get(other)

    def copy_s_per_token(self, replica: str, others: Sequence[str], now_s: float) -> float | None:
        """Seconds to copy a token's KV to the nearest of the others; 0: it is on the same node; None: to none."""
        if any(self.share_pool(replica, other) for other in others):
            return 0.0
        if replica in self._peers and any(other in self._peers for other in others):
            return self.s_per_token(now_s)
        return None

    def prefixes(self, names: Sequence[str], held: np.ndarray, now_s: float) -> PeerPrefixes | None:
        """What each replica could pull; None: nothing.

        Parameters
        ----------
        held
            [2, n] float64, prompt tokens that each replica has on its device, and further ones in host memory.
        """
        if len(self._peers) < 2 or not len(names):
            return None
        held = held[0] + held[1]
        nodes = self._node_numbers(names)
        longest = np.where(nodes >= 0, held, 0.0)
        # The longest prefix on any node, and the longest on the other nodes, for the replicas of the first.
        first = int(longest.argmax())
        others = np.where(nodes != nodes[first], longest, 0.0)
        second = int(others.argmax())
        is_first = nodes == nodes[first]
        rows = np.where(is_first, second, first)
        there = np.where(is_first, others[second], longest[first])
        tokens = np.where(nodes >= 0, np.maximum(there - held, 0.0), 0.0)
        return PeerPrefixes(tokens, rows, self.s_per_token(now_s)) if tokens.any() else None

    def hint(self, ranking: Ranking) -> PullHint | None:
        """Where the best replica of a ranking pulls from; None: it pulls nothing.

        It may wait as long as computing these tokens would take.
        """
        best, fleet, row = ranking[0], ranking.fleet, ranking.rows[0]
        peer = self._peers.get(best.pull_from)
        if peer is None:
            return None
        end = best.held_tokens
        start = end - best.pulled_tokens
        compute_s = self.compute_s(fleet, row, start, end)
        wait_s = max(compute_s, best.terms["pull_s"], _LEAST_WAIT_S)
        return PullHint(peer.source, start, end, wait_s)

    def handover(
        self, left: str, ranking: Ranking, num_tokens: int, now_s: float, *, is_alive: bool
    ) -> PullHint | None:
        """Where the best replica of a ranking pulls a stream's blocks from that another replica ran before.

        That one has blocks that it has not published yet. After its death any replica of its node will do, because they
        export the same pool. None: the best replica is on that node, so it finds the blocks itself; or copying takes
        longer than computing.

        Parameters
        ----------
        left
            The replica that ran it.
        is_alive
            Whether it drains; if not, it may be dead.
        num_tokens
            Tokens of the prompt and of the answer so far.
        """
        node, best, row = self._node_of.get(left), ranking[0], ranking.rows[0]
        target = self._peers.get(best.replica)
        if node is None or target is None or target.node == node:
            return None
        found = [name for name, peer in self._peers.items() if peer.node == node]
        if not found:
            return None
        source = self._peers[min(found, key=lambda name: (name == left) != is_alive)].source
        start = best.cached_tokens + best.host_tokens
        compute_s = self.compute_s(ranking.fleet, row, start, num_tokens)
        copy_s = PULL_OVERHEAD_S + (num_tokens - start) * self.s_per_token(now_s)
        if copy_s >= compute_s:
            return None
        # Without the blocks it would compute after all prompts that wait there.
        least_s = _LEAST_MOVE_WAIT_S if is_alive else _LEAST_WAIT_S
        wait_s = max(compute_s + best.terms.get("wait_s", 0.0), least_s)
        return PullHint(source, start, num_tokens, wait_s)

    def offer(self, fleet: FleetView, replica: str, wait_s: float) -> PullHint | None:
        """Where a replica pulls a prompt's prefix from before any request needs it; None: it would pull nothing."""
        if fleet.peers is None or replica not in fleet.replicas:
            return None
        row = fleet.replicas.index(replica)
        peer = self._peers.get(fleet.replicas[fleet.peers.rows[row]])
        if peer is None or not fleet.peers.tokens[row]:
            return None
        start = int(fleet.gpu_tokens[row] + fleet.host_tokens[row])
        return PullHint(peer.source, start, start + int(fleet.peers.tokens[row]), wait_s)

    @staticmethod
    def compute_s(fleet: FleetView, row: int, start: int, end: int) -> float:
        """Seconds that a replica needs to compute these tokens; 0: not known."""
        s_per_work = float(fleet.prefill_s_per_work[row]) or fleet.prior_s_per_work
        work = prefill_work(float(end - start), float(start), fleet.attention_context_tokens)
        return work * s_per_work

    def _node_numbers(self, names: Sequence[str]) -> np.ndarray:
        # The table makes a new list with each change.
        if names is not self._names:
            numbers: dict[str, int] = {}
            peers = [self._peers.get(name) for name in names]
            self._nodes = np.array(
                [-1 if p is None else numbers.setdefault(p.node, len(numbers)) for p in peers],
                np.int64,
            )
            self._names = names
        return self._nodes

    def _decay(self, now_s: float) -> None:
        keep = math.exp(min(0.0, self._last_s - now_s) / _HORIZON_S)
        self._bytes, self._seconds, self._last_s = keep * self._bytes, keep * self._seconds, now_s
