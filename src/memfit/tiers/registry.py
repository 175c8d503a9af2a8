"""The tiers of this machine by name. Plans that are run here may use these and no others."""

from __future__ import annotations

from memfit.tiers.tier import Tier

TIERS: dict[str, Tier] = {}
