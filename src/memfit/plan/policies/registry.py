"""The policies by name."""

from __future__ import annotations

from memfit.errors import BadOption
from memfit.plan.policies.auto import AUTO
from memfit.plan.policies.checkpoint_search import CHECKPOINT_SEARCH
from memfit.plan.policies.checkpoint_search_peak import CHECKPOINT_SEARCH_PEAK
from memfit.plan.policies.gist import GIST_LOSSLESS, GIST_LOSSY
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
        *(AUTO,),
        *(SQRT, CHECKPOINT_SEARCH, CHECKPOINT_SEARCH_PEAK, ROTOR),
        *(VDNN_ALL, VDNN_CONV, VDNN_DYN),
        *(OVERLAP, OVERLAP_ON_DEMAND, OFFLOAD_GREEDY, OFFLOAD_DP),
        *(GIST_LOSSLESS, GIST_LOSSY),
    )
}
RUNNABLE = tuple(name for name, policy in POLICIES.items() if policy.decide is not None)


def policy_named(name: str) -> Policy:
    """The policy of that name, which may end in a format: `gist-lossy:fp8`."""
    base, _, format_ = name.partition(":")
    if base not in POLICIES:
        raise BadOption(f"policy={name!r}: unknown. Known policies: {', '.join(POLICIES)}")
    found = POLICIES[base]
    if base == name:
        return found
    if found.with_format is None:
        raise BadOption(f"format={format_!r}: policy '{base}' stores nothing in a format. {_with_formats()}")
    return found.with_format(format_)


def require_permission(policy: Policy, *, allow_lossy: bool) -> None:
    """Raise if the policy changes gradients and nobody has said that it may."""
    if policy.is_lossy and not allow_lossy:
        raise BadOption(
            f"policy '{policy.name}' stores tensors in fewer bits than they have: gradients will differ from eager's. "
            "If that is meant, say allow_lossy=True (--allow-lossy); 'gist-lossless' loses nothing"
        )


def with_format(policy: str, format_: str | None) -> str:
    """The name of the policy with that format; None leaves the choice to the policy."""
    if format_ is None:
        return policy
    if ":" in policy:
        raise BadOption(f"format={format_!r}: policy={policy!r} names one already")
    return policy_named(f"{policy}:{format_}").name


def _with_formats() -> str:
    return f"Policies that do: {', '.join(name for name, policy in POLICIES.items() if policy.with_format is not None)}"
