"""Where the time of steps goes: plain counters, added to by the engine's thread, read by anybody.

```
 host     plan ▸ launch │ wait ▸ commit ▸ sample ▸ send │ plan ...     the parts of `HostTime`
 device   [ step N .............. ]  gap  [ step N+1 ..] hold [draw]   `DeviceTime`
```
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class HostTime:
    """Seconds of the engine's thread since it started, by part of a step."""

    num_steps: int = 0  # launched
    plan_s: float = 0.0
    launch_s: float = (
        0.0  # staging and queueing; where work runs when it is queued, the step itself
    )
    sample_s: float = 0.0  # masks and draw of steps that awaited the tokens of the step before
    wait_s: float = 0.0  # asleep until a step's tokens are there
    commit_s: float = 0.0
    send_s: float = 0.0

    def per_step_ms(self) -> dict[str, float]:
        """Milliseconds a step of each part."""
        return {
            f"{name.removesuffix('_s')}_ms": 1e3 * seconds / max(self.num_steps, 1)
            for name, seconds in asdict(self).items()
            if name.endswith("_s")
        }


@dataclass(slots=True)
class DeviceTime:
    """Of steps on a device that queues its work, by its own events."""

    num_steps: int = 0  # collected
    busy_s: float = 0.0  # from a step's inputs being there to its end
    num_gaps: int = 0  # between two steps, where the engine had not fallen idle
    gap_s: float = 0.0
    max_gap_s: float = 0.0
    num_holds: int = 0  # between the forward pass and the draw, of steps that awaited tokens
    hold_s: float = 0.0

    def add(self, busy_s: float, gap_s: float | None, hold_s: float | None = None) -> None:
        """A step; without a gap where none ran before it, without a hold where it awaited nothing."""
        self.num_steps += 1
        if hold_s is not None:
            self.num_holds += 1
            self.hold_s += hold_s
        self.busy_s += busy_s
        if gap_s is not None:
            self.num_gaps += 1
            self.gap_s += gap_s
            self.max_gap_s = max(self.max_gap_s, gap_s)

    def to_dict(self) -> dict[str, float]:
        """Means and counts."""
        return {
            "num_steps": self.num_steps,
            "busy_ms": 1e3 * self.busy_s / max(self.num_steps, 1),
            "num_gaps": self.num_gaps,
            "gap_us": 1e6 * self.gap_s / max(self.num_gaps, 1),
            "max_gap_us": 1e6 * self.max_gap_s,
            "num_holds": self.num_holds,
            "hold_us": 1e6 * self.hold_s / max(self.num_holds, 1),
        }
