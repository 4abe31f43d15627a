"""What the router does after a frame."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FrameAction:
    """The actions that the caller must take after a frame.

    Attributes
    ----------
    became_ready
        The replica takes requests from now on, because this is the first frame of its attach stream.
    resync_from
        Request the replica's event batches after this one (`event_replay.SNAPSHOT`: a snapshot); None: nothing.
    new_epoch
        The replica's engine was restarted: requests sent to the former engine get no answer.
    reason
        The difference between our replay and the replica's cache, for the log; empty if there is none.
    """

    became_ready: bool = False
    resync_from: int | None = None
    new_epoch: bool = False
    reason: str = ""
