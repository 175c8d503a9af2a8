"""The policies by name."""

from __future__ import annotations

from memfit.errors import BadOption
from memfit.plan.policies.checkpoint_search import CHECKPOINT_SEARCH
from memfit.plan.policies.checkpoint_search_peak import CHECKPOINT_SEARCH_PEAK
from memfit.plan.policies.keep import KEEP
from memfit.plan.policies.network_wide import NETWORK_WIDE
from memfit.plan.policies.offload_dp import OFFLOAD_DP
from memfit.plan.policies.offload_greedy import OFFLOAD_GREEDY
from memfit.plan.policies.overlap import OVERLAP, OVERLAP_ON_DEMAND
from memfit.plan.policies.policy import Policy
from memfit.plan.policies.rotor import ROTOR
from memfit.plan.policies.sqrt import SQRT
from memfit.plan.policies.vdnn import VDNN_ALL, VDNN_CONV
from memfit.plan.policies.vdnn_dyn import VDNN_DYN

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        *(KEEP, NETWORK_WIDE),
        *(SQRT, CHECKPOINT_SEARCH, CHECKPOINT_SEARCH_PEAK, ROTOR),
        *(VDNN_ALL, VDNN_CONV, VDNN_DYN),
        *(OVERLAP, OVERLAP_ON_DEMAND, OFFLOAD_GREEDY, OFFLOAD_DP),
    )
}
RUNNABLE = tuple(name for name, policy in POLICIES.items() if policy.decide is not None)


def policy_named(name: str) -> Policy:
    """The policy of that name."""
    if name not in POLICIES:
        raise BadOption(f"policy={name!r}: unknown. Known policies: {', '.join(POLICIES)}")
    return POLICIES[name]
