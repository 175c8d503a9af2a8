"""memfit: train neural networks in less memory than they seem to need, exactly and fast."""

from memfit import zoo
from memfit.api import fit, unfit
from memfit.capture.rewrites import NAMES as REWRITES
from memfit.capture.step import Step
from memfit.capture.trace import capture
from memfit.errors import MemfitError
from memfit.report.verify import Verdict, verify

__all__ = ["REWRITES", "MemfitError", "Step", "Verdict", "capture", "fit", "unfit", "verify", "zoo"]
