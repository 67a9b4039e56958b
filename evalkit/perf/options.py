"""The options of `evalkit perf`; knows how they are written, imports late."""

from pathlib import Path
from typing import Annotated

import typer

perf = typer.Typer(help="What policies cost and buy in seconds and memory.", no_args_is_help=True)

POLICIES = "full,h2o,snapkv,streaming_llm,quest,kivi,infinigen"
Policies = Annotated[str, typer.Option("--policy", help="Policies with commas; full is always measured.")]
Budgets = Annotated[str, typer.Option("--budget", help="Budgets with commas, as 0.1,512.")]
Model = Annotated[
    str | None, typer.Option(help="A folder, hub name or known name, or tiny (random weights); else the default model.")
]
Dtype = Annotated[str | None, typer.Option(help="The weights' type, such as bfloat16.")]
Repeats = Annotated[int, typer.Option(help="Rounds, in each of which every policy has its turn.", min=1)]
Cap = Annotated[str | None, typer.Option(help="Memory that a measurement may take, as 4G: the process's, or on CUDA the device's.")]
Text = Annotated[str | None, typer.Option(help="A text file that prompts are cut from; else the calibration text.")]
Naive = Annotated[str | None, typer.Option(help="Policies to measure also with a prompt's attention weights made at once, T x T.")]
Uncounted = Annotated[bool, typer.Option("--uncounted", help="Measure full also with nothing counted: what counting costs.")]
Out = Annotated[Path | None, typer.Option(help="The run's folder; runs/perf-KIND unless given. One that was begun is taken up.")]


@perf.command()
def ttft(
    policy: Policies = POLICIES, prompt_tokens: Annotated[str, typer.Option(help="Prompt lengths with commas.")] = "1k,2k,4k,8k",
    budget: Budgets = "0.2", model: Model = None, dtype: Dtype = None, repeats: Repeats = 3, memory_cap: Cap = None, text: Text = None,
    naive: Naive = None, uncounted: Uncounted = False, out: Out = None,
) -> None:  # fmt: skip
    """Time to first token against prompt length, until memory runs out."""
    _measure(dict(locals()), "ttft", prompt_tokens, "prompt-tokens")


@perf.command()
def batch(
    policy: Policies = POLICIES, batch: Annotated[str, typer.Option(help="Sequences at once, with commas.")] = "1,2,4,8,16",
    prompt_tokens: Annotated[str, typer.Option(help="The longest prompt's; lengths are uniform from a quarter of it.")] = "1k",
    output_tokens: Annotated[str, typer.Option(help="Tokens that each sequence says.")] = "32",
    budget: Budgets = "0.2", model: Model = None, dtype: Dtype = None, repeats: Repeats = 3, memory_cap: Cap = None, text: Text = None,
    naive: Naive = None, uncounted: Uncounted = False, out: Out = None,
) -> None:  # fmt: skip
    """Throughput, latency and memory against the number of sequences."""
    _measure(dict(locals()), "batch", batch, "batch", prompt=prompt_tokens, output=output_tokens)


@perf.command()
def decode(
    policy: Policies = POLICIES, output_tokens: Annotated[str, typer.Option(help="Tokens said, with commas.")] = "64,128,256,512",
    prompt_tokens: Annotated[str, typer.Option(help="The prompt's.")] = "2k",
    budget: Budgets = "0.2", model: Model = None, dtype: Dtype = None, repeats: Repeats = 3, memory_cap: Cap = None, text: Text = None,
    naive: Naive = None, uncounted: Uncounted = False, out: Out = None,
) -> None:  # fmt: skip
    """Time per output token against output length."""
    _measure(dict(locals()), "decode", output_tokens, "output-tokens", prompt=prompt_tokens)


def _measure(given: dict[str, object], kind: str, over: str, name: str, prompt: str = "1", output: str = "1") -> None:
    """Measure what is asked for, and print the report."""
    import sys

    from ..showing import show
    from .asked import asked
    from .run import Perf

    found, refused = asked(given, kind, over, name, prompt, output)
    for reason in refused:
        print(f"evalkit: left out: {reason}", file=sys.stderr)
    folder = given["out"] or Path("runs") / f"perf-{kind}"
    assert isinstance(folder, Path)
    Perf(found, folder).run()
    list(show(folder, "terminal", None, None, show_text=False))
