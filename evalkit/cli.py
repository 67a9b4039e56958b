"""The `evalkit` command: turns words into calls and user errors into one line; knows nothing else, imports late."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from evalkit import __version__
from evalkit.errors import UsageError

app = typer.Typer(
    help="What a KV-cache policy costs in accuracy and in memory of the conversation, and what it buys.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models = typer.Typer(help="The models that can be fetched by name.", no_args_is_help=True)
tasks = typer.Typer(help="The tasks and where their rows come from.", no_args_is_help=True)
app.add_typer(models, name="models")
app.add_typer(tasks, name="tasks")


def main() -> None:
    """Run the command line; a user error ends it with one line and exit code 2."""
    try:
        app()
    except UsageError as error:
        print(f"evalkit: error: {error}", file=sys.stderr)
        sys.exit(2)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"evalkit {__version__}")
        raise typer.Exit


@app.callback()
def evalkit(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Hold the options that stand before a command."""


# Everything after the name is lm-eval's, --help too.
@app.command("lm-eval", add_help_option=False, context_settings={"ignore_unknown_options": True})
def lm_eval(
    arguments: Annotated[list[str] | None, typer.Argument(help="What the lm_eval command takes.")] = None,
) -> None:
    """Run lm-eval with the kv models, whether or not its own command can see them."""
    from evalkit.harness import register, run_lm_eval

    register()
    raise typer.Exit(run_lm_eval(arguments or []))


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """Say what is active, installed and missing, and what to do about it."""
    from evalkit.doctor import report

    raise typer.Exit(report(as_json=as_json))


@models.command("get")
def get_model(name: Annotated[str, typer.Argument(help="A name that 'evalkit models list' shows.")]) -> None:
    """Fetch a model once into the cache; its folder is the last line printed."""
    from evalkit.fetch import model_folder

    print(model_folder(name))


@models.command("list")
def list_models() -> None:
    """List the models that can be fetched, with the folders of those already in the cache."""
    from evalkit.fetch import KNOWN, cached

    for name, origin in KNOWN.items():
        print(f"{name}  {cached(name) or 'not in the cache'}  (hub {origin.hub}, PyPI {origin.wheel})")


@tasks.command("use")
def use_tasks(
    data: Annotated[Path, typer.Argument(help="A folder with DATA/<task>/<split>.jsonl files.")],
    out: Annotated[Path, typer.Option(help="Where to write the task files.")],
) -> None:
    """Point lm-eval's own tasks at rows on disk: write a file for each, and the line that runs them."""
    from evalkit.data import use

    written = use(data, out)
    for file in written:
        print(file)
    names = ",".join(file.stem for file in written)
    print(f"lm_eval --model kv_h2o --model_args budget=0.1 --include_path {out} --tasks {names}")
