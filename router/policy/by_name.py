"""The routing policies by their names: `router.policy` of the configuration. A new policy is added here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from quire.router.policy.cost import CostPolicy, e2e_policy
from quire.router.policy.policy import (
    LeastLoaded,
    Policy,
    PowerOfTwo,
    PrefixAffinity,
    RoundRobin,
)

POLICIES: Mapping[str, Callable[..., Policy]] = MappingProxyType(
    {
        "slo": CostPolicy,
        "e2e": e2e_policy,
        "round_robin": RoundRobin,
        "least_loaded": LeastLoaded,
        "power_of_two": PowerOfTwo,
        "prefix_affinity": PrefixAffinity,
    }
)
POLICY_NAMES = tuple(POLICIES)


def make_policy(name: str, **weights: Any) -> Policy:
    """The policy of a name, with its weights.

    Raises
    ------
    ValueError
        No policy has the name, or it has no such weight.
    """
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICY_NAMES)}, got {name!r}")
    try:
        return POLICIES[name](**weights)
    except TypeError as error:
        raise ValueError(f"policy {name!r}: {error}") from error
