"""The policies by name."""

from __future__ import annotations

from memfit.errors import BadOption
from memfit.plan.policies.checkpoint_search import CHECKPOINT_SEARCH
from memfit.plan.policies.checkpoint_search_peak import CHECKPOINT_SEARCH_PEAK
from memfit.plan.policies.keep import KEEP
from memfit.plan.policies.network_wide import NETWORK_WIDE
from memfit.plan.policies.policy import Policy
from memfit.plan.policies.rotor import ROTOR
from memfit.plan.policies.sqrt import SQRT

POLICIES: dict[str, Policy] = {
    policy.name: policy for policy in (KEEP, NETWORK_WIDE, SQRT, CHECKPOINT_SEARCH, CHECKPOINT_SEARCH_PEAK, ROTOR)
}
RUNNABLE = tuple(name for name, policy in POLICIES.items() if policy.decide is not None)


def policy_named(name: str) -> Policy:
    """The policy of that name."""
    if name not in POLICIES:
        raise BadOption(f"policy={name!r}: unknown. Known policies: {', '.join(POLICIES)}")
    return POLICIES[name]
