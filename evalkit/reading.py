"""Reads fields from a YAML file and says in one line what is wrong with them; knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from .errors import UsageError, nearest

Model = TypeVar("Model", bound=BaseModel)
Step = str | int  # of the way to a field: a name, or a place in a list


def read(path: Path, model: type[Model], otherwise: str) -> Model:
    """Return what the YAML file at `path` says, as `model` has it; `otherwise` tells what to give where there is no such file.

    Raises UsageError, in one line with the file, the field, what was given and what is allowed.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}): give {otherwise}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from None
    fields = _parsed(path, text)
    return checked(fields, model, str(path))


def checked(fields: object, model: type[Model], where: str) -> Model:
    """Return `fields` as `model` has them; `where` they are from stands at the head of what UsageError says."""
    if not isinstance(fields, dict):
        held = "is empty" if fields is None else f"holds {_short(fields)}, not fields"
        raise UsageError(f"{where} {held}: a {model.__name__.lower()} needs {_required(model)}")
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise UsageError(f"{where}: {_told(error, model)}") from None


def refusal(reason: str, *inside: Step) -> PydanticCustomError:
    """Return what a validator raises to refuse its value, or what lies `inside` of it: a field, a place in a list."""
    return PydanticCustomError("refused", "{reason}", {"reason": reason, "inside": inside})


# From text to fields


class _Loader(yaml.SafeLoader):
    """YAML without two traps: of a field given twice PyYAML takes the last, and an impossible date tells no line."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value]
        for place, (key, _) in enumerate(node.value):
            if key.value in keys[:place]:
                raise yaml.constructor.ConstructorError(None, None, f"field {key.value!r} is given twice", key.start_mark)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None


def _parsed(path: Path, text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.reader.ReaderError as error:
        line, problem = text.count("\n", 0, error.position) + 1, error.reason
    except yaml.MarkedYAMLError as error:
        line, problem = error.problem_mark.line + 1, error.problem
    raise UsageError(f"{path}, line {line}: {problem}: mend the YAML")


# From fields that cannot be to a line about them

_WANTED = {
    "tuple_type": "a list", "too_short": "at least one entry", "dict_type": "a mapping", "string_type": "text",
    "string_pattern_mismatch": "one line of text", "int_type": "a whole number", "float_type": "a number", "bool_type": "true or false",
}  # fmt: skip
_UNKNOWN = ("extra_forbidden", "invalid_key")


def _told(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the line on the first thing that is wrong; unknown fields first, since one may be why another is missing."""
    problem = min(error.errors(include_url=False), key=lambda problem: problem["type"] not in _UNKNOWN)
    inside = problem.get("ctx", {}).get("inside", ())
    path = (*problem["loc"], *inside)
    field, owner = ".".join(map(str, path)), ".".join(map(str, path[:-1])) or f"a {model.__name__.lower()}"
    if problem["type"] in _UNKNOWN:
        known = _part(model, path[:-1]).model_fields
        return f"unknown field {field}{nearest(str(path[-1]), known)}: {owner} takes {', '.join(known)}"
    if problem["type"] == "missing":
        return f"{field} is missing: {owner} needs {_required(_part(model, path[:-1]))}"
    given = problem["input"]
    for step in inside:
        given = given[step]
    return f"{field}={_short(given)} is not allowed: {_allowed(problem, model)}"


def _allowed(problem: ErrorDetails, model: type[BaseModel]) -> str:
    kind = problem["type"]
    if kind in _WANTED:
        return f"give {_WANTED[kind]}"
    if kind == "model_type":
        fields = _part(model, problem["loc"]).model_fields
        return f"give {'a name or ' if 'name' in fields else ''}a mapping of {', '.join(fields)}"
    if kind == "literal_error":
        return f"give {problem['ctx']['expected']}"
    return problem["msg"].removeprefix("Value error, ").replace("Input should", "it should")


def _part(model: type[BaseModel], path: tuple[Step, ...]) -> type[BaseModel]:
    """Return the model that `path` leads to."""
    for step in path:
        if isinstance(step, str):
            model = next(_models(model.model_fields[step].annotation))
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Find the models in a type such as `tuple[Model, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _required(model: type[BaseModel]) -> str:
    return ", ".join(name for name, field in model.model_fields.items() if field.is_required())


def _short(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 60 else text[:57] + "..."
