"""What no plan can be better than: the least time within a budget, and the least budget."""

from memfit.plan.bound.bound import Bound, Bounds, Certificate, Floor, floor
from memfit.plan.bound.cut import Share

__all__ = ["Bound", "Bounds", "Certificate", "Floor", "Share", "floor"]
