"""Seconds until a request's adapter is on the device of each replica.

```
 adapter is     on the device        in host memory             in neither
 seconds        0                    load_s (+ slot)            read_s + load_s (+ slot)
```

`slot` is the wait for a slot, while running requests use all slots. Each replica reports the other two times. A replica
that has not measured one yet gets the median of the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from quire.protos.adapter_ref import AdapterRef, adapter_key
from quire.router.fleet.tracked_replica import TrackedReplica

# Used while no replica has measured a time. An adapter of rank 16 to an 8B model has about 100 MB: it is read and
# checked at 0.5 GB/s, and copied to the device at 10 GB/s.
_READ_S, _LOAD_S = 0.2, 0.01


def adapter_seconds(
    replicas: Sequence[TrackedReplica], adapter: AdapterRef, output_tokens: float, now_s: float
) -> np.ndarray:
    """Return the seconds until an adapter is on the device of each of n replicas, [n] float64.

    With all slots in use, one becomes free when the requests of an adapter end: in the mean after the time of an output
    of `output_tokens`, divided by the number of slots.
    """
    key = adapter_key(adapter.digest)
    typical_read_s = _typical((replica.adapters.read_s for replica in replicas), _READ_S)
    typical_load_s = _typical((replica.adapters.load_s for replica in replicas), _LOAD_S)
    seconds = np.zeros(len(replicas))
    for row, replica in enumerate(replicas):
        held = replica.adapters
        if held.has(key, now_s):
            continue
        seconds[row] = held.load_s or typical_load_s
        if key not in held.on_host:
            seconds[row] += held.read_s or typical_read_s
        if held.is_full:
            seconds[row] += output_tokens * replica.load.decode_step_s / held.num_slots
    return seconds


def _typical(measured_s: Iterable[float], default_s: float) -> float:
    """Return the median of the known times."""
    known = [seconds for seconds in measured_s if seconds > 0]
    return statistics.median(known) if known else default_s
