"""The command `gradmm`. Commands import heavy libraries themselves, so that help and errors come at once."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import select
import signal
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Group, Parameter, validators

from gradmm.deployments.cli.options import (
    DEFAULT_ROOT,
    Changes,
    Json,
    Quiet,
    RecipeName,
    Root,
    RunName,
    Verbose,
)
from gradmm.deployments.cli.study_commands import studies
from gradmm.deployments.cli.terminal import Terminal, print_json
from gradmm.deployments.recipe_files import DEFAULT_MODEL, preset_description, preset_names, recipe_names
from gradmm.deployments.serving.local_run import for_the_owner_only, run_recipe_here
from gradmm.errors import BudgetExhausted, InputError, InputErrors, RedactedError, ServerGone
from gradmm.flows.runtime.stopping import EXIT_INTERRUPTED, STOPPED, end_at_once, stopped_by_signals
from gradmm.storage.location import Location, reach, read_bytes
from gradmm.threads import limit_spinning

EXIT_OK, EXIT_BUG, EXIT_USAGE, EXIT_PIPE_CLOSED = 0, 1, 2, 141

#: Errors of the operating system that the user can resolve.
ENVIRONMENT_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EIO, errno.EMFILE, errno.ENFILE),
}

RUNNING = Group("Make synthetic texts", sort_key=1)
RESULTS = Group("Inspect finished runs", sort_key=2)
SERVING = Group("Run as a service", sort_key=4)


app = App(
    name="gradmm",
    help="Private labelled text in, synthetic training text out. Start with `gradmm run demo`.",
    help_format="plaintext",
    version=lambda: version("gradmm"),
    console=Terminal(),
    default_parameter=Parameter(negative=(), show_default=lambda value: value or None),
    print_error=False,
    exit_on_error=False,
    group_commands=Group("Other", sort_key=5),
)
app.command(studies, name="*")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Returns:
        0; 1 for a bug of ours or a failed audit; 2 for an error that the user can resolve, said in one line; 130
        after Ctrl-C; 141 when the reader of the output has closed the pipe, as if SIGPIPE had ended the process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:  # Python's end follows: Ctrl-C cuts its hooks short, and has no effect after them
        signal.signal(signal.SIGINT, end_at_once)
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    # Opt out of the usage reports that Prefect and the hub's library send otherwise.
    os.environ.setdefault("DO_NOT_TRACK", "1")
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it warns about every retry; our error follows the last
    limit_spinning()
    try:
        with stopped_by_signals(), for_the_owner_only():
            command, bound, unparsed = app.parse_args(words)
            status = command(*bound.args, **bound.kwargs, **dict.fromkeys(unparsed, words))
            sys.stdout.flush()
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        return EXIT_PIPE_CLOSED
    except (CycloptsError, InputError) as error:
        for problem in error.problems if isinstance(error, InputErrors) else [error]:
            print(f"gradmm: {_one_line(problem, words)}", file=sys.stderr)
        if isinstance(error, ServerGone):
            _end_at_once(EXIT_USAGE)
        return EXIT_USAGE
    except OSError as error:
        if error.errno not in ENVIRONMENT_ERRORS:
            raise
        fix = "finished stages are kept: make room, change permissions or limits, and run again"
        print(f"gradmm: {InputError(str(error.strerror), str(error.filename or 'disk'), fix)}", file=sys.stderr)
        return EXIT_USAGE
    except RedactedError as error:
        print(f"gradmm: {error}", file=sys.stderr)
        return EXIT_BUG
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        return EXIT_INTERRUPTED
    return status or (EXIT_OK if words else EXIT_USAGE)


def _stdout_is_closed() -> bool:
    """Return whether stdout is a pipe without a reader, as in `gradmm runs | head -1`; then discard the rest."""
    pipe = select.poll()
    pipe.register(sys.stdout, 0)  # a closed pipe is reported as POLLERR
    closed = bool(pipe.poll(0))
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return closed


def _one_line(error: CycloptsError | InputError, words: Sequence[str]) -> InputError:
    """Return an error in the words of the command line: with `--real-rows` for `real_rows`, and with commands."""
    if isinstance(error, CycloptsError):
        chain, error.command_chain = error.command_chain or (), None  # which the message would repeat
        said = str(error).replace("Unused Tokens", "Unexpected arguments").partition(" Available commands: ")[0]
        what, _, near = said.partition(" Did you mean ")
        fix = f"did you mean {near}" if near else f"see `{' '.join(('gradmm', *chain))} --help`"
        return InputError(what[0].lower() + what[1:].rstrip("."), " ".join(chain) or "COMMAND", fix)
    name, space, rest = error.where.partition(" ")
    options = app.parse_commands(words)[1][-1].assemble_argument_collection()
    spelt = {option.name.lstrip("-").replace("-", "_").lower(): option.name for option in options}
    command = " by `gradmm privacy RECIPE --set-budget`" if isinstance(error, BudgetExhausted) else ""
    return InputError(error.what, f"{spelt.get(name, name)}{space}{rest}", error.fix + command)


def _end_at_once(status: int) -> None:
    """End the process without Python's cleanup, where Prefect retries its last requests for minutes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@app.command(group=RUNNING)
def run(
    recipe: RecipeName,
    /,
    *,
    changes: Changes = Changes(),
    root: Root = DEFAULT_ROOT,
    force: Annotated[tuple[str, ...], Parameter(metavar="STAGE")] = (),
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Make and evaluate a recipe's synthetic texts on this machine.

    Args:
        force: Run this stage even if it is cached. Repeatable.
    """
    from gradmm.storage.artifacts import Root

    loaded = changes.load(recipe)
    record = run_recipe_here(loaded, root, force, quiet, verbose)

    from gradmm.deployments.cli.history import find_run
    from gradmm.deployments.cli.summary import print_summary

    if json:
        print_json(find_run(record.run_id, root))
    elif quiet:
        print(root / "runs" / record.run_id)
    else:
        print_summary(record, Root(path=root))


@app.command(group=RUNNING)
def init(
    data: str,
    /,
    *,
    text: str | None = None,
    label: str | None = None,
    model: str = DEFAULT_MODEL,
    out: Path | None = None,
) -> None:
    """Write a recipe for your own data, from their columns, label values and size. Copies no text.

    Args:
        data: A CSV, TSV, JSON or Parquet file, a folder of them, or a folder saved by `datasets`.
        text: Column of the texts. Default: detected.
        label: Column of the labels. Default: detected.
        model: Causal language model: a local folder or a hub id.
        out: File to write. Default: the data's name with .yaml, in this folder.
    """
    from gradmm.deployments.cli.init import init

    init(data, text, label, model, out)


@app.command(group=RUNNING)
def check(recipe: RecipeName, /, *, changes: Changes = Changes(), root: Root = DEFAULT_ROOT) -> None:
    """Read a recipe's data and load its model, compute nothing, and list all problems."""
    from gradmm.deployments.serving.local_run import configure_prefect, progress_on_stderr

    loaded = changes.load(recipe)
    configure_prefect(verbose=False)
    from gradmm.deployments.cli.check import check

    with progress_on_stderr():
        check(loaded, root)


@app.command(group=RUNNING)
def privacy(
    recipe: RecipeName,
    /,
    *,
    set_budget: float | None = None,
    changes: Changes = Changes(),
    root: Root = DEFAULT_ROOT,
    json: Json = False,
) -> None:
    """Show the releases from a recipe's data, the budget they spent, and whether it covers one more.

    Args:
        set_budget: Set the total epsilon of all releases from these data first, at the recipe's delta and
            adjacency. All runs are judged by it from then on, whatever their recipes say.
    """
    from gradmm.deployments.cli.summary import check_data_are_there, print_privacy, set_budget_of
    from gradmm.privacy.ledger import Ledger

    loaded = changes.load(recipe)
    check_data_are_there(loaded)
    reach(root)
    ledger = Ledger.of(root.resolve(), loaded.ledger)
    if set_budget is not None:
        set_budget_of(loaded, ledger, set_budget)
    print_privacy(loaded, ledger, json)


@app.command(group=RUNNING)
def audit(
    recipe: RecipeName,
    /,
    *,
    changes: Changes = Changes(),
    contamination: bool = False,
    root: Root = DEFAULT_ROOT,
) -> int:
    """Audit a recipe's noise mechanism with canaries, without data; or the public model (--contamination).

    Args:
        contamination: Instead, compare train rows with test rows by the public model's own loss: it may have seen
            them before. Reads private data, and releases nothing.
    """
    from gradmm.audits.mechanism_audit import mechanism_audit
    from gradmm.config.extras import check_sampler
    from gradmm.deployments.cli.summary import print_audit
    from gradmm.privacy.release_plan import release_plan

    loaded = changes.load(recipe)
    if contamination:
        from gradmm.deployments.cli.contamination import audit_contamination

        audit_contamination(loaded, root)
        return EXIT_OK
    plan = release_plan(loaded)
    if plan.mechanism is None:
        raise InputError("the recipe has no epsilon to audit", "privacy.epsilon", "--set privacy.epsilon=1")
    check_sampler(loaded.privacy)
    result = mechanism_audit(plan.mechanism, plan.norms, loaded.mechanism_audit, loaded.seed)
    print_audit(result, plan.mechanism)
    return EXIT_OK if result.passes else EXIT_BUG


@app.command(group=RUNNING)
def recipes(
    *, show: Annotated[str | None, Parameter(metavar="RECIPE")] = None, changes: Changes = Changes()
) -> None:
    """List the recipes and presets that come with gradmm.

    Args:
        show: Print all settings of this recipe instead.
    """
    import yaml

    if show:
        settings = changes.load(show).model_dump(mode="json")
        print(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), end="")
        return
    if changes != Changes():
        raise InputError("no recipe to change", "preset" if changes.preset else "set", "add --show RECIPE")
    for name in recipe_names():
        print(f"{name:20} {changes.load(name).description}")
    print("\npresets, for --preset:")
    for name in preset_names():
        print(f"{name:20} {preset_description(name)}")


@app.command(group=RESULTS)
def runs(*, root: Root = DEFAULT_ROOT, json: Json = False) -> None:
    """List finished runs, newest first."""
    from gradmm.deployments.cli.history import print_runs

    print_runs(root, json)


@app.command(group=RESULTS)
def diff(run: RunName, other: RunName, /, *, root: Root = DEFAULT_ROOT, json: Json = False) -> None:
    """Compare two runs: settings, data, code, libraries, results."""
    from gradmm.deployments.cli.history import find_run, print_differences

    print_differences(find_run(run, root), find_run(other, root), json)


@app.command(group=RESULTS)
def report(run: RunName, /, *, open: bool = False, root: Root = DEFAULT_ROOT) -> None:
    """Print the path of a run's report.

    Args:
        open: Open the report in a browser too.
    """
    import webbrowser

    from gradmm.deployments.cli.history import find_run

    file = find_run(run, root).report.resolve()
    if not file.is_file():
        raise InputError("is missing", str(file), "run the recipe again: cached stages take seconds")
    print(file)
    if open and not webbrowser.open(_local_copy(file).as_uri()):
        raise InputError("no browser was found", "open", "open the file yourself")


def _local_copy(report: Location) -> Path:
    """Return a report that a browser can open: the file, or a copy in a folder that only the user can read."""
    if isinstance(report, Path):
        return report
    copy = Path(tempfile.mkdtemp(prefix="gradmm-")) / report.name
    copy.write_bytes(read_bytes(report))
    return copy


@app.command(group=RESULTS)
def clean(*, root: Root = DEFAULT_ROOT, keep_days: float = 7.0, dry_run: bool = False) -> None:
    """Remove files that no run, release or ledger refers to.

    Args:
        keep_days: Keep files newer than this, which unfinished runs may need.
        dry_run: List the files, and remove none.
    """
    from gradmm.deployments.cli.clean import clean

    clean(root, keep_days, dry_run)


@app.command(group=RESULTS)
def publish(
    run: RunName,
    /,
    *,
    repo: Annotated[str, Parameter(metavar="OWNER/NAME")],
    public: bool = False,
    without_guarantee: bool = False,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Upload a run's release to the Hugging Face hub.

    Args:
        repo: Data set repository.
        public: Let everybody see the repository, if it is a new one. Default: only its owner.
        without_guarantee: Publish a release that has no epsilon.
    """
    from gradmm.deployments.cli.history import check_count, find_run
    from gradmm.outputs.publish import publish_release

    found = find_run(run, root)
    check_count(found)
    print(publish_release(found.folder / "release", repo, private=not public, without_guarantee=without_guarantee))


@app.command(group=RESULTS)
def track(
    run: RunName, /, *, private: bool = False, without_guarantee: bool = False, root: Root = DEFAULT_ROOT
) -> None:
    """Log a run's release to the MLflow store that MLFLOW_TRACKING_URI names.

    Args:
        private: Log the figures of private data and the report too, to a store on this machine only.
        without_guarantee: Log a release that has no epsilon to a store elsewhere.
    """
    from gradmm.deployments.cli.history import check_count, find_run
    from gradmm.outputs.tracking import track_run

    past = find_run(run, root)
    check_count(past)
    figures = {stage.stage: stage.figures for stage in past.stages} if private else None
    print(track_run(past.folder, figures, without_guarantee))


@app.command(group=SERVING)
def serve(
    recipes: tuple[RecipeName, ...] = (),
    /,
    *,
    folder: Annotated[Path | None, Parameter("--recipes", metavar="DIR")] = None,
    cron: str | None = None,
    limit: int = 1,
    port: Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=65535))] = None,
    aws_credentials: Annotated[str | None, Parameter(metavar="BLOCK")] = None,
    changes: Changes = Changes(),
    root: Root = DEFAULT_ROOT,
) -> None:
    """Serve recipes as Prefect deployments, with a Prefect server if none is running.

    Args:
        recipes: Recipes to serve. Default: all that come with gradmm.
        folder: Serve the recipes of this folder too.
        cron: Schedule of every recipe, in UTC: '0 6 * * *'.
        limit: Concurrent runs of all recipes together; each recipe has one at most.
        port: Port of the local server. Default: 4200.
        aws_credentials: Block of the Prefect server, of the type AWS Credentials, for a root on S3. Default: AWS's
            environment variables.
    """
    from gradmm.deployments.serving.serve import recipes_to_serve, serve

    if limit < 1:
        raise InputError("no run could ever start", "limit", "give at least 1")
    served = recipes_to_serve(recipes, folder, changes.load)
    serve(served, root, cron=cron, limit=limit, port=port, aws_credentials=aws_credentials)


@app.command(group=SERVING)
def notify(recipe: str, /) -> None:
    """Report that a served recipe's data have changed, which starts a run.

    Args:
        recipe: Name of a recipe that is being served.
    """
    from gradmm.deployments.serving.notify import notify

    notify(recipe)
    print(f"gradmm/{recipe} starts in a few seconds, if it is being served")


@app.command
def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a completion script. For bash: `source <(gradmm completion bash)`."""
    print(app.generate_completion(shell=shell))


if __name__ == "__main__":
    sys.exit(main())
