"""The `evalkit` command: turns words into calls and user errors into one line; knows nothing else, imports late."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from evalkit import __version__
from evalkit.errors import UsageError
from evalkit.perf.options import perf
from evalkit.sizing import size

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
app.add_typer(perf, name="perf")


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


@app.command()
def policies(name: Annotated[str | None, typer.Argument(help="One policy, to see all of it.")] = None) -> None:
    """List the policies with their papers, knobs, presets and what they need."""
    from evalkit.listing import described, listed

    print(described(name) if name else listed())


@app.command()
def check(policy: Annotated[str, typer.Argument(help="A policy's name, FILE.py or FILE.py:CLASS.")]) -> None:
    """Run the contract every policy must keep on a tiny model, and say what was found; exit code 1 if it is broken."""
    from evalkit.contract import check as findings

    found = findings(policy)
    for finding in found:
        print(f"{'ok    ' if finding.passed else 'BROKEN'} {finding.name}{': ' + finding.detail if finding.detail else ''}")
    raise typer.Exit(0 if all(finding.passed for finding in found) else 1)


@app.command()
def sweep(
    plan: Annotated[str, typer.Argument(help="A plan: FILE.yaml, or the name of one that ships (paper, demo, all-policies ...).")],
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; runs/PLAN unless given. One that was begun is taken up.")
    ] = None,
    data: Annotated[Path | None, typer.Option(envvar="EVALKIT_DATA", help="A folder with DATA/<task>/<split>.jsonl files.")] = None,
    limit: Annotated[int | None, typer.Option(help="A seeded random subset of so many documents of each task.", min=1)] = None,
    jobs: Annotated[int, typer.Option(help="Worker processes, each with the model in memory.", min=1)] = 1,
    ray: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster (auto, host:port); --jobs is its number of workers.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it takes, and score nothing but a few documents.")] = False,
) -> None:
    """Score a plan's cells, resumably, in one pass over each prompt; print the report."""
    from evalkit.sweep import prepared

    job = prepared(plan, out, data, limit, jobs, ray)
    if dry_run:
        print("\n".join(job.estimate()))
        return
    job.run()
    report(job.folder)


@app.command()
def gallery(
    folder: Annotated[Path, typer.Argument(help="A folder whose folders `evalkit report RUN --out` wrote.")] = Path("results"),
    readme: Annotated[Path | None, typer.Option(help="A text with parts marked <!-- results: NAME --> to write anew.")] = None,
) -> None:
    """Write a folder's README.md out of the reports in it."""
    from evalkit.gallery import show

    _tell_written(*show(folder, readme))


@app.command()
def retention(
    out: Annotated[Path, typer.Option(help="The run's folder; one that was begun is taken up.")] = Path("runs/retention"),
    protocol: Annotated[Path | None, typer.Option(help="FILE.yaml; the one that ships with evalkit unless given.")] = None,
    model: Annotated[str | None, typer.Option(help="A hub name, folder or GGUF file; else the recall model.")] = None,
    dtype: Annotated[str | None, typer.Option(help="The weights' type, such as bfloat16.")] = None,
    policy: Annotated[str | None, typer.Option(help="Policies with commas, as 'full,h2o,quest(dense_layers=0)'.")] = None,
    budget: Annotated[str | None, typer.Option(help="Budgets with commas, as 0.1,0.3.")] = None,
    source: Annotated[str | None, typer.Option(help="builtin, lmsys, or a JSON Lines or Parquet file.")] = None,
    language: Annotated[str | None, typer.Option(help="Of the conversations, where a source tells it.")] = None,
    bucket: Annotated[str | None, typer.Option(help="Ranges of context lengths with commas, as 1k-2k,4k-8k.")] = None,
    bucket_by: Annotated[str | None, typer.Option(help="query: the context at the last one; conversation: all of it.")] = None,
    conversations: Annotated[str | None, typer.Option(help="In each bucket.")] = None,
    turns: Annotated[str | None, typer.Option(help="After which turns to ask, with commas.")] = None,
    inject_at: Annotated[str | None, typer.Option(help="Before which turn the fact is told.")] = None,
    headroom: Annotated[str | None, typer.Option(help="Positions of the model that are left free.")] = None,
    replies: Annotated[str | None, typer.Option(help="replay the source's, or generate the model's own.")] = None,
    reply_cap: Annotated[str | None, typer.Option(help="Tokens of a generated reply, at most.")] = None,
    answer_cap: Annotated[str | None, typer.Option(help="Tokens of an answer, at most.")] = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    control: Annotated[str | None, typer.Option(help="true or false: also ask without having told.")] = None,
    fuzzy: Annotated[str | None, typer.Option(help="The likeness, of 100, that counts as nearly right.")] = None,
    seed: Annotated[str | None, typer.Option(help="Draws conversations and facts.")] = None,
    together: Annotated[str | None, typer.Option(help="Conversations that go on side by side.")] = None,
    prefill_chunk: Annotated[str | None, typer.Option(help="Tokens of the chunks in which longer messages arrive.")] = None,
    margin: Annotated[str | None, typer.Option(help="The loss, in points, that still counts as none.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Worker processes, each with the model in memory; else one.", min=1)] = None,
    endpoint: Annotated[str | None, typer.Option(help="A chat server to ask instead, as http://localhost:8000/v1.")] = None,
    label: Annotated[str | None, typer.Option(help="What tables call the server's cache.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="The served model's, a hub name or folder; else an estimate.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Conversations with the server at once; else 4.", min=1)] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds for one request; else 300.", min=0.1, max=86400)] = None,
    patience: Annotated[float | None, typer.Option(help="Seconds to bear with a failing server; else 600.", min=0, max=1e6)] = None,
) -> None:
    """Tell facts, go on talking, ask for them: print what each policy still recalls, and why."""
    given = dict(locals())
    from evalkit.retention.endpoint import job

    job(given).run()
    report(out)


@app.command()
def demo(
    limit: Annotated[int | None, typer.Option(help="Items of each task.", min=1)] = None,
    out: Annotated[Path, typer.Option(help="The runs' folder; other runs there are moved aside.")] = Path("runs/demo"),
) -> None:
    """Print accuracy on the mini suite and the default model, then what the recall model retains, and write a page on each."""
    from evalkit.retention import run as recall
    from evalkit.rooms import room
    from evalkit.store import anew
    from evalkit.sweep import prepared

    sweep = prepared("demo", out / "accuracy", None, limit)
    walk = recall.prepared(room("retention") / "demo.yaml", out / "retention", {})
    for job in (sweep, walk):
        anew(job.folder, job.run, job.say)
        report(job.folder, html=job.folder / "report.html")


@app.command()
def bench(
    data: Annotated[
        Path | None, typer.Option(envvar="EVALKIT_DATA", help="As for sweep; without it the mini suite is timed.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Documents of each task.", min=1)] = 40,
    repeats: Annotated[int, typer.Option(help="Timed runs of each side, in turn; 0 to compare results only.", min=0)] = 3,
    tasks: Annotated[str | None, typer.Option(help="Tasks, with commas; else all six.")] = None,
    sweep_only: Annotated[
        bool, typer.Option("--sweep-only", help="Of evalkit's sides, time only a sweep's fifteen cells.")
    ] = False,
) -> None:
    """Time kv models beside lm-eval's hf on the same documents, each side at its best batch size."""
    from evalkit.bench import run

    run(data, limit, repeats, tasks.split(",") if tasks else None, sweep_only=sweep_only)


app.command()(size)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    kind: Annotated[str, typer.Option("--format", help="terminal, md, csv, latex or json.")] = "terminal",
    html: Annotated[Path | None, typer.Option(help="Also write a page that needs nothing beside it.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write report.md, .csv, .json and plots into a folder.")] = None,
    show_text: Annotated[
        bool, typer.Option("--show-text", help="In a retention page, also questions and answers about others' conversations.")
    ] = False,
) -> None:
    """Print a run: accuracy against budget or what is recalled, differences to full, the smallest budgets that are ok."""
    from evalkit.showing import show

    _tell_written(*show(run, kind, out, html, show_text))


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A run's folder.")],
    b: Annotated[Path, typer.Argument(help="The folder of the run that is compared with it.")],
    kind: Annotated[str, typer.Option("--format", help="terminal, md, csv, latex or json.")] = "terminal",
    cell_a: Annotated[str | None, typer.Option(help="Only this cell of A, as h2o@10%.")] = None,
    cell_b: Annotated[str | None, typer.Option(help="The cell of B to compare it with; else the same.")] = None,
) -> None:
    """Print how two runs differ on the documents both asked: B minus A for each cell and task, and what else is not the same."""
    from evalkit import compare as comparisons
    from evalkit.formats import chosen
    from evalkit.runs import Run
    from evalkit.showing import tell_missing

    chosen(kind)
    found = comparisons.compare(Run.load(a), Run.load(b), cell_a, cell_b)
    for folder, packs in zip((a, b), found.incomplete.values(), strict=True):
        tell_missing(folder, len(packs))
    comparisons.told(found).put(kind)


def _tell_written(*files: Path) -> None:
    for file in files:
        print(file, file=sys.stderr)


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
    from evalkit.data import passed_over, use

    written = use(data, out)
    for file in written:
        print(file)
    for file in passed_over(data):
        print(f"not read, no split of a task bears this name: {file}", file=sys.stderr)
    names = ",".join(file.stem for file in written)
    print(f"lm_eval --model kv_h2o --model_args budget=0.1 --include_path {out} --tasks {names}")


@tasks.command("mini")
def mini_tasks() -> None:
    """Print the folder of the mini suite, for lm_eval's --include_path."""
    from evalkit.rooms import room

    print(room("tasks") / "mini")
