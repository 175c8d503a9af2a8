"""The policies by name."""

from __future__ import annotations

from memfit.errors import BadOption
from memfit.plan.policies.keep import KEEP
from memfit.plan.policies.network_wide import NETWORK_WIDE
from memfit.plan.policies.policy import Policy

POLICIES: dict[str, Policy] = {policy.name: policy for policy in (KEEP, NETWORK_WIDE)}
RUNNABLE = tuple(name for name, policy in POLICIES.items() if policy.decide is not None)


def policy_named(name: str) -> Policy:
    """The policy of that name."""
    if name not in POLICIES:
        raise BadOption(f"policy={name!r}: unknown. Known policies: {', '.join(POLICIES)}")
    return POLICIES[name]
