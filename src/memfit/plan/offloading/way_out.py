"""Which tier a policy sends activations to."""

from __future__ import annotations

from memfit.cost.costs import Costs
from memfit.errors import MemfitError

_HOST = "host"


def tier_of(costs: Costs) -> str:
    """The host's memory if the device has it, else the tier with the fastest way out."""
    if not costs.links:
        raise MemfitError(
            f"device '{costs.device}' has no tier to send activations to. Give it a link (link=12.8GB/s); on this "
            "machine that is the disk: see that the folder in MEMFIT_SPILL_DIR can be written; or choose a policy that "
            "does not offload"
        )
    if _HOST in costs.links:
        return _HOST
    return max(costs.links, key=lambda tier: (costs.links[tier].send_bytes_per_s, tier))
