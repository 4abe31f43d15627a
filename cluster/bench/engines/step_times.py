"""Difference of two readings of `Engine.telemetry`, as data and as text: how the steps in between spent their time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Told = Mapping[str, Any]
# The counter over which each mean is taken.
_MEANS = {"busy_ms": "num_steps", "gap_us": "num_gaps", "hold_us": "num_holds"}


def since(before: Told, now: Told) -> dict[str, Any]:
    """Telemetry of the steps between two readings.

    Counters are subtracted, and means are taken over the steps in between. A maximum cannot be split, so `max_gap_us`
    stays the maximum since the start.
    """
    found: dict[str, Any] = {}
    for name, value in now.items():
        if isinstance(value, Mapping):
            found[name] = since(before.get(name, {}), value)
        elif isinstance(value, str) or value is None or name in ("max_gap_us", "block_bytes"):
            found[name] = value
        elif (counted := _MEANS.get(name, "num_steps" if name.endswith("_ms") else "")) in now:
            count = now[counted] - before.get(counted, 0)
            total = value * now[counted] - before.get(name, 0.0) * before.get(counted, 0)
            found[name] = total / max(count, 1)
        else:
            found[name] = value - before.get(name, 0)
    if "num_padding" in found:
        computed = found["num_items"] + found["num_padding"]
        found["padding"] = found["num_padding"] / max(computed, 1)
    if "restore_s" in found:
        num_bytes = found["num_restored"] * found["block_bytes"]
        found["restore_gb_per_s"] = 1e-9 * num_bytes / max(found["restore_s"], 1e-12)
    return found


def lines(told: Told) -> list[str]:
    """Format telemetry for a terminal. The lines `device` and `graphs` exist only on a GPU, which queues its work."""
    host = told["host"]
    parts = ", ".join(f"{name[:-3]} {host[name]:.3f}" for name in host if name.endswith("_ms"))
    text = [f"host     {host['num_steps']} steps, ms each: {parts}"]
    if "device" in told:
        device = told["device"]
        text.append(
            f"device   busy {device['busy_ms']:.3f} ms a step; {device['num_gaps']} gaps of {device['gap_us']:.1f} us, "
            f"at most {device['max_gap_us']:.1f}; {device['num_holds']} holds of {device['hold_us']:.1f} us"
        )
    if "graphs" in told:
        graphs = told["graphs"]
        kinds = (("decodes", graphs), ("mixed", graphs["mixed"]))
        text.append("graphs   " + "; ".join(f"{kind}: {_use(use)}" for kind, use in kinds))
        if graphs["off_because"]:
            text.append(f"         off: {graphs['off_because']}")
    copies = [
        f"{name} {told[name]['num_copies']} of {told[name]['num_bytes'] / 1e6:.2f} MB"
        for name in ("uploads", "downloads")
        if name in told
    ]
    tiers = told["tiers"]
    copies.append(
        f"blocks saved {tiers['num_saved']}, restored {tiers['num_restored']} at "
        f"{tiers['restore_gb_per_s']:.2f} GB/s; copied back {tiers['num_copied']} times, computed again "
        f"{tiers['num_computed']}"
    )
    return [*text, "copies   " + "; ".join(copies)]


def _use(use: Told) -> str:
    return (
        f"{use['num_hits']} hits, {use['num_misses']} misses, {100 * use['padding']:.1f}% padding"
    )
