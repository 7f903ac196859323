"""The commands that run studies: `gradmm compare` and those beside it.

Each looks at its arguments before Prefect takes its seconds to start. A study's flow is `flows.<study>.<study>`;
what it is given besides the recipe, a function here makes of the arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.local_run import local_run, progress_on_stderr
from deployments.options import add_recipe, add_root, read_recipe

if TYPE_CHECKING:
    from gradmm_core.recipe import Recipe
    from gradmm_core.study_record import StudyRecord

#: Of the studies along fine-tuning.
REAL_ROWS = 1000

ABLATIONS = Path(__file__).with_name("ablations.yaml")


def add_studies(commands: Any) -> None:
    """Adds their parsers to those of `gradmm`."""

    def study(name: str, words: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=words)
        add_recipe(command)
        add_root(command)
        command.add_argument("--seeds", type=int, nargs="+", metavar="SEED",
                             help="of fine-tuning (default: the recipe's finetune_eval.seeds)")  # fmt: skip
        command.add_argument("--verbose", action="store_true", help="show Prefect's log too")
        command.set_defaults(command=run_study, study=name)
        return command

    def add_arms(command: argparse.ArgumentParser, default: str) -> None:
        command.add_argument(
            "--arms", nargs="+", metavar="ARM", help=f"what to hold them against (default: {default})"
        )

    def add_epsilons(command: argparse.ArgumentParser, words: str) -> None:
        command.add_argument("--epsilon", type=float, nargs="+", metavar="EPSILON", help=words)

    compare = study("compare", "hold a recipe's texts against baselines, at several sizes")
    compare.add_argument(
        "--sizes", type=int, nargs="+", metavar="N", help="texts in all (default: 5 10 20 50 100)"
    )
    add_arms(compare, "all")
    add_epsilons(compare, "with these guarantees too; each is one more release from the data")

    scarce = study("scarce", "make many texts from few real rows, and hold them against these rows")
    scarce.add_argument("--rows", type=int, nargs="+", metavar="N", help="real rows in all (default: 5 10 20 50)")

    transfer = study("transfer", "fine-tune other models on a recipe's texts")
    transfer.add_argument("--models", nargs="+", default=[], metavar="MODEL", help="hub ids or folders")
    add_arms(transfer, "before zero-shot random real-1k")

    ablate = study("ablate", "hold a recipe's texts against those of its versions without a part")
    ablate.add_argument("--ablations", type=Path, default=ABLATIONS, metavar="FILE",
                        help="a YAML list of versions (default: the one that comes with gradmm)")  # fmt: skip
    ablate.add_argument("--only", nargs="+", default=[], metavar="NAME", help="some of them")

    epsilon = study("epsilon", "what the noise of each guarantee costs")
    add_epsilons(epsilon, "each is one release from the data (default: 0.01 0.05 0.2 1)")

    distribution = study("distribution", "how near a recipe's texts are to real ones, beside others")
    add_arms(distribution, "zero-shot rerank random")

    for name, words in (
        ("gradients", "how near a recipe's texts and others are to real gradients along fine-tuning"),
        ("bounds", "hold the theory's bounds along fine-tuning against what happens"),
    ):
        command = study(name, words)
        add_arms(command, "zero-shot random")
        command.add_argument("--learning-rate", type=float, metavar="RATE",
                             help="of every arm (default: the recipe's middle one)")  # fmt: skip
        command.add_argument("--real-rows", type=int, default=REAL_ROWS, metavar="N",
                             help=f"train rows that stand for the real data (default: {REAL_ROWS})")  # fmt: skip


def run_study(options: argparse.Namespace) -> int:
    """Checks, runs and prints one study."""
    if options.seeds:
        options.overrides = [*options.overrides, f"finetune_eval.seeds={list(dict.fromkeys(options.seeds))}"]
    recipe = read_recipe(options.recipe, options)
    plan = _PLANS[options.study](recipe, options)
    with local_run(options.root, options.verbose) as wait_for_server:
        from gradmm_core.artifacts import Root
        from gradmm_core.study_pages import study_page

        run = getattr(import_module(f"flows.{options.study}"), options.study)
        wait_for_server()
        command = ("gradmm", *options.arguments)
        with progress_on_stderr():
            record: StudyRecord = run(recipe, root=str(options.root), **plan, command=command)
    print(study_page(record))
    print(f"tables and picture: {Root(path=options.root).runs / record.run_id}")
    return 0


def _compare(recipe: Recipe, options: argparse.Namespace) -> dict[str, Any]:
    from gradmm_core.arm_recipes import check_plan, sizes_of
    from gradmm_core.arms import ARMS

    plan = {
        "sizes": tuple(options.sizes or sizes_of(recipe)),
        "arms": tuple(options.arms or ARMS),
        "epsilons": tuple(options.epsilon or ()),
    }
    check_plan(recipe, **plan)
    return plan


def _scarce(recipe: Recipe, options: argparse.Namespace) -> dict[str, Any]:
    from gradmm_core.arm_recipes import check_few
    from gradmm_core.arms import FEW

    few = tuple(options.rows or FEW)
    check_few(recipe, few)
    return {"few": few}


def _transfer(recipe: Recipe, options: argparse.Namespace) -> dict[str, Any]:
    from gradmm_core.arm_recipes import check_models

    check_models(recipe, options.models)
    return {"models": tuple(options.models), **_arms(recipe, options)}


def _ablate(recipe: Recipe, options: argparse.Namespace) -> dict[str, Any]:
    from gradmm_core.ablations import check_ablations, read_ablations

    ablations = read_ablations(options.ablations, options.only)
    check_ablations(recipe, ablations)
    return {"ablations": ablations}


def _epsilon(recipe: Recipe, options: argparse.Namespace) -> dict[str, Any]:
    from gradmm_core.arm_recipes import check_epsilons
    from gradmm_core.arms import EPSILONS

    epsilons = tuple(options.epsilon or EPSILONS)
    check_epsilons(recipe, epsilons)
    return {"epsilons": epsilons}


def _path(recipe: Recipe, options: argparse.Namespace) -> dict[str, Any]:
    from gradmm_core.arm_recipes import check_path, middle_rate
    from gradmm_core.arms import ARMS_OF

    plan = {
        "arms": tuple(options.arms or ARMS_OF[options.study]),
        "learning_rate": middle_rate(recipe) if options.learning_rate is None else options.learning_rate,
        "real_rows": options.real_rows,
    }
    check_path(recipe, **plan)
    return plan


def _arms(recipe: Recipe, options: argparse.Namespace) -> dict[str, Any]:
    from gradmm_core.arm_recipes import all_texts, check_plan
    from gradmm_core.arms import ARMS_OF

    arms = tuple(options.arms or ARMS_OF[options.study])
    check_plan(recipe, [all_texts(recipe)], arms, [])
    return {"arms": arms}


_PLANS: Mapping[str, Callable[[Recipe, argparse.Namespace], dict[str, Any]]] = {
    "compare": _compare,
    "scarce": _scarce,
    "transfer": _transfer,
    "ablate": _ablate,
    "epsilon": _epsilon,
    "distribution": _arms,
    "gradients": _path,
    "bounds": _path,
}
