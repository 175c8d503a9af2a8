"""Every refusal is one of our errors, names the module, the line and what to do, and leaves nothing half-fitted."""

from __future__ import annotations

import copy
import inspect
import random
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from equivalence import Apply, bits, seeded, weighted_sum
from torch import nn

import memfit
from memfit.errors import CaptureError, MemfitError, UnsupportedUse

HERE = "tests/test_messages.py"


class Inner(nn.Module):
    """Calls `body` on the line that says so."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("mask", torch.tensor([True, False, True, False, True, False]))
        self.register_buffer("count", torch.tensor(3))
        self.calls = 0
        self.log: list[Any] = []
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, self.layer(x))


class Outer(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(6, 6), Inner(body))
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.drop(self.norm(x)))


def rows(n: int = 3, **options: Any) -> torch.Tensor:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(n), **options)


def line_of(body: Callable[..., Any]) -> str:
    """file:line of the line in `body` that ends in the comment `# here`."""
    lines, start = inspect.getsourcelines(body)
    (found,) = [index for index, text in enumerate(lines) if "# here" in text]
    return f"{HERE}:{start + found}"


# --- things a forward pass may do that cannot be replayed ------------------------------------------------------------


def asks_item(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y * y.sum().item()  # here


def branches_on_data(m: Any, y: torch.Tensor) -> torch.Tensor:
    if y.sum() > 0:  # here
        return y
    return -y


def loops_on_data(m: Any, y: torch.Tensor) -> torch.Tensor:
    while y.norm() > 1:  # here
        y = y * 0.5
    return y


def asserts_on_data(m: Any, y: torch.Tensor) -> torch.Tensor:
    assert not y.isnan().any()  # here
    return y


def prints_a_float(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.log.append(float(y.mean()))  # here
    return y


def to_list(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y * sum(y.sum(0).tolist())  # here


def finds_nonzero(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y[y.sum(1).nonzero().squeeze(1)]  # here


def indexes_by_condition(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y[y > 0]  # here


def selects_masked(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y.masked_select(y > 0)  # here


def finds_unique(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y.sum() * torch.unique(y.detach()).sum()  # here


def converts_to_numpy(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y * torch.from_numpy(y.detach().numpy().copy())  # here


def converts_by_numpy_function(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y * float(numpy.mean(y.detach().cpu().numpy()))  # here


def reads_data_pointer(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y * (y.data_ptr() % 2)  # here


def computes_ctc(m: Any, y: torch.Tensor) -> torch.Tensor:
    targets = torch.ones(1, 1, dtype=torch.long)
    return F.ctc_loss(y[:, None].log_softmax(2), targets, (y.shape[0],), (1,))  # here


def makes_sparse(m: Any, y: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(torch.eye(y.shape[0]).to_sparse(), y)  # here


def assigns_data(m: Any, y: torch.Tensor) -> torch.Tensor:
    y.data = y.detach() * 2
    return y + 1  # here


def makes_a_generator(m: Any, y: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return y + torch.rand(6, generator=generator)  # here


def hooks_a_parameter(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.layer.weight.register_hook(lambda gradient: gradient * 2)  # here
    return y


DATA = [asks_item, branches_on_data, loops_on_data, asserts_on_data, prints_a_float, to_list]
SHAPES = [finds_nonzero, indexes_by_condition, selects_masked, finds_unique]
OTHERS = [converts_to_numpy, converts_by_numpy_function, reads_data_pointer, makes_sparse, computes_ctc]
OTHERS += [assigns_data, makes_a_generator, hooks_a_parameter]
name_of = lambda body: body.__name__  # noqa: E731


def refusal(body: Callable[..., Any], **options: Any) -> str:
    """The text of the refusal; also checks that it left nothing behind."""
    model = seeded(lambda: Outer(body), 0).train()
    return refusal_of(model, lambda m: m(rows(**options)))


def refusal_of(model: nn.Module, call: Callable[[nn.Module], Any], trains: bool = True) -> str:
    untouched = copy.deepcopy(model)
    memfit.fit(model)
    before = {name: bits(t) for name, t in model.state_dict().items()}
    attributes = {name: dict(m.__dict__) for name, m in model.named_modules()}
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    generators = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    texts = []
    for _ in range(2):
        with pytest.raises(MemfitError) as caught:
            call(model)
        texts.append(str(caught.value))
    assert texts[0] == texts[1], "a second call says something else"
    assert {name: bits(t) for name, t in model.state_dict().items()} == before, "the refusal changed the model"
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == attributes
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), generators[0]), "the refusal moved torch's generator"
    assert random.getstate() == generators[1] and numpy.random.get_state()[1].tolist() == generators[2]
    assert model.memfit.num_captures == 0
    memfit.unfit(model)
    if trains:
        for arm in (untouched, model):
            torch.manual_seed(5)
            random.seed(5)
            numpy.random.seed(5)
            weighted_sum(call(arm)).backward()
        assert [bits(p.grad) for p in model.parameters()] == [bits(p.grad) for p in untouched.parameters()]
    return texts[0]


@pytest.mark.parametrize("body", DATA, ids=name_of)
def test_reading_data_in_forward_names_the_module_the_line_and_the_way_out(body: Any) -> None:
    text = refusal(body)
    assert f"module 'blocks.1' at {line_of(body)}" in text
    assert "asks for the value of a tensor" in text
    assert "torch.where" in text and "pass it in" in text


@pytest.mark.parametrize("body", SHAPES, ids=name_of)
def test_shapes_that_depend_on_data_name_the_module_the_line_and_the_way_out(body: Any) -> None:
    text = refusal(body)
    assert f"module 'blocks.1' at {line_of(body)}" in text
    assert "shape depends on data" in text
    assert "mask of fixed shape" in text


@pytest.mark.parametrize("body", OTHERS, ids=name_of)
def test_leaving_torch_or_dense_tensors_names_the_module_and_the_line(body: Any) -> None:
    text = refusal(body)
    assert f"module 'blocks.1' at {line_of(body)}" in text


def test_a_shape_that_does_not_fit_is_an_error_of_the_same_kind_and_nothing_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)5.*6"):
        memfit.fit(nn.Linear(6, 6))(torch.randn(3, 5))
    assert capfd.readouterr() == ("", "")


def test_a_model_that_fails_by_itself_fails_with_its_own_error() -> None:
    def raises(m: Any, y: torch.Tensor) -> torch.Tensor:
        raise KeyError("the model's own trouble")

    model = memfit.fit(Outer(raises))
    with pytest.raises(KeyError, match="the model's own trouble"):
        model(rows())


LOOKS = {
    "product of all": lambda y, m: y.prod(),
    "product of rows": lambda y, m: y.prod(1),
    "running product": lambda y, m: y.cumprod(1),
    "maximum of all": lambda y, m: y.max(),
    "minimum of all": lambda y, m: y.min(),
    "median of all": lambda y, m: y.median(),
    "median of all but nan": lambda y, m: y.nanmedian(),
    "filled with a parameter": lambda y, m: y.masked_fill(m.mask, y[0, 0]),
}


@pytest.mark.parametrize("looks", list(LOOKS.values()), ids=list(LOOKS))
def test_gradients_that_look_at_the_data_are_refused(looks: Any) -> None:
    """Autograd has formulas that choose by the values; what they would choose is not known at capture."""

    def body(m: Any, y: torch.Tensor) -> torch.Tensor:
        return y * looks(y, m).sum()

    text = refusal(body)
    assert f"module 'blocks.1' at {HERE}:" in text
    assert "looks at the data" in text and "Write it with other ops" in text and "amax" in text


# --- randomness and state outside torch ------------------------------------------------------------------------------


def test_pythons_random_in_forward_is_refused() -> None:
    text = refusal(lambda m, y: y if random.random() < 0.5 else -y)
    assert "Python's `random`" in text and "torch.rand" in text and "frozen" in text


def test_numpys_random_in_forward_is_refused() -> None:
    text = refusal(lambda m, y: y * float(numpy.random.rand()))
    assert "numpy's generator" in text and "torch.rand" in text


@pytest.mark.parametrize(
    "seeds",
    [lambda: torch.manual_seed(3), lambda: torch.set_rng_state(torch.get_rng_state()), lambda: torch.seed()],
    ids=["manual_seed", "set_rng_state", "seed"],
)
def test_seeding_in_forward_is_refused(seeds: Any) -> None:
    def body(m: Any, y: torch.Tensor) -> torch.Tensor:
        seeds()
        return F.dropout(y, 0.5)

    text = refusal_of(seeded(lambda: Outer(body)), lambda m: m(rows()), trains=False)
    assert "generator" in text and "outside the model" in text


def test_a_forked_generator_in_forward_is_refused() -> None:
    def body(m: Any, y: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return F.dropout(y, 0.5)

    text = refusal(body)
    assert "generator" in text and "outside the model" in text


def test_a_counter_changed_in_forward_is_refused_by_its_name() -> None:
    def counts(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.calls += 1
        return y * m.calls

    model = seeded(lambda: Outer(counts))
    text = refusal_of(model, lambda m: m(rows()), trains=False)
    assert "'blocks.1.calls'" in text and "register_buffer" in text
    assert model.blocks[1].calls == 0


def test_a_list_grown_in_forward_is_refused_by_its_name() -> None:
    def logs(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.log.append(y.shape[0])
        return y

    model = seeded(lambda: Outer(logs))
    text = refusal_of(model, lambda m: m(rows()), trains=False)
    assert "'blocks.1.log'" in text
    assert model.blocks[1].log == []


class Holder:
    def __init__(self) -> None:
        self.count = 0
        self.items: list[int] = []


def test_an_object_of_the_models_own_changed_in_forward_is_refused() -> None:
    def counts(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.holder.count += 1
        return y * m.holder.count

    model = seeded(lambda: Outer(counts))
    model.blocks[1].holder = Holder()
    text = refusal_of(model, lambda m: m(rows()), trains=False)
    assert "'blocks.1.holder" in text
    assert model.blocks[1].holder.count == 0


def test_a_nested_list_grown_in_forward_is_refused() -> None:
    def logs(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.log[0].append(1)
        return y

    model = seeded(lambda: Outer(logs))
    model.blocks[1].log.append([])
    text = refusal_of(model, lambda m: m(rows()), trains=False)
    assert "'blocks.1.log'" in text
    assert model.blocks[1].log == [[]]


def test_detached_activations_appended_to_a_list_are_appended_as_in_eager() -> None:
    def keeps(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.log.append(y.detach())
        return y

    eager, fitted = seeded(lambda: Outer(keeps)), memfit.fit(seeded(lambda: Outer(keeps)))
    for step in range(3):
        for model in (eager, fitted):
            torch.manual_seed(step)
            model(rows())
        assert [bits(t) for t in fitted.blocks[1].log] == [bits(t) for t in eager.blocks[1].log]


def test_a_backward_inside_forward_is_refused() -> None:
    def body(m: Any, y: torch.Tensor) -> torch.Tensor:
        y.sum().backward(retain_graph=True)
        return y

    text = refusal_of(seeded(lambda: Outer(body)), lambda m: m(rows()), trains=False)
    assert "backward" in text or "gradient" in text


TABLES: dict[int, torch.Tensor] = {}


def table_of(length: int) -> torch.Tensor:
    if length not in TABLES:
        TABLES[length] = torch.arange(float(length))  # here
    return TABLES[length]


def test_a_tensor_kept_in_a_cache_outside_the_model_is_refused_where_it_is_made() -> None:
    TABLES.clear()
    model = memfit.fit(seeded(lambda: Outer(lambda m, y: y + table_of(6))))
    with pytest.raises(CaptureError) as caught:
        model(rows())
    text = str(caught.value)
    assert "outside the model" in text and line_of(table_of) in text and "buffer" in text
    TABLES[6] = torch.arange(6.0)  # made before: a constant
    model(rows()).sum().backward()
    TABLES.clear()


# --- hooks -----------------------------------------------------------------------------------------------------------

HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda module, args, output: None),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda module, args: None),
    "full backward": lambda m: m.register_full_backward_hook(lambda module, given, got: None),
    "full backward pre": lambda m: m.register_full_backward_pre_hook(lambda module, got: None),
}


@pytest.mark.parametrize("register", list(HOOKS.values()), ids=list(HOOKS))
def test_hooks_on_submodules_are_refused_by_name(register: Any) -> None:
    model = seeded(lambda: Outer(lambda m, y: y))
    register(model.blocks[1].layer)
    text = refusal_of(model, lambda m: m(rows()))
    assert "module 'blocks.1.layer' (Linear) has a hook" in text
    assert "handle.remove()" in text


def test_a_hook_on_an_activation_with_effects_outside_is_refused() -> None:
    seen: list[Any] = []

    def body(m: Any, y: torch.Tensor) -> torch.Tensor:
        y.register_hook(seen.append)  # here
        return y

    text = refusal(body)
    assert "hook" in text and "blocks.1" in text and line_of(body) in text


# --- tensors that are not dense --------------------------------------------------------------------------------------


def test_a_sparse_input_is_refused() -> None:
    model = seeded(lambda: Apply(lambda m, x: torch.sparse.mm(x, m.w), w=(6, 6)))
    text = refusal_of(model, lambda m: m(torch.eye(6).to_sparse()))
    assert "input 0 is a sparse coo tensor of shape (6, 6)" in text and "to_dense()" in text


def test_a_quantised_input_is_refused() -> None:
    model = seeded(lambda: Apply(lambda m, x: x.dequantize() @ m.w, w=(6, 6)))
    text = refusal_of(model, lambda m: m(torch.quantize_per_tensor(torch.eye(6), 0.1, 0, torch.qint8)))
    assert "input 0 is a quantised tensor of shape (6, 6)" in text and "dequantize()" in text


def test_a_sparse_buffer_is_refused_by_its_name() -> None:
    model = seeded(lambda: Apply(lambda m, x: torch.sparse.mm(m.graph, m.l(x)), l=nn.Linear(6, 6)))
    model.register_buffer("graph", torch.eye(3).to_sparse())
    text = refusal_of(model, lambda m: m(rows()))
    assert "buffer 'graph' is a sparse coo tensor" in text


def test_a_nested_input_is_refused() -> None:
    model = seeded(lambda: Apply(lambda m, x: m.l(x), l=nn.Linear(6, 6)))
    given = torch.nested.nested_tensor([torch.randn(2, 6), torch.randn(3, 6)], layout=torch.jagged)
    memfit.fit(model)
    with pytest.raises(MemfitError, match="input 0 is a"):
        model(given)


def test_a_tensor_subclass_as_input_is_refused_by_its_type() -> None:
    class Marked(torch.Tensor):
        pass

    model = seeded(lambda: Apply(lambda m, x: m.l(x), l=nn.Linear(6, 6)))
    text = refusal_of(model, lambda m: m(rows().as_subclass(Marked)), trains=False)
    assert "input 0 is a Marked tensor" in text


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embedding_gradients_are_refused_by_module(kind: Any) -> None:
    model = seeded(lambda: nn.Sequential(kind(10, 6, sparse=True), nn.Linear(6, 2)))
    text = refusal_of(model, lambda m: m(torch.arange(6).view(2, 3)))
    assert "module '0'" in text and "sparse" in text and "sparse=False" in text


# --- writing where it cannot be followed -----------------------------------------------------------------------------


def test_writing_into_an_input_that_requires_grad_is_refused() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.l(x.mul_(2))  # here

    model = seeded(lambda: Apply(body, l=nn.Linear(6, 6)))
    given = lambda: rows(requires_grad=True) * 1  # noqa: E731
    text = refusal_of(model, lambda m: m(given()))
    assert f"module '(root)' at {line_of(body)} writes in place" in text
    assert "input 0" in text and "clone()" in text


def test_writing_into_a_leaf_input_that_requires_grad_fails_as_in_eager() -> None:
    for fit in (False, True):
        model = seeded(lambda: Apply(lambda m, x: m.l(x.mul_(2)), l=nn.Linear(6, 6)))
        if fit:
            memfit.fit(model)
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            model(rows(requires_grad=True))


def test_giving_a_tensor_another_storage_is_refused() -> None:
    def body(m: Any, y: torch.Tensor) -> torch.Tensor:
        y.data = y.detach() * 2
        return y

    text = refusal(body)
    assert "another storage" in text and "write into it instead" in text


def test_a_parameter_from_a_closure_is_refused() -> None:
    outside = nn.Parameter(torch.ones(6))

    def body(m: Any, y: torch.Tensor) -> torch.Tensor:
        return y * outside  # here

    model = memfit.fit(seeded(lambda: Outer(body)))
    with pytest.raises(CaptureError) as caught:
        model(rows())
    text = str(caught.value)
    assert "blocks.1" in text and line_of(body) in text and "requires grad" in text
    assert "Register it as a parameter" in text


def test_the_models_own_parameter_reached_through_a_closure_is_refused() -> None:
    held: dict[str, nn.Module] = {}

    def body(m: Any, y: torch.Tensor) -> torch.Tensor:
        return y * held["model"].norm.weight  # here

    model = seeded(lambda: Outer(body))
    held["model"] = model
    memfit.fit(model)
    with pytest.raises(CaptureError) as caught:
        model(rows())
    text = str(caught.value)
    assert "blocks.1" in text and line_of(body) in text and "through `self`" in text


def test_a_constant_from_a_closure_is_used_as_it_is_at_each_call() -> None:
    outside = torch.ones(6)
    model = memfit.fit(seeded(lambda: Apply(lambda m, x: m.l(x) * outside, l=nn.Linear(6, 6))))
    first = model(rows())
    outside.mul_(3)
    assert torch.equal(model(rows()), first * 3)


def test_an_attribute_that_holds_last_steps_graph_and_is_read_is_refused() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.state = torch.zeros(3, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state = torch.tanh(self.layer(x) + self.state)
            return self.state

    model = memfit.fit(seeded(Recurrent))
    model(rows())
    with pytest.raises(MemfitError, match=r"(?s)'state'.*[Dd]etach"):
        model(rows())


# --- backward --------------------------------------------------------------------------------------------------------


def fitted_loss() -> tuple[nn.Module, torch.Tensor]:
    model = memfit.fit(seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())))
    return model, weighted_sum(model(rows()))


BACKWARDS = {
    "retain_graph": lambda model, loss: loss.backward(retain_graph=True),
    "create_graph": lambda model, loss: loss.backward(create_graph=True),
    "grad with create_graph": lambda model, loss: torch.autograd.grad(loss, model[0].weight, create_graph=True),
    "grad with retain_graph": lambda model, loss: torch.autograd.grad(loss, model[0].weight, retain_graph=True),
}


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("backward", list(BACKWARDS.values()), ids=list(BACKWARDS))
def test_keeping_the_graph_is_refused_with_the_way_out(backward: Any) -> None:
    model, loss = fitted_loss()
    with pytest.raises(UnsupportedUse) as caught:
        backward(model, loss)
    text = str(caught.value)
    assert "Sequential" in text and "retain_graph=True" in text and "create_graph=True" in text
    assert "memfit.unfit(model)" in text and "call backward once" in text
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("backward", list(BACKWARDS.values()), ids=list(BACKWARDS))
def test_after_that_refusal_a_plain_step_trains_as_in_eager(backward: Any) -> None:
    model, loss = fitted_loss()
    with pytest.raises(UnsupportedUse):
        backward(model, loss)
    loss.backward()
    eager = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    weighted_sum(eager(rows())).backward()
    assert [bits(p.grad) for p in model.parameters()] == [bits(p.grad) for p in eager.parameters()]


def test_a_hessian_is_refused() -> None:
    model = memfit.fit(seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())))
    with pytest.raises(UnsupportedUse, match="create_graph"):
        torch.autograd.functional.hessian(lambda x: model(x).sum(), rows())


class Checkpointed(nn.Module):
    def __init__(self, dropout: float, reentrant: bool) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(6, 6), nn.Dropout(dropout), nn.Linear(6, 6))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.part, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_dropout_is_refused_with_the_way_out(reentrant: bool) -> None:
    model = seeded(lambda: Checkpointed(0.5, reentrant))
    text = refusal_of(model, lambda m: m(rows(requires_grad=True)))
    assert "checkpoint" in text
    assert "Turn checkpointing off" in text or "use_reentrant=False" in text


def test_what_eager_refuses_in_backward_is_refused_with_eagers_reason() -> None:
    def body(m: Any, y: torch.Tensor) -> torch.Tensor:
        z = torch.sigmoid(y)
        z.mul_(2)
        return z

    eager = seeded(lambda: Outer(body))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weighted_sum(eager(rows())).backward()
    fitted = memfit.fit(seeded(lambda: Outer(body)))
    with pytest.raises((RuntimeError, MemfitError), match="modified by an inplace operation"):
        weighted_sum(fitted(rows())).backward()


def test_a_backward_that_fails_leaves_the_next_step_whole() -> None:
    eager, model = (seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))) for _ in range(2))
    memfit.fit(model)
    handle = model[2].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(rows()).sum().backward()
    handle.remove()
    model.zero_grad()
    for each in (eager, model):
        each(rows()).sum().backward()
    assert [bits(p.grad) for p in model.parameters()] == [bits(p.grad) for p in eager.parameters()]


# --- everything we raise ---------------------------------------------------------------------------------------------


def test_all_our_errors_are_memfit_errors_and_unsupported_use_is_a_runtime_error() -> None:
    from memfit import errors

    kinds = [thing for thing in vars(errors).values() if isinstance(thing, type) and issubclass(thing, Exception)]
    assert len(kinds) >= 5 and all(issubclass(kind, MemfitError) for kind in kinds)
    assert issubclass(UnsupportedUse, RuntimeError)
    assert all(kind.__doc__ and not re.search(r"\bsimply\b|\bjust\b", kind.__doc__) for kind in kinds)


def test_a_scripted_child_is_refused_by_name() -> None:
    model = memfit.fit(seeded(lambda: Apply(lambda m, x: m.s(x), s=torch.jit.script(nn.Linear(6, 6)))))
    with pytest.raises(CaptureError, match=r"module 's'.*[Ss]cript"):
        model(rows())


def test_a_batch_norm_without_momentum_is_refused_with_the_way_out() -> None:
    """It divides by a counter that it reads from its buffer, another number at every step."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None)))
    text = refusal_of(model, lambda m: m(rows()))
    assert "module '1'" in text and "momentum=None" in text and "give it a momentum" in text
