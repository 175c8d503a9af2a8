"""Gradients are handed over as they are made: hooks fire in eager's order, during backward, on the same values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence import Apply, bits, make_call, seeded, weighted_sum
from test_exact_zoo import small
from torch import nn

import memfit


def mixed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, bias=False),
        nn.GroupNorm(2, 4),
        nn.PReLU(),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.LayerNorm(6),
        nn.Linear(6, 2),
    )


def images(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 3, 8, 8),)


def rows(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 6),)


def tokens(n: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 11, (n, 5)),)


class Block(nn.Module):
    """A pre-norm residual block with a shared projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm(x))))


def language() -> nn.Module:
    return Apply(
        lambda m, ids: F.linear(m.blocks(m.tokens(ids) + m.places.weight), m.tokens.weight),
        tokens=nn.Embedding(11, 8),
        places=nn.Embedding(5, 8),
        blocks=nn.Sequential(Block(), Block()),
    )


def hugging() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=37, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
        )
    )


def labelled(n: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 37, (n, 7))
    return {"input_ids": ids, "labels": ids.clone()}


def from_zoo(name: str) -> tuple[Callable[[], nn.Module], Any, Any]:
    return (lambda: small(name)[0]), (lambda n: small(name)[1](n)), (lambda o, m: small(name)[2](o, m))


CASES: dict[str, tuple[Any, Any, Any]] = {
    "mixed": (mixed, images, weighted_sum),
    "language": (language, tokens, weighted_sum),
    "one linear": (lambda: nn.Linear(6, 3), rows, weighted_sum),
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)), rows, weighted_sum),
    "tied": (
        lambda: Apply(lambda m, x: F.linear(torch.tanh(m.l(x)), m.l.weight), l=nn.Linear(6, 6)),
        rows,
        weighted_sum,
    ),
    "parallel branches": (
        lambda: Apply(lambda m, x: m.a(x) * m.b(x) + m.c(x), a=nn.Linear(6, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 6)),
        rows,
        weighted_sum,
    ),
    "several outputs": (
        lambda: Apply(
            lambda m, x: (m.a(x), m.b(x), m.c(m.a(x))), a=nn.Linear(6, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 6)
        ),
        rows,
        weighted_sum,
    ),
    "parameters without use": (
        lambda: Apply(lambda m, x: m.a(x), a=nn.Linear(6, 6), unused=nn.Linear(6, 6)),
        rows,
        weighted_sum,
    ),
    "bilinear and scale": (
        lambda: Apply(lambda m, x: m.bl(x * m.s, x + m.t) * m.s[:3], bl=nn.Bilinear(6, 6, 3), s=(6,), t=(6,)),
        rows,
        weighted_sum,
    ),
    "two parameters of one gradient": (
        lambda: Apply(lambda m, x: torch.tanh(x + m.s + m.t) + m.t + m.u, s=(3, 6), t=(3, 6), u=(3, 6)),
        rows,
        weighted_sum,
    ),
    "parameters behind views": (
        lambda: Apply(lambda m, x: x @ m.w.t()[:, :3] + m.w.view(-1)[:3] + m.v.expand(3, 3), w=(6, 6), v=(1, 3)),
        rows,
        weighted_sum,
    ),
    "lstm": (lambda: nn.LSTM(6, 5, 2, batch_first=True), lambda n: (torch.randn(n, 4, 6),), weighted_sum),
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()), rows, weighted_sum),
    "hugging face gpt2": (hugging, labelled, lambda o, m: o.loss),
    **{f"zoo {name}": from_zoo(name) for name in ("resnet18", "gpt2", "vgg11_bn", "densenet121")},
}
each_case = pytest.mark.parametrize(("build", "inputs", "loss"), list(CASES.values()), ids=list(CASES))


def arms(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    model = seeded(build).train()
    return copy.deepcopy(model), memfit.fit(copy.deepcopy(model))


def log_of(
    model: nn.Module, inputs: Any, loss: Any, listen: Callable[[str, nn.Parameter, list[Any]], Any]
) -> list[Any]:
    """What `listen` writes down over two steps, with marks for where backward begins and ends."""
    log: list[Any] = []
    handles = [listen(name, parameter, log) for name, parameter in model.named_parameters() if parameter.requires_grad]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        for step in range(2):
            args, kwargs = make_call(inputs, 3, seed=step)
            value = loss(model(*args, **kwargs), model)
            log.append("backward begins")
            value.backward()
            log.append("backward ends")
    for handle in handles:
        handle.remove()
    return log


def post_accumulate(name: str, parameter: nn.Parameter, log: list[Any]) -> Any:
    return parameter.register_post_accumulate_grad_hook(lambda p: log.append((name, bits(p.grad))))


def tensor_hook(name: str, parameter: nn.Parameter, log: list[Any]) -> Any:
    return parameter.register_hook(lambda gradient: log.append((name, bits(gradient))))


def names_in(log: list[Any]) -> list[Any]:
    return [entry if isinstance(entry, str) else entry[0] for entry in log]


@each_case
@pytest.mark.parametrize("listen", [post_accumulate, tensor_hook], ids=["post-accumulate", "tensor"])
def test_hooks_fire_in_eagers_order_with_eagers_values(build: Any, inputs: Any, loss: Any, listen: Any) -> None:
    eager, fitted = arms(build)
    expected, found = log_of(eager, inputs, loss, listen), log_of(fitted, inputs, loss, listen)
    assert names_in(found) == names_in(expected)
    assert found == expected


def test_hooks_fire_while_later_gradients_are_still_missing() -> None:
    """Data-parallel training overlaps reduction with backward: the last layer must be ready before the first."""
    for model in arms(lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))):
        missing: list[int] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _: missing.append(sum(p.grad is None for p in model.parameters()))
            )
        model(torch.randn(3, 6)).sum().backward()
        assert missing == list(reversed(range(10)))


def test_parameters_without_gradient_fire_no_hook() -> None:
    def build() -> nn.Module:
        return Apply(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(6, 6), b=nn.Linear(6, 6), unused=(3,))

    eager, fitted = arms(build)
    logs = [log_of(model, rows, lambda o, m: o[0].square().sum(), post_accumulate) for model in (eager, fitted)]
    assert names_in(logs[1]) == names_in(logs[0])
    assert logs[1] == logs[0]
    assert {"b.weight", "unused"}.isdisjoint(names_in(logs[1]))
    assert fitted.b.weight.grad is None and fitted.unused.grad is None


@pytest.mark.parametrize("listen", [post_accumulate, tensor_hook], ids=["post-accumulate", "tensor"])
def test_a_parameter_behind_an_unused_output_with_a_loss_term_of_its_own_fires_its_hooks(listen: Any) -> None:
    def loss(output: Any, model: Any) -> torch.Tensor:
        return output[0].square().sum() + model.b.weight.square().sum()

    logs = [
        log_of(model, rows, loss, listen)
        for model in arms(lambda: Apply(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(6, 6), b=nn.Linear(6, 6)))
    ]
    assert names_in(logs[1]) == names_in(logs[0])
    assert logs[1] == logs[0]


PARTIAL = {
    "first": lambda o, m: o[0].square().sum(),
    "second": lambda o, m: o[1].square().sum(),
    "third": lambda o, m: o[2].square().sum(),
    "first and third": lambda o, m: o[0].sum() + o[2].sum(),
    "second, then first": lambda o, m: o[1].sum() * o[0].sum(),
}


@pytest.mark.parametrize("loss", list(PARTIAL.values()), ids=list(PARTIAL))
@pytest.mark.parametrize("listen", [post_accumulate, tensor_hook], ids=["post-accumulate", "tensor"])
def test_hooks_fire_as_in_eager_when_the_loss_reads_only_some_outputs(loss: Any, listen: Any) -> None:
    """The same hooks with the same gradients. Their order is that of a loss that reads all outputs."""

    def body(m: Any, x: torch.Tensor) -> Any:
        shared = torch.tanh(m.a(x))
        return m.b(shared), m.c(m.b(shared) * m.s), m.d(shared) + m.s

    layers = {name: nn.Linear(6, 6) for name in "abcd"}
    logs = [log_of(model, rows, loss, listen) for model in arms(lambda: Apply(body, **layers, s=(6,)))]
    assert sorted(names_in(logs[1])) == sorted(names_in(logs[0]))
    assert sorted(logs[1], key=repr) == sorted(logs[0], key=repr)


def test_each_hook_fires_once_per_backward() -> None:
    _, fitted = arms(language)
    names = names_in(log_of(fitted, tokens, weighted_sum, post_accumulate))
    once = names[1 : names.index("backward ends")]
    assert sorted(once) == sorted(name for name, _ in fitted.named_parameters())


@each_case
def test_an_optimizer_that_steps_inside_backward_matches(build: Any, inputs: Any, loss: Any) -> None:
    """Each gradient is used and dropped in its hook; none are left when backward is over."""
    states = []
    for model in arms(build):
        optimizers = {p: torch.optim.AdamW([p], lr=0.01) for p in model.parameters()}

        def step(parameter: nn.Parameter, optimizers: Any = optimizers) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            for index in range(3):
                args, kwargs = make_call(inputs, 3, seed=index)
                loss(model(*args, **kwargs), model).backward()
                assert all(p.grad is None for p in model.parameters())
        states.append({name: bits(p) for name, p in model.named_parameters()})
    assert states[0] == states[1]


def test_hooks_that_change_the_gradient_are_obeyed() -> None:
    states = []
    for model in arms(mixed):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1) * 2)
        for index in range(2):
            args, _ = make_call(images, 3, seed=index)
            weighted_sum(model(*args)).backward()
        states.append([bits(p.grad) for p in model.parameters()])
    assert states[0] == states[1]


def test_hooks_on_inputs_and_outputs_fire_with_the_same_gradients() -> None:
    logs = []
    for model in arms(mixed):
        log: list[Any] = []
        x = torch.ones(3, 3, 8, 8, requires_grad=True)
        x.register_hook(lambda g, log=log: log.append(("input", bits(g))))
        y = model(x)
        y.register_hook(lambda g, log=log: log.append(("output", bits(g))))
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda g, log=log, name=name: log.append((name, bits(g))))
        weighted_sum(y).backward()
        logs.append(log)
    assert logs[0] == logs[1]


def test_retained_gradients_of_inputs_and_outputs_match() -> None:
    found = []
    for model in arms(mixed):
        x = torch.ones(3, 3, 8, 8, requires_grad=True) * 2
        x.retain_grad()
        y = model(x)
        y.retain_grad()
        weighted_sum(y).backward()
        found.append((bits(x.grad), bits(y.grad)))
    assert found[0] == found[1]


# --- stolen, not copied ---------------------------------------------------------------------------------------------


@each_case
def test_gradients_are_handed_over_without_a_copy_where_eager_does_not_copy(build: Any, inputs: Any, loss: Any) -> None:
    """Autograd steals a gradient that nobody else holds: the tensor hook's gradient is then the one in .grad."""
    stolen = []
    for model in arms(build):
        places: dict[str, int] = {}
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda g, name=name, places=places: places.update({name: g.data_ptr()}))
        for index in range(2):
            model.zero_grad(set_to_none=True)
            args, kwargs = make_call(inputs, 3, seed=index)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(11)
                loss(model(*args, **kwargs), model).backward()
        # Eager may leave two parameters with one gradient between them (the biases of an LSTM): it counts once.
        kept = {p.grad.data_ptr(): p.nbytes for n, p in model.named_parameters() if _stolen(p, places.get(n))}
        stolen.append(sum(kept.values()))
    assert stolen[1] >= stolen[0], "eager steals more bytes of gradients than the fitted model does"


def _stolen(parameter: nn.Parameter, place: int | None) -> bool:
    return parameter.grad is not None and parameter.grad.data_ptr() == place


@each_case
def test_gradients_own_no_more_bytes_than_eagers(build: Any, inputs: Any, loss: Any) -> None:
    """A gradient that is a view into something larger would keep it alive."""
    sizes = []
    for model in arms(build):
        args, kwargs = make_call(inputs, 3, seed=0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            loss(model(*args, **kwargs), model).backward()
        sizes.append({n: p.grad.untyped_storage().nbytes() for n, p in model.named_parameters() if p.grad is not None})
    larger = {name: (size, sizes[0][name]) for name, size in sizes[1].items() if size > sizes[0][name]}
    assert not larger


@each_case
def test_gradients_share_no_memory_and_are_not_written_after_they_were_handed_over(
    build: Any, inputs: Any, loss: Any
) -> None:
    _, model = arms(build)
    seen: dict[nn.Parameter, Any] = {}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.update({p: bits(p.grad)}))
    args, kwargs = make_call(inputs, 3, seed=0)
    loss(model(*args, **kwargs), model).backward()
    assert seen and all(bits(p.grad) == value for p, value in seen.items())
    places = [p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None]
    assert len(places) == len(set(places))


def test_the_parameters_gradient_does_not_alias_the_gradient_given_to_backward() -> None:
    for build in (
        lambda: Apply(lambda m, x: x + m.b, b=(3, 6)),
        lambda: Apply(lambda m, x: (x + m.b).view(6, 3), b=(3, 6)),
    ):
        kept = []
        for model in arms(build):
            y = model(torch.zeros(3, 6))
            given = torch.ones(y.shape)
            y.backward(given)
            given.mul_(5)
            kept.append(bits(model.b.grad))
        assert kept[0] == kept[1]


def test_gradient_accumulation_adds_into_the_same_tensor_as_eager_does() -> None:
    same = []
    for model in arms(mixed):
        places = []
        for index in range(3):
            args, _ = make_call(images, 3, seed=index)
            weighted_sum(model(*args)).backward()
            places.append([p.grad.data_ptr() for p in model.parameters()])
        same.append(places[0] == places[1] == places[2])
    assert same[0] == same[1]


# --- data-parallel training -----------------------------------------------------------------------------------------


@pytest.fixture
def one_process() -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def with_an_unused_layer() -> nn.Module:
    return Apply(lambda m, x: m.a(x), a=nn.Linear(6, 6), unused=nn.Linear(6, 6))


PARALLEL = {
    "plain": (normalised, {}),
    "gradients as views of buckets": (normalised, {"gradient_as_bucket_view": True}),
    "static graph": (normalised, {"static_graph": True}),
    "small buckets": (normalised, {"bucket_cap_mb": 1e-4}),
    "unused parameters": (with_an_unused_layer, {"find_unused_parameters": True}),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("build", "options"), list(PARALLEL.values()), ids=list(PARALLEL))
def test_a_fitted_model_inside_distributed_data_parallel_matches(build: Any, options: dict[str, Any]) -> None:
    traces = []
    for model in arms(build):
        parallel = nn.parallel.DistributedDataParallel(model, **options)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        trace = []
        for step in range(4):
            args, _ = make_call(rows, 3, seed=step)
            if step == 2 and not options.get("static_graph"):
                with parallel.no_sync():
                    parallel(*args).square().sum().backward()
            parallel(*args).square().sum().backward()
            trace += [bits(p.grad) for p in parallel.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        traces.append(trace)
    assert traces[0] == traces[1]
