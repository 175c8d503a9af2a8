"""`memfit verify NET`: are the results of a fitted model bit for bit those of eager?"""

from __future__ import annotations

import argparse

import torch

from memfit import zoo
from memfit.cli.options import add_fitting, add_network, fit_options, num_threads
from memfit.cli.screen import Screen
from memfit.report.step_module import TrainingStep
from memfit.report.verify import both_arms, compare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_network(parser)
    add_fitting(parser, steps=3)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Exit code 0 if exact (of a lossy policy all but the gradients), 1 if not."""
    options = fit_options(arguments)
    screen.progress(f"building {arguments.network}")
    example = zoo.load(arguments.network, batch=arguments.batch, image=arguments.image, seed=arguments.seed)
    step, call = TrainingStep.of(example)
    with num_threads(arguments.threads):
        threads = torch.get_num_threads()
        eager, fitted = both_arms(step, call, seed=arguments.seed, options=options)
        screen.progress("capturing")
        verdict = compare(
            eager,
            fitted,
            steps=arguments.steps,
            after_step=lambda step: screen.progress(f"step {step} of {arguments.steps}, both ways"),
        )
    screen.done()
    if screen.json:
        found = {"network": arguments.network, "policy": options.policy, "without": sorted(options.without)}
        screen.object(verdict.to_dict() | found | {"threads": threads, "torch": torch.__version__})
    else:
        screen.line(f"{arguments.network}: {verdict}")
    return 0 if verdict.holds else 1
