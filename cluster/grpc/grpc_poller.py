"""When grpcio's own thread runs, in a process whose event loop sends a message to many streams at once.

grpc.aio has a thread that waits for what its C core reports, "this message is sent" or "these bytes have come", and
passes it on to the event loop through a socket. Whatever wakes that thread would let it take the processor from the
event loop, whose next message would wake it again: two changes of threads for every message of every stream. With the
policy SCHED_BATCH a thread that wakes waits until a core is idle or its turn comes, and passes on at once what has come
meanwhile. Its share of the processor stays the same.

Connections are polled in that thread only where the environment has `GRPC_EXPERIMENTS=-event_engine_listener`, as
`ray_settings` has it. By default grpcio has a pool of threads for it, which pass every event from one to another; and
HAProxy sends a few bytes back for every message.

What each of the two is worth, with and without the other, is measured in `tests/perf/README.md`.
"""

from __future__ import annotations

import logging
import os
import threading

logger = logging.getLogger(__name__)

# Python names a thread after the function that it runs; grpcio's is `PollerCompletionQueue._poll_wrapper`.
_POLLER_SUFFIX = "(_poll_wrapper)"


def batch_pollers() -> int:
    """Give the pollers of this process SCHED_BATCH; any user may do that.

    Returns
    -------
    How many there are now. 0 where the system has no such policy or forbids to set it: then only time is lost.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return 0
    pollers = [
        thread.native_id
        for thread in threading.enumerate()
        if thread.name.endswith(_POLLER_SUFFIX) and thread.native_id is not None
    ]
    try:
        for thread_id in pollers:
            if os.sched_getscheduler(thread_id) == os.SCHED_OTHER:
                os.sched_setscheduler(thread_id, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:
        logger.info("grpcio's thread keeps its scheduling policy: %s", error)
        return 0
    return len(pollers)
