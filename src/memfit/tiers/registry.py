"""The tiers of this machine by name. Plans that are run here may use these and no others."""

from __future__ import annotations

from memfit.tiers.disk import DiskTier
from memfit.tiers.host import HostTier
from memfit.tiers.streams import host_is_offered
from memfit.tiers.tier import Tier

# A tier that nobody uses has no file, folder, thread, stream or pinned memory.
TIERS: dict[str, Tier] = {"disk": DiskTier()}
if host_is_offered():
    TIERS["host"] = HostTier()
