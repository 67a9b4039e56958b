"""The options of `evalkit size`; knows how they are written, imports late."""

from typing import Annotated

import typer


def size(
    model: Annotated[
        str | None, typer.Option(help="A folder, config.json, GGUF file, hub name or known name; else the default model.")
    ] = None,
    context: Annotated[str, typer.Option(help="Tokens of each sequence, as 4096 or 32k.")] = "4k",
    batch: Annotated[int, typer.Option(help="Sequences.", min=1)] = 1,
    policy: Annotated[str, typer.Option(help="Policies with commas.")] = "full,h2o,snapkv,streaming_llm,quest,kivi,infinigen",
    budget: Annotated[str, typer.Option(help="Budgets with commas, as 0.1,512.")] = "0.1,0.3",
    dtype: Annotated[str, typer.Option(help="Of keys and values, such as bfloat16.")] = "bfloat16",
    tensor_parallel: Annotated[int, typer.Option(help="Devices that share out the key/value heads.", min=1)] = 1,
    block: Annotated[int, typer.Option(help="Tokens of a block, where the cache is paged.", min=1)] = 16,
    by_layer: Annotated[bool, typer.Option("--by-layer", help="Also layer by layer.")] = False,
    kind: Annotated[str, typer.Option("--format", help="terminal, md, csv, latex or json.")] = "terminal",
) -> None:
    """Say, from a model's config alone, what the cache of each policy takes on each device and in host memory."""
    from .formats import chosen
    from .size import Load, asked, element, tokens

    chosen(kind)
    load = Load(tokens=tokens(context), batch=batch, element=element(dtype), devices=tensor_parallel, block=block)
    asked(model, load, policy, budget, by_layer=by_layer).put(kind)
