"""Counters of the time that steps take, written by the engine's thread and read by any thread.

```
 host     plan ▸ launch │ wait ▸ commit ▸ sample ▸ send │ plan ...     the parts of `HostTime`
 device   [ step N ............ ]  gap  [ step N+1 ..] hold [sample]   `DeviceTime`
```
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class HostTime:
    """Seconds that the engine's thread has spent, by part of a step."""

    num_steps: int = 0  # launched steps
    plan_s: float = 0.0
    # Staging and queueing; on the CPU also the computation itself.
    launch_s: float = 0.0
    # Masks and sampling of steps that had to wait for the tokens of the previous step.
    sample_s: float = 0.0
    # Asleep until a step's tokens arrive.
    wait_s: float = 0.0
    commit_s: float = 0.0
    send_s: float = 0.0

    def per_step_ms(self) -> dict[str, float]:
        """Return the mean milliseconds per step of each part."""
        return {
            f"{name.removesuffix('_s')}_ms": 1e3 * seconds / max(self.num_steps, 1)
            for name, seconds in asdict(self).items()
            if name.endswith("_s")
        }


@dataclass(slots=True)
class MeanTime:
    """Exponential average of a measured time; 0 = not yet known."""

    mean_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Take in a measurement."""
        weight = 0.25 if self.mean_s else 1.0
        self.mean_s += weight * (seconds - self.mean_s)


@dataclass(slots=True)
class DeviceTime:
    """Times of steps on a GPU, measured by its events."""

    num_steps: int = 0  # collected steps
    # From the arrival of a step's inputs to its end.
    busy_s: float = 0.0
    # Gaps between consecutive steps; idle periods of the engine do not count.
    num_gaps: int = 0
    gap_s: float = 0.0
    max_gap_s: float = 0.0
    # Time between forward pass and sampling, of steps that had to wait for the tokens of the previous step.
    num_holds: int = 0
    hold_s: float = 0.0

    def add(self, busy_s: float, gap_s: float | None, hold_s: float | None = None) -> None:
        """Add a step. `gap_s` is None after an idle period, `hold_s` is None if sampling did not wait for tokens."""
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
        """Counts and means, as plain data."""
        return {
            "num_steps": self.num_steps,
            "busy_ms": 1e3 * self.busy_s / max(self.num_steps, 1),
            "num_gaps": self.num_gaps,
            "gap_us": 1e6 * self.gap_s / max(self.num_gaps, 1),
            "max_gap_us": 1e6 * self.max_gap_s,
            "num_holds": self.num_holds,
            "hold_us": 1e6 * self.hold_s / max(self.num_holds, 1),
        }
