"""Scheduling policy of grpcio's polling thread, for processes that send messages to many streams at the same time.

grpc.aio has a thread that waits for events of its C core ("message sent", "bytes received") and passes them to the
event loop through a socket. With the default policy, each event lets this thread preempt the event loop, and the loop's
next message wakes the thread again: two thread switches for every message of every stream. With the policy SCHED_BATCH
a woken thread does not preempt: it waits until a core is idle or until its turn, and then passes on all events that
have arrived meanwhile. Its share of CPU time does not change.

The thread polls the connections only with `GRPC_EXPERIMENTS=-event_engine_listener` in the environment, which
`ray_settings` sets. By default grpcio polls in a pool of threads that pass every event from one to another. There are
many such events, because HAProxy sends a few bytes back for every message.

`tests/perf/README.md` has measurements of both settings, alone and together.
"""

from __future__ import annotations

import logging
import os
import threading

logger = logging.getLogger(__name__)

# Python names a thread after its function; grpcio's thread runs `PollerCompletionQueue._poll_wrapper`.
_POLLER_SUFFIX = "(_poll_wrapper)"


def batch_pollers() -> int:
    """Set SCHED_BATCH for the polling threads of this process. This needs no privileges.

    Returns
    -------
    Number of polling threads. 0 if the system lacks the policy or does not allow it: the threads then work as before,
    with more thread switches.
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
        logger.info("cannot set SCHED_BATCH for grpcio's polling thread: %s", error)
        return 0
    return len(pollers)
