"""The routing policies by name: the values of the option `router.policy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

from quire.router.policy.baselines import LeastLoaded, PowerOfTwo, PrefixAffinity, RoundRobin
from quire.router.policy.cost import CostPolicy, disaggregated_policy, e2e_policy
from quire.router.policy.policy import Policy

PolicyName = Literal[
    "slo",
    "e2e",
    "disaggregated",
    "round_robin",
    "least_loaded",
    "power_of_two",
    "prefix_affinity",
]
POLICY_NAMES: tuple[str, ...] = get_args(PolicyName)
POLICIES: Mapping[str, Callable[..., Policy]] = MappingProxyType(
    {
        "slo": CostPolicy,
        "e2e": e2e_policy,
        "disaggregated": disaggregated_policy,
        "round_robin": RoundRobin,
        "least_loaded": LeastLoaded,
        "power_of_two": PowerOfTwo,
        "prefix_affinity": PrefixAffinity,
    }
)


def make_policy(name: str, **weights: Any) -> Policy:
    """Make a policy by its name.

    Parameters
    ----------
    weights
        Arguments of the policy's constructor, such as the weights of `CostPolicy`.

    Raises
    ------
    ValueError
        No policy has the name, or the policy has no such weight.
    """
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICY_NAMES)}, got {name!r}")
    try:
        return POLICIES[name](**weights)
    except TypeError as error:
        raise ValueError(f"policy {name!r}: {error}") from error
