"""The only package that knows lm-eval: shows it the `kv` models and runs its tasks; knows no single policy.

`kv` takes `policy=NAME`; `kv_<name>` is the same for one policy. Both are made when they are asked for.
"""

import sys

from .. import hook
from .model import PolicyLM


def __getattr__(name: str) -> type[PolicyLM]:
    """Make `kv` and `kv_<policy>`."""
    if hook.models().get(name) != f"{__name__}:{name}":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = type(name, (PolicyLM,), {"POLICY": name.partition("_")[2] or None, "__module__": __name__, "__doc__": PolicyLM.__doc__})
    globals()[name] = made
    return made


def register() -> None:
    """Show the kv models to lm-eval, whether or not the start-up hook is there."""
    hook.register()


def run_lm_eval(arguments: list[str]) -> int:
    """Run lm-eval's own command line in this process; return its exit code."""
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
    return 0
