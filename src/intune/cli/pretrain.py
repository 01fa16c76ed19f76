"""`intune pretrain`: the agent's weights, made from a seed."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from intune.cli.endings import clean_endings, plain_errors, say, tell


def pretrain(
    out: Annotated[Path, typer.Option(help="File of weights to write, .npz.")] = Path("agent.npz"),
    seed: Annotated[int, typer.Option(min=0, help="Of scenarios, weights and exploration.")] = 0,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of playing and learning.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that play.")] = 2,
) -> None:
    """Train the agent in simulated time: the weights in the package are those of its default options."""
    with plain_errors():
        import torch

        from intune.sim.explore import Recipe
        from intune.sim.train import train
        from intune.sim.writable import check_file
        from intune.tuners.agent import save_weights

    with clean_endings():
        check_file(out)
        torch.set_num_threads(THREADS)
        recipe = Recipe(seed=seed) if rounds is None else Recipe(seed=seed, rounds=rounds)
        save_weights(out, train(recipe, jobs, tell), json.dumps(asdict(recipe)))
        say(f"weights: {out}")


THREADS = 1
"""Threads of the arithmetic: with more, sums come in another order, and on a busy machine they wait for each other."""
