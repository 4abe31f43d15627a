"""A replica that joins gets the prefixes that recent requests share, from replicas of other nodes.

```
 first frame of a replica ─▶ the most popular prefix ─▶ who holds it? ─▶ `Replica.pull` ─▶ the next one ... 10 s
```

The replica takes requests meanwhile. It reports the blocks as they come, so the policy begins to count on them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable

from quire.protos.errors import QuireError
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import PullHint, Submit
from quire.router.fleet.popular_prefixes import PopularPrefix
from quire.router.fleet.replicas import ReplicaTable

_MAX_S = 10.0


class Newcomers:
    """Sends prefixes to replicas that join.

    Parameters
    ----------
    router_id
        Of this router.
    table
        The replicas.
    next_stream_id
        Returns the number of a pull.
    pull
        Lets a replica pull what a `Submit` names.
    """

    def __init__(
        self,
        router_id: str,
        table: ReplicaTable,
        next_stream_id: Callable[[], int],
        pull: Callable[[Submit, str], Awaitable[object]],
    ):
        self._router_id = router_id
        self._table = table
        self._next_stream_id = next_stream_id
        self._pull = pull

    async def greet(self, replica: str) -> None:
        """Send a replica what it lacks of the popular prefixes, the most popular first."""
        end_s = time.monotonic() + _MAX_S
        for prefix in self._table.peers.popular.best(time.monotonic()):
            left_s = end_s - time.monotonic()
            hint = self._hint(prefix, replica, left_s) if left_s > 0 else None
            if hint is None:
                continue
            submit = Submit(
                self._router_id,
                self._next_stream_id(),
                "newcomer",
                # A block whose last token is the prompt's last one would not be pulled.
                prompt_ids=prefix.with_one_more(),
                params=SamplingParams(),
                tenant=prefix.tenant,
                adapter=prefix.adapter,
                pull=hint,
            )
            with contextlib.suppress(QuireError):
                await self._pull(submit, replica)

    def _hint(self, prefix: PopularPrefix, replica: str, wait_s: float) -> PullHint | None:
        """Where the replica pulls a prefix from; None: it has it, has left, or no other node has it."""
        table, num_tokens = self._table, len(prefix.token_ids)
        fleet = table.fleet(prefix.hashes, num_tokens + 1, time.monotonic(), weights=prefix.weights)
        return table.peers.offer(fleet, replica, wait_s)
