"""fit, unfit: the two verbs. They wire the stages together and hold no logic of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from torch import nn

from memfit.errors import BadOption
from memfit.plan.budget import Budget
from memfit.plan.options import Options, policy_or_default
from memfit.plan.policies.registry import with_format
from memfit.run.fitted import Fitted

M = TypeVar("M", bound=nn.Module)


def fit(
    model: M,
    *,
    budget: int | str | None = None,
    policy: str | None = None,
    format: str | None = None,
    allow_lossy: bool = False,
    without: Iterable[str] = (),
    max_captures: int = 8,
    debug: bool = False,
    measure_s: float = 60.0,
    strict: bool = False,
) -> M:
    """Make `model` train through memfit's own program, in place, and return it.

    The object, its parameters and its state_dict stay what they were. The step is captured at the first training call
    of each kind of arguments, in every process: what a forward pass does is up to Python that no hash covers. Plans and
    what was measured are kept on disk. eval() and no_grad() use the model's own forward.

    Args:
        model: any nn.Module.
        budget: the most bytes the step may need, all included: an int, or "6GiB"; or "60%" of what the keep plan's
            activations need, on top of what no plan can change. None: no limit. With a budget, the ops of the step are
            measured at its first capture (workspaces count); what is measured is kept on disk. The optimizer's state is
            not the step's: leave room for it (`memfit plan --optimizer adam` says how much it is).
        policy: what to do with the tensors the backward pass needs. "keep" holds them all, and is what is done without
            a budget; with one, "auto" chooses for each tensor what costs least time.
        format: in what "gist-lossy" stores values: "fp16" (its default), "bf16", "fp10", "fp8", "int8" or "int4"; or
            which of its codes "gist-lossless" uses alone: "mask", "window", "narrow-int", "sparse" or "csr".
        allow_lossy: gradients may differ from eager's, which such a policy needs to be told.
        without: names of rewrites to leave out, for diagnosis (see memfit.REWRITES).
        max_captures: how many kinds of arguments to keep captured.
        debug: prove every program legal before it runs, and hold the bytes that are really alive against the ledger
            at every instruction of every step. Slow. The disk tier keeps checksums from then on.
        measure_s: where a budget or the policy asks for costs, how long ops may be measured; the rest is estimated.
        strict: if a step was measured to need more than the budget, raise BudgetExceeded at the next forward call. Else
            the call is planned again with what was learnt, with a warning, three times at most. Which it is shows in
            the first steps of each capture: growth is read in one, and held against the budget in a second, slow one
            that is observed op by op if there is reason to.

    Example:
        >>> model = memfit.fit(torch.nn.Linear(4, 2))
        >>> model(torch.randn(3, 4)).sum().backward()
    """
    if not isinstance(model, nn.Module):
        raise BadOption(f"fit() takes an nn.Module, not {type(model).__name__}")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        wrapper = type(model).__name__
        raise BadOption(f"fit() takes the module inside {wrapper}: write {wrapper}(memfit.fit(model))")
    limit = Budget.of(budget)
    name = with_format(policy_or_default(policy, limit), format)
    options = Options(limit, name, frozenset(without), max_captures, debug, measure_s, allow_lossy, strict)
    if "memfit" in model.__dict__:
        unfit(model)
    elif hasattr(model, "memfit"):
        raise BadOption(f"{type(model).__name__} already has an attribute 'memfit'; memfit needs that name")
    fitted = Fitted(model, options)
    model.__dict__["memfit"] = fitted
    model.__dict__["forward"] = fitted
    return model


def unfit(model: M) -> M:
    """Give `model` its own forward back, and return it. A model that is not fitted is left as it is."""
    fitted = model.__dict__.pop("memfit", None)
    if fitted is not None:
        del model.__dict__["forward"]
        if fitted.own_forward is not None:
            model.__dict__["forward"] = fitted.own_forward
    return model
