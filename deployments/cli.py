"""The command `gradmm`. Imports are late, so that a mistake in the arguments is told at once."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deployments.local_run import local_run, progress_on_stderr
from deployments.options import add_changes, add_recipe, add_root, parse_location, read_recipe
from deployments.study_commands import add_studies
from flows.stopping import stopped_by_signals
from gradmm_core.errors import InputError, ServerGone, WithheldError
from gradmm_core.location import Location, reach, read_bytes

OK, OURS, YOURS, INTERRUPTED = 0, 1, 2, 130

#: Errors of the operating system that the user can do something about.
ENVIRONMENT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, 2 for what the user can mend (said in one line), or 1 for what we must."""
    options = _parser().parse_args(arguments)
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    # Prefect, on its first import at a terminal, and the hub's library would tell their makers that they are used.
    os.environ.setdefault("DO_NOT_TRACK", "1")
    try:
        with stopped_by_signals(), _for_the_owner_only():
            return options.command(options)
    except InputError as error:
        print(f"gradmm: {error}", file=sys.stderr)
        if isinstance(error, ServerGone):
            _end_at_once(YOURS)
        return YOURS
    except OSError as error:
        if error.errno not in ENVIRONMENT_ERRORS:
            raise
        where = error.filename or getattr(options, "root", "the disk")
        print(
            f"gradmm: {where}: {error.strerror}; finished stages are kept, make room and run again",
            file=sys.stderr,
        )
        return YOURS
    except WithheldError as error:
        print(f"gradmm: {error}", file=sys.stderr)
        return OURS
    except KeyboardInterrupt:
        print("gradmm: stopped; finished stages and shards are kept, the same command goes on", file=sys.stderr)
        return INTERRUPTED


@contextmanager
def _for_the_owner_only() -> Iterator[None]:
    """What is written within, by the servers and workers that are started too, is for nobody else to read."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _end_at_once(status: int) -> None:
    """Python's own end would wait, minutes long, for Prefect to send what no server takes any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gradmm", description="Private text in, synthetic training text out.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a recipe here and now")
    add_recipe(run)
    add_root(run)
    run.add_argument("--force", action="append", default=[], metavar="STAGE",
                     help="run this stage even if it is cached (repeatable)")  # fmt: skip
    run.add_argument("--verbose", action="store_true", help="show Prefect's log too")
    run.set_defaults(command=_run)

    add_studies(commands)

    serve = commands.add_parser("serve", help="serve recipes as Prefect deployments")
    serve.add_argument("recipes", nargs="*", metavar="RECIPE",
                       help="what to serve (default: all that come with gradmm)")  # fmt: skip
    serve.add_argument("--recipes", dest="folder", type=Path, metavar="DIR", help="serve this folder's too")
    serve.add_argument("--cron", metavar="CRON", help="when each is to run by itself, in UTC: '0 6 * * *'")
    serve.add_argument("--limit", type=int, default=1, metavar="N", help="runs at once (default: 1)")
    serve.add_argument("--port", type=int, metavar="PORT", help="of the local server (default: 4200)")
    add_changes(serve)
    add_root(serve)
    serve.set_defaults(command=_serve)

    notify = commands.add_parser("notify", help="say that a served recipe's data have changed: it runs")
    notify.add_argument("recipe", metavar="RECIPE", help="the name of a recipe that is served")
    notify.set_defaults(command=_notify)

    privacy = commands.add_parser("privacy", help="what a recipe's data have spent, and what is left")
    add_recipe(privacy)
    add_root(privacy)
    privacy.set_defaults(command=_privacy)

    audit = commands.add_parser("audit", help="audit a recipe's noise mechanism with canaries; reads no data")
    add_recipe(audit)
    audit.set_defaults(command=_audit)

    runs = commands.add_parser("runs", help="list finished runs, newest first")
    add_root(runs)
    runs.set_defaults(command=_runs)

    diff = commands.add_parser("diff", help="what two runs do not share: settings, data, code, libraries, figures")
    diff.add_argument("first", metavar="RUN", help="a run's id from `gradmm runs`, or its folder")
    diff.add_argument("second", metavar="RUN")
    add_root(diff)
    diff.set_defaults(command=_diff)

    report = commands.add_parser("report", help="print where a run's report is, or open it")
    report.add_argument("run", metavar="RUN", help="a run's id from `gradmm runs`, or its folder")
    report.add_argument("--open", action="store_true", help="in a browser")
    add_root(report)
    report.set_defaults(command=_report)

    clean = commands.add_parser("clean", help="remove what no run, release or ledger refers to")
    add_root(clean)
    clean.add_argument("--keep-days", type=float, default=7, metavar="DAYS",
                       help="keep what is younger, for runs that are still going on (default: 7)")  # fmt: skip
    clean.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    clean.set_defaults(command=_clean)

    publish = commands.add_parser("publish", help="upload a run's release folder to the Hugging Face hub")
    publish.add_argument("run", type=parse_location, metavar="RUN",
                         help="a run's folder, ROOT/runs/<time>-<recipe>")  # fmt: skip
    publish.add_argument("--repo", required=True, metavar="OWNER/NAME", help="the data set repository")
    publish.add_argument("--public", action="store_true", help="for everyone to see (default: private)")
    publish.add_argument("--without-guarantee", action="store_true", help="though the run had no epsilon")
    publish.set_defaults(command=_publish)

    recipes = commands.add_parser("recipes", help="list the recipes and presets, or show a recipe")
    recipes.add_argument("--show", metavar="RECIPE", help="print all settings of one recipe")
    add_changes(recipes)
    recipes.set_defaults(command=_recipes)
    return parser


def _run(options: argparse.Namespace) -> int:
    from gradmm_core.artifacts import Root
    from tasks.stages import OF_STUDIES, STAGES

    recipe = read_recipe(options.recipe, options)
    known = [stage for stage in STAGES if stage not in OF_STUDIES]
    unknown = sorted(set(options.force) - set(known))
    if unknown:
        raise InputError(f"no stage {unknown[0]!r}", "--force", f"choose from {', '.join(known)}")
    with local_run(options.root, options.verbose) as wait_for_server:
        from deployments.summary import print_summary
        from flows.distil import distil
        from gradmm_core.run_record import RunRecord

        wait_for_server()
        blocks = {name: getattr(recipe, name) for name in type(recipe).model_fields}
        with progress_on_stderr():
            record: RunRecord = distil(**blocks, root=str(options.root), force=tuple(options.force))  # pyright: ignore
    print_summary(record, Root(path=options.root))
    return OK


def _serve(options: argparse.Namespace) -> int:
    from functools import partial

    from deployments.serve import recipes_to_serve, serve
    from gradmm_core.artifacts import Root

    if options.limit < 1:
        raise InputError("no run could ever start", "--limit", "give at least 1")
    recipes = recipes_to_serve(options.recipes, options.folder, partial(read_recipe, options=options))
    Root(path=options.root).prepare()
    serve(recipes, options.root, cron=options.cron, limit=options.limit, port=options.port)
    return OK


def _notify(options: argparse.Namespace) -> int:
    from deployments.notify import notify

    notify(options.recipe)
    print(f"gradmm/{options.recipe} runs in a few seconds, if it is served")
    return OK


def _privacy(options: argparse.Namespace) -> int:
    from deployments.summary import print_privacy
    from gradmm_core.ledger import Ledger

    recipe = read_recipe(options.recipe, options)
    reach(options.root)
    print_privacy(recipe, Ledger.of(options.root.resolve(), recipe.ledger))
    return OK


def _audit(options: argparse.Namespace) -> int:
    from deployments.summary import print_audit
    from gradmm_core.canary_release import audit_release
    from gradmm_core.preflight import released_target
    from gradmm_core.privacy import gaussian_mechanism
    from gradmm_core.release_norms import ReleaseNorms

    recipe = read_recipe(options.recipe, options)
    mechanism = gaussian_mechanism(recipe.privacy)
    if mechanism is None:
        raise InputError("the recipe has no epsilon to audit", "privacy.epsilon", "--set privacy.epsilon=1")
    norms = ReleaseNorms.of(mechanism.clipping_norm, released_target(recipe).probe_share)
    audit = audit_release(mechanism, norms, recipe.mechanism_audit, recipe.seed)
    print_audit(audit, mechanism)
    return OK if audit.passes else OURS


def _runs(options: argparse.Namespace) -> int:
    from deployments.history import past_runs, print_runs

    print_runs(*past_runs(options.root), options.root)
    return OK


def _diff(options: argparse.Namespace) -> int:
    from deployments.history import find_run, print_differences

    print_differences(find_run(options.first, options.root), find_run(options.second, options.root))
    return OK


def _report(options: argparse.Namespace) -> int:
    import webbrowser

    from deployments.history import find_run

    report = find_run(options.run, options.root).report.resolve()
    if not report.is_file():
        raise InputError("is missing", str(report), "run the recipe again: what is cached takes seconds")
    print(report)
    if options.open and not webbrowser.open(_local_copy(report).as_uri()):
        raise InputError("no browser was found", "--open", "open the file yourself")
    return OK


def _local_copy(report: Location) -> Path:
    """A report that a browser can open: as it is, or a copy in a folder that only the user can read."""
    if isinstance(report, Path):
        return report
    copy = Path(tempfile.mkdtemp(prefix="gradmm-")) / report.name
    copy.write_bytes(read_bytes(report))
    return copy


def _clean(options: argparse.Namespace) -> int:
    from deployments.clean import clean

    clean(options.root, options.keep_days, options.dry_run)
    return OK


def _publish(options: argparse.Namespace) -> int:
    from gradmm_core.publish import publish_release

    url = publish_release(
        options.run / "release",
        options.repo,
        private=not options.public,
        without_guarantee=options.without_guarantee,
    )
    print(url)
    return OK


def _recipes(options: argparse.Namespace) -> int:
    import yaml

    from deployments.recipe_files import preset_description, preset_names, recipe_names

    if options.show:
        recipe = read_recipe(options.show, options)
        print(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True), end="")
        return OK
    if options.preset or options.overrides:
        raise InputError("no recipe to change", "--preset" if options.preset else "--set", "add --show RECIPE")
    for name in recipe_names():
        print(f"{name:20} {read_recipe(name, options).description}")
    print("\npresets, for --preset:")
    for name in preset_names():
        print(f"{name:20} {preset_description(name)}")
    return OK


if __name__ == "__main__":
    sys.exit(main())
