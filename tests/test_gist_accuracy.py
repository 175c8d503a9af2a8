"""The accuracy study: arms of a seed differ by the rounding alone, the statistics are right, and all of it is told."""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from memfit.cli.benchmarks import gist_accuracy, networks
from memfit.cli.screen import Screen
from memfit.codecs.registry import codec
from memfit.errors import BadOption, MemfitError
from memfit.plan.policies.gist import FORMATS
from memfit.report import accuracy_data, accuracy_training
from memfit.report.accuracy import study_accuracy, trainings
from memfit.report.accuracy_data import batches, digits
from memfit.report.accuracy_networks import NETWORKS, Mark, build, marks, reduce_immediately, round_trip
from memfit.report.accuracy_rows import (
    ALL,
    Difference,
    Duel,
    bits_per_element,
    duels_of,
    false_alarms,
    rows_of,
    sparkline,
)
from memfit.report.accuracy_training import DELAYED, IMMEDIATE, NUDGED, REFERENCE, Recipe, Trained, Training, train

SHORT = Recipe(epochs=1, batch=32, num_train=96, num_test=200)
ARMS = (("fp32", REFERENCE), ("fp8", DELAYED), ("int4", DELAYED), ("fp32", IMMEDIATE), ("fp8", IMMEDIATE))


@pytest.fixture(autouse=True)
def needs_scikit_learn(request: pytest.FixtureRequest) -> None:
    if "without_scikit_learn" not in request.fixturenames:
        pytest.importorskip("sklearn")


@pytest.fixture
def without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine that does not have it, digits that are already loaded included."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    accuracy_data.digits.cache_clear()
    yield
    accuracy_data.digits.cache_clear()


def one_step(model: nn.Module) -> tuple[torch.Tensor, ...]:
    """The output, the gradients and the buffers of a step in training mode, with dropout drawn from one seed."""
    data = digits(num_train=96, num_test=200)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        output = model.train()(data.train_images[:32])
        nn.functional.cross_entropy(output, data.train_labels[:32]).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return (output.detach(), *gradients, *model.buffers())


def is_equal(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True))


def without_marks(model: nn.Module) -> nn.Module:
    """The same network of ordinary layers only."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Mark):
                setattr(module, name, nn.Identity())
    assert not marks(model)
    return model


@pytest.mark.parametrize("network", NETWORKS)
def test_immediate_reduction_to_fp32_is_the_plain_network_bit_for_bit(network: str) -> None:
    plain = one_step(without_marks(build(network, seed=3)))
    reduced = build(network, seed=3)
    reduce_immediately(reduced, "fp32")
    assert is_equal(one_step(reduced), plain)
    assert is_equal(one_step(build(network, seed=3)), plain)
    # And the comparison can fail: a format that rounds is told from it.
    rounded = build(network, seed=3)
    reduce_immediately(rounded, "bf16")
    assert not is_equal(one_step(rounded), plain)


def test_immediate_fp16_is_a_cast_to_half_and_back() -> None:
    x = torch.randn(4, 8, 5, 5, generator=torch.Generator().manual_seed(0))
    mark = Mark().train()
    mark.format = "fp16"
    x.requires_grad_()
    y = mark(x)
    assert torch.equal(y, x.detach().half().float()) and not torch.equal(y, x)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    (y * weights).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, weights), "straight through"
    mark.eval()
    assert mark(x) is x, "tests are in full precision"
    mark.rounds_in_eval = True
    assert torch.equal(mark(x), y)


def test_numbers_keep_their_side_of_zero() -> None:
    x = torch.tensor([1e-12, 0.0, 3.0, -1e-30] * 64)
    assert torch.equal(round_trip(x, "fp16").sign(), x.sign())


@pytest.mark.parametrize("network", NETWORKS)
def test_what_is_rounded_at_once_is_what_memfit_would_round_later(network: str) -> None:
    training = Training(network, "int8", DELAYED, seed=0)
    model = accuracy_training.prepare(training)
    one_step(model)
    encoded = [op for op in model.memfit.step.ops if op.target == "memfit.encode"]  # type: ignore[union-attr]
    rounded = [op for op in encoded if codec(op.args[-1]).is_lossy]
    # At the batch of the study: the policy leaves maps below a few kilobytes alone.
    assert len(rounded) == len(marks(model))


@pytest.mark.parametrize("network", NETWORKS)
def test_arms_of_a_seed_see_the_same_and_those_of_another_do_not(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[torch.Tensor]] = []
    weights: list[list[torch.Tensor]] = []
    step = accuracy_training._step

    def noting(model: nn.Module, optimizer: Any, images: torch.Tensor, labels: torch.Tensor) -> float:
        if not seen[-1]:
            weights.append([p.detach().clone() for p in model.parameters()])
        seen[-1] += [images.clone(), labels.clone(), torch.get_rng_state()]
        return step(model, optimizer, images, labels)

    monkeypatch.setattr(accuracy_training, "_step", noting)
    found: dict[tuple[str, str], Trained] = {}
    for arm in ARMS:
        seen.append([])
        found[arm] = train(Training(network, *arm, seed=5), SHORT)
    for others, first_weights in zip(seen, weights, strict=True):
        assert len(others) == 3 * 3
        assert is_equal(tuple(others), tuple(seen[0])) and is_equal(tuple(first_weights), tuple(weights[0]))
    seen.append([])
    train(Training(network, "fp32", REFERENCE, seed=6), SHORT)
    for index in (0, 2):  # of the first batch: its images, and what dropout is drawn from
        assert not torch.equal(seen[-1][index], seen[0][index])
    assert not is_equal(tuple(weights[-1]), tuple(weights[0]))

    reference = found["fp32", REFERENCE]
    # Forward is in full precision until an update has seen rounded gradients.
    assert found["fp8", DELAYED].first_loss == found["int4", DELAYED].first_loss == reference.first_loss
    assert found["fp8", DELAYED].losses != reference.losses
    assert found["fp8", IMMEDIATE].first_loss != reference.first_loss
    same = found["fp32", IMMEDIATE]
    assert (same.losses, same.accuracies, same.test_loss) == (
        reference.losses,
        reference.accuracies,
        reference.test_loss,
    )
    assert [one.num_rounded for one in found.values()] == [0, *[len(marks(build(network, seed=0)))] * 2, 0] + [
        found["fp8", DELAYED].num_rounded
    ]


def test_training_leaves_threads_and_random_state_alone() -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    train(Training("alexnet", "fp16", IMMEDIATE, seed=0), SHORT)
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads


def test_a_nudge_is_one_unit_in_the_last_place() -> None:
    plain = accuracy_training.prepare(Training("resnet", "fp32", REFERENCE, seed=0))
    nudged = accuracy_training.prepare(Training("resnet", "fp32", NUDGED, seed=0))
    for ours, theirs in zip(nudged.parameters(), plain.parameters(), strict=True):
        assert bool((ours > theirs).all()) and torch.equal(torch.nextafter(ours, theirs), theirs)


def test_a_plan_that_rounds_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = accuracy_training.fit
    monkeypatch.setattr(accuracy_training, "fit", lambda model, **_: fit(model, policy="gist-lossless"))
    with pytest.raises(MemfitError, match="alexnet, fp8 delayed, seed 0: the plan encodes nothing by a lossy codec"):
        train(Training("alexnet", "fp8", DELAYED, seed=0), SHORT)


def test_modes_and_formats_must_go_together() -> None:
    with pytest.raises(BadOption, match="'reference' rounds nothing: its format is 'fp32', not 'fp8'"):
        accuracy_training.prepare(Training("alexnet", "fp8", REFERENCE, seed=0))
    with pytest.raises(BadOption, match="mode 'later': unknown"):
        accuracy_training.prepare(Training("alexnet", "fp8", "later", seed=0))
    with pytest.raises(BadOption, match="network 'vgg': the accuracy study has alexnet, resnet"):
        trainings(["vgg"], FORMATS, [DELAYED], [0])
    with pytest.raises(BadOption, match="format 'fp9'"):
        trainings(["alexnet"], ["fp9"], [DELAYED], [0])


def test_the_split_is_fixed_and_its_halves_are_apart() -> None:
    small, large = digits(num_train=100, num_test=300), digits(num_train=600)
    assert len(large.test_labels) == 1797 - 600 and large.train_images.shape == (600, 1, 8, 8)
    assert torch.equal(small.test_labels, large.test_labels[-300:])
    assert abs(float(large.train_images.mean())) < 1e-5 and abs(float(large.train_images.std()) - 1) < 1e-5
    pixels = {row.numpy().tobytes() for row in large.train_images}
    assert not any(row.numpy().tobytes() in pixels for row in large.test_images)
    with pytest.raises(BadOption, match="there are 1797"):
        digits(num_train=1797)


def test_an_epoch_is_a_shuffle_in_whole_batches() -> None:
    first, second = batches(70, batch=32, seed=1, epochs=2)
    assert [len(i) for i in first] == [32, 32] and not torch.equal(first[0], second[0])
    assert torch.cat(first).unique().numel() == 64 and int(torch.cat(first).max()) < 70
    again = next(batches(70, batch=32, seed=1, epochs=1))
    assert torch.equal(first[1], again[1])
    with pytest.raises(BadOption, match="a batch of 71 is more than the 70"):
        next(batches(70, batch=71, seed=0, epochs=1))


def test_a_difference_is_paired_and_has_its_standard_error() -> None:
    # Differences 0.01, 0.02, 0.03: mean 0.02, deviation 0.01, so the standard error is 0.01 / sqrt(3).
    found = Difference.of([0.91, 0.82, 0.73], [0.9, 0.8, 0.7], resolution=0.001)
    assert found.mean == pytest.approx(0.02) and found.standard_error == pytest.approx(0.01 / math.sqrt(3))
    assert not found.within_noise and found.not_worse
    worse = Difference.of([0.9, 0.8, 0.7], [0.91, 0.82, 0.73], resolution=0.001)
    assert not worse.within_noise and not worse.not_worse
    # Two standard errors are 0.02 here, and the mean is just that, then just more.
    assert Difference.of([0.9, 0.86], [0.9, 0.9], resolution=0.001).within_noise
    edge = Difference.of([0.88, 0.85], [0.9, 0.9], resolution=0.001)
    assert (edge.mean, edge.standard_error) == (pytest.approx(-0.035), pytest.approx(0.015))
    assert not edge.within_noise


def test_false_alarms_are_students() -> None:
    # With one degree of freedom it is Cauchy's distribution; with very many, the normal one.
    assert false_alarms(2) == pytest.approx(1 - 2 / math.pi * math.atan(2), abs=1e-6)
    assert false_alarms(10) == pytest.approx(0.0766, abs=1e-4)
    assert false_alarms(100_000) == pytest.approx(math.erfc(2 / math.sqrt(2)), abs=1e-5)
    assert false_alarms(1) is None


def test_a_verdict_on_all_is_unknown_only_if_it_hangs_on_one_that_is() -> None:
    found = study_accuracy(networks=["alexnet"], formats=[], seeds=[0], num_workers=1, recipe=SHORT)
    assert found.fp16_within_noise is None and found.delayed_not_worse is None

    def verdict(*not_worse: bool | None) -> bool | None:
        duels = tuple(Duel("alexnet", "fp8", d, d) for d in (Difference(0.0, None, None, n) for n in not_worse))
        return replace(found, duels=duels).delayed_not_worse

    assert verdict(True, True) is True and verdict(True, None, False) is False and verdict(True, None) is None


def test_with_one_seed_noise_is_less_than_one_digit() -> None:
    same = Difference.of([0.9], [0.9], resolution=0.01)
    assert same.standard_error is None and same.within_noise and same.not_worse
    for theirs in (0.89, 0.91):
        unknown = Difference.of([0.9], [theirs], resolution=0.01)
        assert unknown.within_noise is None and unknown.not_worse is None
    assert Difference.of([0.905], [0.9], resolution=0.01).within_noise
    # A loss of the same half digit with every seed is less than one digit, though its standard error is nil.
    assert Difference.of([0.895, 0.895], [0.9, 0.9], resolution=0.01).within_noise


def trained(
    format: str, mode: str, seed: int, *accuracies: float, loss: float = 0.5, as_trained: float = 0.5
) -> Trained:
    training = Training("alexnet", format, mode, seed)
    return Trained(training, 2.3, (1.0, loss), accuracies, as_trained, 0.4, 5, 1, 2.0)


def test_rows_are_means_over_seeds_and_pairs_have_one_seed() -> None:
    given = [
        trained("fp32", REFERENCE, 1, 0.5, 0.9),
        trained("fp32", REFERENCE, 0, 0.3, 0.7),
        trained("fp8", DELAYED, 0, 0.2, 0.6, loss=math.nan),
        trained("fp8", DELAYED, 1, 0.4, 0.9),
        trained("fp8", IMMEDIATE, 1, 0.4, 0.5, as_trained=0.1),
        trained("fp8", IMMEDIATE, 0, 0.2, 0.5, as_trained=0.3),
    ]
    reference, delayed, immediate = rows_of(given, num_test=1000)
    assert reference.difference is None and reference.seeds == (0, 1) and reference.accuracies == (0.7, 0.9)
    assert reference.accuracy_mean == pytest.approx(0.8) and reference.accuracy_std == pytest.approx(0.2 / math.sqrt(2))
    assert reference.curve == pytest.approx((0.4, 0.8)) and reference.final_loss == 0.5
    assert delayed.difference is not None and delayed.difference.mean == pytest.approx(-0.05)
    assert delayed.difference.standard_error == pytest.approx(0.05) and delayed.difference.within_noise
    assert delayed.final_loss is None and delayed.loss_curve == (1.0, None) and delayed.num_fallbacks == 2
    assert immediate.difference is not None and immediate.difference.mean == pytest.approx(-0.3)
    assert immediate.difference_as_trained is not None
    assert immediate.difference_as_trained.mean == pytest.approx(-0.3) and immediate.num_rounded == 5
    (duel,) = duels_of(given, num_test=1000)
    assert duel.difference.mean == pytest.approx(0.25) and duel.difference.not_worse
    assert duel.difference_as_trained.mean == pytest.approx(0.3)
    more = [
        trained("fp16", mode, seed, 0.9, 0.9 if mode == DELAYED else 0.8)
        for mode in (DELAYED, IMMEDIATE)
        for seed in (0, 1)
    ]
    first, second, both = duels_of(given + more, num_test=1000)
    assert [first.format, second.format, both.format] == ["fp8", "fp16", ALL] and first == duel
    # By seed: 0.1 and 0.4 in fp8, 0.1 and 0.1 in fp16, so 0.1 and 0.25 in the mean.
    assert both.difference.mean == pytest.approx(0.175) and both.difference.standard_error == pytest.approx(0.075)
    with pytest.raises(AssertionError, match="pairs have one seed"):
        rows_of([*given, trained("fp8", IMMEDIATE, 2, 0.4, 0.5)], num_test=1000)


def test_a_sparkline_has_a_character_per_epoch() -> None:
    assert sparkline([0.0, 0.5, 1.0], low=0.0, high=1.0) == "▁▅█"
    assert sparkline([0.7, 0.7], low=0.7, high=0.7) == "▁▁"


@pytest.mark.parametrize(
    ("format", "bits"), [("fp32", 32), ("fp16", 16), ("fp10", 32 / 3), ("fp8", 8.125), ("int4", 4.125)]
)
def test_bits_are_those_of_the_codec(format: str, bits: float) -> None:
    assert bits_per_element(format) == pytest.approx(bits, rel=1e-4)


def test_without_scikit_learn_it_is_said_what_to_install(without_scikit_learn: None) -> None:
    with pytest.raises(MemfitError, match=r"pip install 'memfit\[bench\]'"):
        study_accuracy(seeds=[0], num_workers=1, recipe=SHORT)


@pytest.mark.slow  # processes of their own, which import torch
def test_workers_change_nothing() -> None:
    options: Any = {"networks": ["alexnet"], "formats": ["fp8"], "modes": [IMMEDIATE], "seeds": [0], "recipe": SHORT}
    told: list[str] = []
    here = study_accuracy(**options, num_workers=1, progress=told.append)
    pool = study_accuracy(**options, num_workers=2)
    assert len(told) == 3 and "3 of 3" in told[-1]
    assert [replace(row, train_s=0.0) for row in here.rows] == [replace(row, train_s=0.0) for row in pool.rows]


def run(monkeypatch: pytest.MonkeyPatch, *argv: str, is_json: bool) -> tuple[int, str]:
    monkeypatch.setattr(gist_accuracy, "Recipe", lambda epochs=1: replace(SHORT, epochs=epochs))
    parser = argparse.ArgumentParser()
    networks.add_arguments(parser)  # as the benchmark does
    gist_accuracy.add_arguments(parser)
    out = io.StringIO()
    code = gist_accuracy.run(parser.parse_args(argv), Screen(json=is_json, out=out))
    return code, out.getvalue()


def test_json_has_rows_curves_and_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ("--networks", "alexnet", "--formats", "fp16,int4", "--seeds", "2", "--epochs", "2", "--workers", "1")
    code, text = run(monkeypatch, *argv, is_json=True)
    found = json.loads(text)
    assert code == 0 and (found["benchmark"], found["study"]) == ("gist", "accuracy")
    rows = {(row["format"], row["mode"]): row for row in found["accuracy_rows"]}
    assert list(rows) == [
        ("fp32", "reference"),
        ("fp32", "nudged"),
        *((format, mode) for format in ("fp16", "int4") for mode in ("delayed", "immediate")),
    ]
    for (format, _mode), row in rows.items():
        assert row["seeds"] == [0, 1] and len(row["curve"]) == len(row["loss_curve"]) == 2
        assert row["curve"][-1] == pytest.approx(row["accuracy_mean"]) and 0 <= row["accuracy_mean"] <= 1
        assert row["num_rounded"] == (0 if format == "fp32" else 5)
    assert rows["fp32", "reference"]["difference"] is None
    assert rows["fp16", "delayed"]["difference"].keys() == {"mean", "standard_error", "within_noise", "not_worse"}
    assert [duel["format"] for duel in found["delayed_minus_immediate"]] == ["fp16", "int4", "all"]
    assert found["false_alarms"] == pytest.approx(0.2952, abs=1e-4)
    assert found["fp16_within_noise"] is rows["fp16", "delayed"]["difference"]["within_noise"]
    duels = [duel["difference"]["not_worse"] for duel in found["delayed_minus_immediate"]]
    assert found["delayed_not_worse"] is all(duels)
    assert (found["recipe"]["num_test"], found["recipe"]["epochs"]) == (200, 2)
    assert found["recipe"]["learning_rate"] == {"alexnet": 0.02}
    assert "2 standard errors" in found["noise_rule"]


def test_the_table_has_a_line_per_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ("--networks", "resnet", "--formats", "fp8", "--seeds", "1", "--workers", "1")
    code, text = run(monkeypatch, *argv, is_json=False)
    lines = text.splitlines()
    assert code == 0 and "96 to train on, 200 to test on, 1 epochs" in lines[0] and "1 seed" in lines[0]
    table = [line.split() for line in lines if line.startswith("resnet")]
    assert [row[1:4] for row in table[:4]] == [
        ["fp32", "32", "reference"],
        ["fp32", "32", "nudged"],
        ["fp8", "8.125", "delayed"],
        ["fp8", "8.125", "immediate"],
    ]
    assert all(row[-1][-1] in "▁▂▃▄▅▆▇█" for row in table[:4]) and table[4][:2] == ["resnet", "fp8"]
    assert "delayed: memfit's gist-lossy" in text and "within noise: |mean" in text


def test_names_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadOption, match="--formats ',' names nothing"):
        run(monkeypatch, "--formats", ",", is_json=True)
    with pytest.raises(BadOption, match="format 'fp9'"):
        run(monkeypatch, "--formats", "fp9", is_json=True)
