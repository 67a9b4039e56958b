"""What a run is asked for, read from YAML: models, policies, budgets, protocols and tasks; knows none of them but by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    StringConstraints,
    ValidationInfo,
    field_validator,
)

from .budget import WHOLE, Budget
from .errors import UsageError, nearest
from .reading import read, refusal
from .rooms import room

FULL = "full"  # the policy that all others are compared with

# Every field takes a side, by its dotted name. What can change a number belongs to a run's identity:
DECISIVE = frozenset({
    "models.name", "models.args", "policies.name", "policies.knobs", "policies.budgets", "budgets", "protocols", "tasks",
    "fewshot", "prefix", "limit", "noise_floor", "seeds.subset", "seeds.fewshot", "overlength", "attn",
    # These change numbers by rounding only, yet a run that is taken up again must end with the same bytes.
    "row_tokens", "prefill_chunk", "offload", "shard",
})  # fmt: skip
# and what cannot, does not:
INDIFFERENT = frozenset({
    "title",  # only read
    "margin",  # applied to finished numbers
    "reference",  # other people's numbers, printed beside
})  # fmt: skip

# Arguments of lm-eval's model that the plan says elsewhere, and where.
ELSEWHERE = {
    "pretrained": "name", "policy": "policies", "preset": "policies", "budget": "budgets", "protocol": "protocols",
    "overlength": "overlength", "attn": "attn", "row_tokens": "row_tokens", "prefill_chunk": "prefill_chunk",
    "offload": "offload",
}  # fmt: skip


def distinct(key: Callable[[Any], object] = lambda entry: entry, hint: str = "give each once") -> AfterValidator:
    """Return what refuses a list with two entries of one `key`."""

    def check(entries: tuple[Any, ...]) -> tuple[Any, ...]:
        keys = [key(entry) for entry in entries]
        for place, own in enumerate(keys):
            if own in keys[:place]:
                raise refusal(f"it repeats entry {keys.index(own)}: {hint}", place)
        return entries

    return AfterValidator(check)


def _budget(given: object) -> Budget:
    """Read a budget; what is wrong with it is said without its name, which stands before."""
    try:
        return Budget.of(given)
    except UsageError as error:
        raise refusal(str(error).partition(": ")[2]) from None


def _plain(value: object) -> object:
    """Refuse what JSON cannot hold, as identities are kept in it."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise refusal("give text (in quotes, if it looks like a date), a number, true or false, or lists of these") from None
    return value


def _named(given: object) -> object:
    """Let a name stand for a mapping that holds nothing else."""
    return {"name": given} if isinstance(given, str) else given


Entry = TypeVar("Entry")
Several = Annotated[tuple[Entry, ...], Field(strict=False, min_length=1)]  # YAML's lists are no tuples, hence not strict
Line = Annotated[str, StringConstraints(strip_whitespace=True, pattern=r"^[^\n]+$")]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Plain = Annotated[Any, AfterValidator(_plain)]
Asked = Annotated[Budget, PlainValidator(_budget), PlainSerializer(str, return_type=str)]
Budgets = Annotated[Several[Asked], distinct()]


class Part(BaseModel):
    """A part of a plan: what it does not know it refuses, and it never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelChoice(Part):
    """A model: its name (what lm-eval calls pretrained) and further arguments of lm-eval's hf model, such as dtype."""

    name: Line
    args: dict[str, Plain] = {}

    @field_validator("args")
    @classmethod
    def _not_said_elsewhere(cls, args: dict[str, Any]) -> dict[str, Any]:
        for name in args.keys() & ELSEWHERE.keys():
            raise refusal(f"it has no place among a model's arguments: give {ELSEWHERE[name]}", name)
        return args


class PolicyChoice(Part):
    """A policy (`h2o`, `h2o:paper`, `./mine.py:Mine`), knobs set over its own, and budgets in place of the plan's."""

    name: Line
    knobs: dict[str, Plain] = {}
    budgets: Budgets | None = None

    @field_validator("knobs")
    @classmethod
    def _without_budget(cls, knobs: dict[str, Any]) -> dict[str, Any]:
        if "budget" in knobs:
            raise refusal("it is no knob: give budgets", "budget")
        return knobs

    @field_validator("budgets")
    @classmethod
    def _full_keeps_all(cls, budgets: tuple[Budget, ...] | None, info: ValidationInfo) -> tuple[Budget, ...] | None:
        if info.data.get("name") == FULL and budgets and not all(budget.whole for budget in budgets):
            raise refusal(f"{FULL} keeps everything: leave it out")
        return budgets


class Seeds(Part):
    """What draws the documents under a limit, and what draws the few-shot examples."""

    subset: Natural = 0
    fewshot: Natural = 1234  # lm-eval's own


class ReferenceRow(Part):
    """A published accuracy, in percent."""

    model: Line | None = None
    policy: Line
    budget: Asked
    task: Line
    accuracy: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]


class Reference(Part):
    """Published numbers to print beside ours, and where they are from."""

    source: Line
    note: Line | None = None
    rows: Annotated[Several[ReferenceRow], distinct(lambda row: (row.model, row.policy, row.budget, row.task))]


class Plan(Part):
    """A table or figure to make: every policy at every budget, on every task, under every protocol, with every model.

    `fewshot` None leaves each task its own number of examples; `prefix` takes the first ones of the split for all documents, so that
    all prompts begin alike and the beginning is computed once. `limit` is a random subset of each task's documents, drawn by
    `seeds.subset`. Prompts over `prefill_chunk` tokens are taken in in chunks. `offload` keeps entries in host memory. A record holds
    `shard` documents, or fewer long ones.
    `noise_floor` scores the full cache a second time, in rows of another size: what differs then differs by rounding alone. `margin`
    is the loss that still counts as none, in percentage points.
    """

    title: Line
    models: Annotated[Several[Annotated[ModelChoice, BeforeValidator(_named)]], distinct()]
    policies: Annotated[
        Several[Annotated[PolicyChoice, BeforeValidator(_named)]],
        distinct(lambda choice: (choice.name, choice.knobs), "give each once, with all its budgets"),
    ]
    budgets: Budgets
    protocols: Annotated[Several[Literal["prompt", "stream"]], distinct()] = ("prompt",)
    tasks: Annotated[Several[Line], distinct()]
    fewshot: Natural | None = None
    prefix: bool = False
    limit: Positive | None = None
    seeds: Seeds = Seeds()
    overlength: Literal["error", "skip", "truncate"] = "error"
    attn: Literal["sdpa", "flash", "eager"] = "sdpa"
    row_tokens: Positive = 1024
    prefill_chunk: Positive = 4096
    offload: bool | Literal["auto"] = "auto"
    shard: Positive = 32
    noise_floor: bool = False
    margin: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0
    reference: Reference | None = None

    @field_validator("prefix")
    @classmethod
    def _examples_to_share(cls, prefix: bool, info: ValidationInfo) -> bool:
        if prefix and info.data.get("fewshot", 1) in (None, 0):
            raise refusal("it is made of examples: give fewshot, 1 or more")
        return prefix

    @field_validator("reference")
    @classmethod
    def _beside_something(cls, reference: Reference | None, info: ValidationInfo) -> Reference | None:
        known = {"task": info.data.get("tasks", ()), "policy": [FULL, *(choice.name for choice in info.data.get("policies", ()))]}
        for place, row in enumerate(reference.rows if reference else ()):
            for field, names in known.items():
                if (name := getattr(row, field)) not in names:
                    raise refusal(f"the plan does not measure it{nearest(name, names)}", "rows", place, field)
        return reference

    def measured(self) -> tuple[PolicyChoice, ...]:
        """Return the policies to measure, each with the budgets that hold for it.

        `full` is always measured, once, and comes first where the plan leaves it out: all else is compared with it.
        """
        listed = any(choice.name == FULL for choice in self.policies)
        choices = self.policies if listed else (PolicyChoice(name=FULL), *self.policies)
        return tuple(choice.model_copy(update={"budgets": self._budgets(choice)}) for choice in choices)

    def _budgets(self, choice: PolicyChoice) -> tuple[Budget, ...]:
        return (WHOLE,) if choice.name == FULL else choice.budgets or self.budgets

    def identity(self) -> dict[str, Any]:
        """Return, as plain data, all that can change a number: plans whose identities agree are one run."""
        asked = self.model_copy(update={"policies": self.measured()})
        return asked.model_dump(mode="json", exclude=set(INDIFFERENT))


def shipped() -> list[str]:
    """Return the names of the plans that come with evalkit."""
    return sorted(path.stem for path in room("budgets").glob("*.yaml"))


def load(plan: str | Path) -> Plan:
    """Return the plan in a YAML file, or the shipped one of that name (`paper`; a word without `.yaml` and without a slash).

    Raises UsageError, in one line with the file, the field, what was given and what is allowed, for whatever is no plan.
    """
    path = _located(str(plan))
    return read(path, Plan, otherwise=f"FILE.yaml or {', '.join(shipped())}{nearest(path.stem, shipped())}")


def _located(plan: str) -> Path:
    if Path(plan).name != plan or plan.endswith((".yaml", ".yml")):
        return Path(plan)
    if plan not in shipped():
        raise UsageError(f"plan {plan!r} is not known{nearest(plan, shipped())}: give {', '.join(shipped())} or FILE.yaml")
    return room("budgets") / f"{plan}.yaml"
