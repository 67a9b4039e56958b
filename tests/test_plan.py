"""Plans: what is read, what is refused and in which words, and what belongs to a run's identity."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from evalkit import plan as plans
from evalkit.budget import Budget
from evalkit.errors import UsageError
from evalkit.plan import DECISIVE, INDIFFERENT, Plan, load, shipped
from evalkit.policies import build
from evalkit.policies import shipped as shipped_policies
from evalkit.settings import Settings

ROOT = Path(__file__).parent.parent
SIX = ("piqa", "hellaswag", "copa", "winogrande", "openbookqa", "boolq")
LEAST: dict[str, Any] = {"title": "A test", "models": ["m"], "policies": ["h2o"], "budgets": [0.1], "tasks": ["copa"]}
ROW = {"policy": "h2o", "budget": 0.2, "task": "copa", "accuracy": 70}


def reference(**changes: Any) -> dict[str, Any]:
    return {"source": "A paper, table 1", "rows": [{**ROW, **changes}]}


def planned(**changes: Any) -> Plan:
    return Plan.model_validate({**LEAST, **changes})


@pytest.fixture
def refused(tmp_path):
    """What `load` says of a file with this in it, without the file's name."""

    def says(content: str | bytes | dict[str, Any]) -> str:
        path = tmp_path / "some.yaml"
        text = yaml.safe_dump(content, sort_keys=False) if isinstance(content, dict) else content
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(UsageError) as caught:
            load(path)
        line = str(caught.value)
        assert line.startswith(str(path))
        assert "\n" not in line
        return line.removeprefix(str(path)).removeprefix(": ")

    return says


# Reading


def test_names_stand_for_models_and_policies_without_more_to_say():
    plan = planned(
        models=["m", {"name": "m", "args": {"dtype": "float32"}}], policies=["h2o:paper", {"name": "h2o", "knobs": {"a": 1}}]
    )
    assert [(choice.name, choice.args) for choice in plan.models] == [("m", {}), ("m", {"dtype": "float32"})]
    assert [(choice.name, choice.knobs) for choice in plan.policies] == [("h2o:paper", {}), ("h2o", {"a": 1})]


def test_budgets_are_shares_percents_or_tokens():
    plan = planned(budgets=[0.1, "20%", 1.0, 256, "1e-3"])
    assert plan.budgets == tuple(Budget.of(given) for given in ("10%", "0.2", "100%", 256, 0.001))


def test_budgets_that_differ_are_written_differently():
    near = ("0.1234567", "0.1234568", "33.333333%", "256")
    assert [Budget.of(str(Budget.of(given))) for given in near] == [Budget.of(given) for given in near]
    assert str(Budget.of(0.07)) == "7%"


def test_full_is_measured_once_and_first_where_it_is_left_out():
    measured = planned(policies=["h2o", {"name": "kivi", "budgets": [0.2, 0.5]}]).measured()
    assert [(choice.name, [str(budget) for budget in choice.budgets]) for choice in measured] == [
        ("full", ["100%"]),
        ("h2o", ["10%"]),
        ("kivi", ["20%", "50%"]),
    ]


def test_full_stays_where_the_plan_puts_it():
    assert [choice.name for choice in planned(policies=["h2o", "full"], budgets=[0.1, 0.5]).measured()] == ["h2o", "full"]


def test_a_plan_never_changes():
    with pytest.raises(ValueError, match="frozen"):
        planned().limit = 3


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + yaml.safe_dump(LEAST).encode())
    assert load(str(path)) == planned()


def test_defaults_are_those_of_the_model_arguments():
    shared = Plan.model_fields.keys() & Settings.model_fields.keys()
    assert shared == {"attn", "overlength", "row_tokens", "prefill_chunk", "offload"}
    for name in shared:
        assert Plan.model_fields[name].default == Settings.model_fields[name].default
    for name in ("attn", "overlength", "offload"):
        assert Plan.model_fields[name].annotation == Settings.model_fields[name].annotation


def test_reading_a_plan_imports_neither_torch_nor_lm_eval():
    code = "import sys, evalkit.plan as p; p.load('paper'); print({'torch', 'lm_eval', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True, cwd=ROOT).stdout == "set()\n"


# Refusals

FIELDS = [
    ({"taks": ["x"]}, "unknown field taks (did you mean 'tasks'?): a plan takes title, models,"),
    ({"policies": ["h2o", {"name": "x", "knob": {}}]}, "unknown field policies.1.knob (did you mean 'knobs'?): policies.1 takes"),
    ({"seeds": {"subsets": 1}}, "unknown field seeds.subsets (did you mean 'subset'?): seeds takes subset, fewshot"),
    ({"reference": reference(acuracy=1)}, "unknown field reference.rows.0.acuracy (did you mean 'accuracy'?): reference.rows.0 takes"),
    ({7: 1}, "unknown field 7: a plan takes"),
    ({"policies": [{"knobs": {}}]}, "policies.0.name is missing: policies.0 needs name"),
    ({"policies": ["h2o", 3]}, "policies.1=3 is not allowed: give a name or a mapping of name, knobs, budgets"),
    ({"policies": ["h2o", {"name": "h2o", "knobs": 3}]}, "policies.1.knobs=3 is not allowed: give a mapping"),
    ({"reference": 3}, "reference=3 is not allowed: give a mapping of source, note, rows"),
    ({"title": "two\nlines"}, r"title='two\nlines' is not allowed: give one line of text"),
    ({"title": 3}, "title=3 is not allowed: give text"),
    ({"tasks": "copa"}, "tasks='copa' is not allowed: give a list"),
    ({"tasks": []}, "tasks=[] is not allowed: give at least one entry"),
    ({"policies": [{"name": "h2o", "budgets": []}]}, "policies.0.budgets=[] is not allowed: give at least one entry"),
    ({"tasks": ["a", "b", "a"]}, "tasks.2='a' is not allowed: it repeats entry 0: give each once"),
    ({"models": ["m", {"name": "m"}]}, "models.1={'name': 'm'} is not allowed: it repeats entry 0: give each once"),
    ({"budgets": [0.1, "10%"]}, "budgets.1='10%' is not allowed: it repeats entry 0: give each once"),
    ({"protocols": ["stream"] * 2}, "protocols.1='stream' is not allowed: it repeats entry 0: give each once"),
    (
        {"policies": [{"name": "x", "knobs": {"a": 1}}, "x", {"name": "x", "knobs": {"a": 1}, "budgets": [0.5]}]},
        "policies.2={'name': 'x', 'knobs': {'a': 1}, 'budgets': [0.5]} is not allowed: it repeats entry 0: give each once, with",
    ),
    ({"budgets": [1]}, "budgets.0=1 is not allowed: write 100% for all, or 2 tokens or more"),
    ({"budgets": [0.1, 1.5]}, "budgets.1=1.5 is not allowed: give a share (0.1 or 10%) or a whole number"),
    ({"budgets": [True]}, "budgets.0=True is not allowed: "),
    ({"policies": [{"name": "x", "budgets": [0]}]}, "policies.0.budgets.0=0 is not allowed: "),
    ({"policies": [{"name": "x", "knobs": {"budget": 0.1}}]}, "policies.0.knobs.budget=0.1 is not allowed: it is no knob: give budgets"),
    ({"policies": [{"name": "full", "budgets": [0.1]}]}, "policies.0.budgets=[0.1] is not allowed: full keeps everything: leave it out"),
    ({"models": [{"name": "m", "args": {"attn": "flash"}}]}, "models.0.args.attn='flash' is not allowed: it has no place among a model's"),
    ({"protocols": ["batch"]}, "protocols.0='batch' is not allowed: give 'prompt' or 'stream'"),
    ({"limit": 0}, "limit=0 is not allowed: it should be greater than or equal to 1"),
    ({"limit": True}, "limit=True is not allowed: give a whole number"),
    ({"limit": "9"}, "limit='9' is not allowed: give a whole number"),
    ({"margin": float("nan")}, "margin=nan is not allowed: it should be a finite number"),
    ({"prefix": 1}, "prefix=1 is not allowed: give true or false"),
    ({"prefix": True}, "prefix=True is not allowed: it is made of examples: give fewshot, 1 or more"),
    ({"prefix": True, "fewshot": 0}, "prefix=True is not allowed: it is made of examples: give fewshot, 1 or more"),
    ({"reference": reference(accuracy=101)}, "reference.rows.0.accuracy=101 is not allowed: it should be less than or equal to 100"),
    ({"reference": reference(task="cope")}, "reference.rows.0.task='cope' is not allowed: the plan does not measure it (did you mean"),
    ({"reference": reference(policy="quest")}, "reference.rows.0.policy='quest' is not allowed: the plan does not measure it"),
    ({"reference": {"source": "A", "rows": [ROW, {**ROW, "accuracy": 1}]}}, "reference.rows.1={"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "line"), FIELDS, ids=[line[:40] for _, line in FIELDS])
def test_a_field_that_cannot_be_is_named_with_what_is_allowed(refused, changes, line):
    assert refused({**LEAST, **changes}).startswith(line)


def test_a_missing_field_is_named_with_those_that_are_needed(refused):
    given = {name: value for name, value in LEAST.items() if name != "models"}
    assert refused(given) == "models is missing: a plan needs title, models, policies, budgets, tasks"


def test_what_was_given_is_cut_short(refused):
    assert refused({**LEAST, "limit": "long" * 99}) == f"limit='{('long' * 99)[:56]}... is not allowed: give a whole number"


def test_a_date_is_no_argument_until_it_is_quoted(refused):
    dated = yaml.safe_dump(LEAST).replace("- m\n", "- {name: m, args: {revision: 2024-01-31}}\n")
    assert refused(dated).startswith("models.0.args.revision=datetime.date(2024, 1, 31) is not allowed: give text (in quotes")


FILES = [
    ("", " is empty: a plan needs title, models,"),
    ("# only a comment\n", " is empty: a plan needs title, models,"),
    ("- a\n- b\n", " holds ['a', 'b'], not fields: a plan needs title, models,"),
    ("a: 1\nb: [2\nc: 3\n", ", line 3: expected ',' or ']', but got ':': mend the YAML"),
    ("title: a\nb: c: d\n", ", line 2: mapping values are not allowed here: mend the YAML"),
    ("title: a\ntasks: []\ntitle: b\n", ", line 3: field 'title' is given twice: mend the YAML"),
    ("seeds:\n  subset: 1\n  subset: 2\n", ", line 3: field 'subset' is given twice: mend the YAML"),
    ("title: a\nlimit: 2024-13-45\n", ", line 2: month must be in 1..12: mend the YAML"),
    ("title: a\nlimit: !!python/object:x.Y {}\n", ", line 2: could not determine a constructor for the tag"),
    ("title: a\nb: \x07\n", ", line 2: special characters are not allowed: mend the YAML"),
    (b"title: caf\xe9\n", " is not UTF-8 (byte 10): save it as UTF-8"),
]


@pytest.mark.parametrize(("content", "line"), FILES, ids=range(len(FILES)))
def test_a_file_that_holds_no_fields_is_refused_with_the_line(refused, content, line):
    assert refused(content).startswith(line)


def test_what_is_no_file_is_refused_with_what_there_is(tmp_path):
    names = r"give FILE\.yaml or all-policies, core, core-stream, demo, long-prompts, paper"
    with pytest.raises(UsageError, match=rf"papers\.yaml \(No such file or directory\): {names} \(did you mean 'paper'\?\)$"):
        load(tmp_path / "papers.yaml")
    with pytest.raises(UsageError, match=rf"cannot read {tmp_path} \(Is a directory\): {names}"):
        load(tmp_path)
    with pytest.raises(
        UsageError, match=r"plan 'papr' is not known \(did you mean 'paper'\?\): give all-policies, .* or FILE\.yaml"
    ):
        load("papr")


# Identity


def leaves(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """The dotted names of all fields of a plan; what lies below an indifferent field is indifferent with it."""
    for name, field in model.model_fields.items():
        parts = () if above + name in INDIFFERENT else parts_in(field.annotation)
        yield from (leaf for part in parts for leaf in leaves(part, f"{above}{name}.")) if parts else [above + name]


def parts_in(annotation: Any) -> tuple[type[plans.Part], ...]:
    """The parts of a plan that a type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, plans.Part):
        return (annotation,)
    return tuple(part for inner in get_args(annotation) for part in parts_in(inner))


def dotted(given: Any, above: str) -> set[str]:
    """The dotted names of the leaves of an identity, where a name of DECISIVE is a leaf."""
    if above in DECISIVE or not isinstance(given, dict | list):
        return {above}
    entries = [(above, entry) for entry in given] if isinstance(given, list) else [(f"{above}.{k}", v) for k, v in given.items()]
    return {name for place, entry in entries for name in dotted(entry, place.removeprefix("."))}


def test_every_field_takes_a_side():
    assert not DECISIVE & INDIFFERENT
    assert set(leaves(Plan)) == DECISIVE | INDIFFERENT


def test_the_identity_holds_what_can_change_a_number_and_nothing_else():
    assert dotted(planned(reference=reference()).identity(), "") == DECISIVE


OTHER: dict[str, dict[str, Any]] = {
    "models.name": {"models": ["n"]},
    "models.args": {"models": [{"name": "m", "args": {"dtype": "float32"}}]},
    "policies.name": {"policies": ["tova"]},
    "policies.knobs": {"policies": [{"name": "h2o", "knobs": {"every_step": True}}]},
    "policies.budgets": {"policies": [{"name": "h2o", "budgets": [0.2]}]},
    "budgets": {"budgets": [0.1000001]},
    "protocols": {"protocols": ["stream"]},
    "tasks": {"tasks": ["copa", "piqa"]},
    "fewshot": {"fewshot": 2},
    "prefix": {"fewshot": 2, "prefix": True},
    "limit": {"limit": 2},
    "seeds.subset": {"seeds": {"subset": 1}},
    "seeds.fewshot": {"seeds": {"fewshot": 1}},
    "overlength": {"overlength": "skip"},
    "attn": {"attn": "eager"},
    "row_tokens": {"row_tokens": 2048},
    "prefill_chunk": {"prefill_chunk": 2048},
    "offload": {"offload": False},
    "shard": {"shard": 16},
    "noise_floor": {"noise_floor": True},
    "title": {"title": "Another"},
    "margin": {"margin": 2},
    "reference": {"reference": reference()},
}


@pytest.mark.parametrize("name", sorted(DECISIVE | INDIFFERENT))
def test_a_field_changes_the_digest_if_it_can_change_a_number(name):
    assert (planned(**OTHER[name]).identity() == planned().identity()) == (name in INDIFFERENT)


def test_the_prefix_alone_changes_the_digest():
    assert planned(fewshot=2, prefix=True).identity() != planned(fewshot=2).identity()


def test_what_says_the_same_has_one_digest():
    alike = planned(models=[{"name": "m", "args": {"a": 1, "b": 2}}], policies=["full", "h2o"], budgets=["10%"])
    assert alike.identity() == planned(models=[{"args": {"b": 2, "a": 1}, "name": "m"}]).identity()


# The plans that ship


def cells(plan: Plan) -> list[str]:
    return [f"{choice.name}@{budget}" for choice in plan.measured() for budget in choice.budgets]


@pytest.mark.parametrize("name", shipped())
def test_every_cell_of_a_shipped_plan_can_be_built(name):
    plan = load(name)
    for choice in plan.measured():
        for budget in choice.budgets:
            for protocol in plan.protocols:
                build(choice.name, budget, **choice.knobs).check(protocol)


def test_the_paper_plan_has_fifteen_cells_on_six_tasks():
    plan = load("paper")
    budgets = ("2%", "4%", "10%", "20%", "30%", "50%", "100%")
    assert plan.tasks == SIX
    assert cells(plan) == ["full@100%", *(f"{name}@{budget}" for name in ("h2o", "infinigen") for budget in budgets)]


def test_the_demo_needs_the_mini_suite_alone():
    plan = load("demo")
    assert plan.tasks == tuple(f"mini_{task}" for task in SIX)
    assert (plan.limit, len(cells(plan))) == (12, 9)


def test_the_plan_of_all_policies_leaves_none_out():
    plan = load("all-policies")
    assert {choice.name.partition(":")[0] for choice in plan.measured()} == set(shipped_policies())
    assert plan.tasks == SIX


def test_on_long_prompts_every_policy_acts():
    plan = load("long-prompts")
    assert plan.prefix
    for choice in plan.measured():
        policy = build(choice.name, choice.budgets[-1], **choice.knobs)
        assert policy.passive or policy.acts_on(1024), choice.name
