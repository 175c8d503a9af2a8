"""Choose a Program for a Step by the policy asked for, and hold it against the budget."""

from __future__ import annotations

from memfit.capture.step import Step
from memfit.errors import DoesNotFit
from memfit.plan.ledger import Ledger
from memfit.plan.lower import lower_keep
from memfit.plan.options import Options
from memfit.plan.program import Program


def plan(step: Step, options: Options) -> Program:
    """The Program of that policy; raises DoesNotFit if its peak is above the budget."""
    program = lower_keep(step)
    ledger = Ledger.of(program)
    if options.budget_bytes is not None and ledger.peak_bytes > options.budget_bytes:
        raise DoesNotFit(
            f"policy '{options.policy}' needs {ledger.peak_bytes:,} bytes, the budget is {options.budget_bytes:,}. "
            f"The peak is {ledger.describe_peak()}. "
            f"Give a budget of at least {ledger.peak_bytes:,} bytes, or a smaller batch"
        )
    return program
