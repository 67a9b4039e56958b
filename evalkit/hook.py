"""Shows the `kv` models to lm-eval where it does not look for plug-ins; knows only names.

An interpreter that starts runs the line of `evalkit.pth` (from Python 3.15 on, what `evalkit.start` names). It puts a
finder in front of the others that wakes up for `lm_eval.models` alone; every other program pays next to nothing.
"""

import os
import sys

TYPE_CHECKING = False  # importing typing would cost more than everything else here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

TARGET = "lm_eval.models"
SWITCH = "EVALKIT_NO_HOOK"


def models() -> dict[str, str]:
    """Return each model name and the `module:attribute` behind it: `kv`, `kv_<policy>` for each policy file, and `kv_vllm`."""
    folder = os.path.join(os.path.dirname(__file__), "policies")
    policies = sorted(file[:-3] for file in os.listdir(folder) if file.endswith(".py") and not file.startswith("_"))
    ours = {name: f"evalkit.harness:{name}" for name in ("kv", *(f"kv_{policy}" for policy in policies))}
    return {**ours, "kv_vllm": "evalkit.harness.vllm:VllmLM"}


def switched_off() -> bool:
    """Return whether the environment forbids the hook."""
    return os.environ.get(SWITCH, "0") not in ("", "0")


def register() -> None:
    """Put `models()` into lm-eval's registry, as names that it resolves when asked; those already there stay.

    Does nothing for an lm-eval that finds the entry points itself. Raises ImportError where there is no lm-eval.
    """
    import importlib

    # lm-eval looks for its own models only while its registry is empty, so they must be there before ours.
    importlib.import_module(TARGET)
    registry = importlib.import_module("lm_eval.api.registry")
    if not discovers_plugins(registry):
        for name, target in models().items():
            if name not in registry.model_registry:
                registry.model_registry.register(name, target=target)


def discovers_plugins(registry: "ModuleType") -> bool:
    """Return whether this `lm_eval.api.registry` reads the entry points of other distributions by itself."""
    return hasattr(registry, "load_plugins")


def find_spec(name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None) -> "ModuleSpec | None":
    """Return the spec of `lm_eval.models` so that `register` follows its execution, or None for any other module."""
    if name != TARGET or switched_off():
        return None
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec(name, path, target)
    if spec is not None and spec.loader is not None:
        execute = spec.loader.exec_module

        def execute_then_register(module: "ModuleType") -> None:
            execute(module)
            _register_or_say_why_not()

        spec.loader.exec_module = execute_then_register  # type: ignore[method-assign]
    return spec


class Finder:
    """What `evalkit.pth` spells out in its line."""

    find_spec = staticmethod(find_spec)


def install() -> None:
    """Put the finder in front of the others. Never raises."""
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)


def _register_or_say_why_not() -> None:
    try:
        register()
    except Exception as error:  # lm-eval itself must go on working
        print(f"evalkit: lm-eval cannot see the kv models ({error!r}); run: evalkit doctor", file=sys.stderr)
