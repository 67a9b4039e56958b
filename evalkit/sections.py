"""Puts a report into words: a table for each task and for the mean, knees and notes; computes nothing and knows no run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .formats import Section, Told, Word
from .report import MEAN, SHARES, Report, size
from .spots import Entry

SIGNS = {"ok": "ok", "worse": "worse", "inconclusive": "?"}
TONES = {"ok": "good", "worse": "bad"}
ABOUT_CELL = ("policy", "budget", "label", "key", "share", "full", "floor", "bytes_per_document")


def told(report: Report) -> Told:
    """Return a report as every format has it: the same for the same packs, but for `aside` in JSON."""
    return Told(sections(report), rows(report), timeless(report))


def save(report: Report, folder: Path) -> list[Path]:
    """Write report.md, report.csv and report.json into `folder`; return their paths."""
    return told(report).save(folder)


def timeless(report: Report) -> dict[str, Any]:
    """Return a report as JSON has it: with the seconds, and what is read off them, in `aside` and nowhere else."""
    told = report.as_dict()
    cells = [cell for group in told["groups"] for cell in group["cells"]]
    told["aside"]["cells"] = {cell["key"]: seconds for cell in cells if (seconds := cell.pop("seconds")) is not None}
    told["aside"]["pareto"] = [group["pareto"].pop("seconds") for group in told["groups"]]
    return told


def rows(report: Report) -> list[Entry]:
    """Return a row for each model, protocol, cell and task, and for the mean, with every field but the seconds."""
    found = []
    for group in report.groups:
        fields = group["cells"][0]["tasks"][group["tasks"][0]["name"]]
        for cell in group["cells"]:
            about = {"model": group["model"], "protocol": group["protocol"], **{name: cell[name] for name in ABOUT_CELL}}
            for task in group["tasks"]:
                of_task = {name: task[name] for name in ("chance", "total", "subset", "truncated", "skipped")}
                found.append({**about, "task": task["name"], **of_task, **cell["tasks"][task["name"]]})
            shares = {name: cell[name] for name in SHARES}
            found.append({**about, "task": MEAN, **dict.fromkeys(of_task), **dict.fromkeys(fields), **cell["mean"], **shares})
    return found


# Sections


def sections(report: Report) -> list[Section]:
    """Return a report's tables and what is to be said beside them."""
    found = [Section(report.title or "Report", 1, lines=unfinished(report.incomplete))]
    for group in report.groups:
        found += _group(report, group)
    return [*found, _legend(report), _provenance(report)]


def unfinished(incomplete: Sequence[str]) -> list[str]:
    """Return what is missing of a run, a line for each task."""
    counts = Counter(name.rpartition("/")[0] for name in incomplete)
    return [f"Not finished: {at} lacks {count} pack{'s' if count > 1 else ''} and is left out." for at, count in counts.items()]


def _group(report: Report, group: Entry) -> Iterator[Section]:
    yield Section(f"{group['model']}, protocol {group['protocol']}", 2, lines=[*_knees(group), *_noise(group), *_front(group)])
    for task in group["tasks"]:
        name = task["name"]
        measured = [cell["tasks"][name] for cell in group["cells"]]
        yield _grid(name, group, partial(_on_task, name), list(_of_task(task, measured)))
    names = ", ".join(task["name"] for task in group["tasks"])
    yield _grid("mean", group, lambda cell: _accuracy(cell["mean"], cell), [f"Unweighted mean of {names}."])
    note = "Shares of what the full cache would hold and read, whole model, mean of the tasks."
    yield _grid("held / read", group, lambda cell: Word(f"{share(cell['held'])} / {share(cell['read'])}"), [note])
    if counted := [task for task in group["tasks"] if task["paged"]]:
        yield _paged(group, counted)
    if report.reference:
        yield _published(report.reference, group)


def _grid(title: str, group: Entry, word: Callable[[Entry], Word], lines: Sequence[str]) -> Section:
    """A table with a row for each policy and a column for each budget."""
    cells = {(cell["policy"], cell["budget"]): cell for cell in group["cells"]}
    budgets = sorted({budget for _, budget in cells}, key=size)
    table = [
        [Word(policy), *(word(cells[policy, budget]) if (policy, budget) in cells else Word("") for budget in budgets)]
        for policy in dict.fromkeys(policy for policy, _ in cells)
    ]
    return Section(title, 3, ["policy", *(spaced(budget) for budget in budgets)], table, lines)


def _paged(group: Entry, tasks: Sequence[Entry]) -> Section:
    """The full cache of all prompts in one piece, in blocks and in shared blocks, beside what the cells hold of them."""
    stored = {task["name"]: task["paged"] for task in tasks}
    block = tasks[0]["paged"]["block"]
    ways = {f"full, in blocks of {block}": "paged_bytes", f"full, in shared blocks of {block}": "shared_bytes"}
    lines = {way: {name: one[what] for name, one in stored.items()} for way, what in ways.items()}
    labels = [cell["label"] for cell in group["cells"] if not cell["full"]]
    lines |= {label: {name: one["held"].get(label) for name, one in stored.items()} for label in labels}
    whole = {name: one["stored_bytes"] for name, one in stored.items()}
    table = [[Word("full, in one piece"), *(Word(f"{size:,} B") for size in whole.values())]]
    for line, sizes in lines.items():
        table.append([Word(line), *(Word(of_whole(size, whole[name])) for name, size in sizes.items())])
    note = (
        "What all prompts of a task would take at once, of the full cache in one piece, at 2 bytes a number. The last block of each "
        "prompt stands empty in part; full blocks of prompts that begin alike are shared."
    )
    return Section("memory", 3, ["cache", *stored], table, [note])


def _on_task(task: str, cell: Entry) -> Word:
    return _accuracy(cell["tasks"][task], cell)


def _accuracy(entry: Entry, cell: Entry) -> Word:
    """An accuracy in percent; but for full's the difference in points, whether it is significant, the verdict and the marks."""
    accuracy = f"{100 * entry['accuracy']:.1f}"
    if entry["verdict"] is None:
        return Word(accuracy)
    star = "*" if entry["significant"] else ""
    marks = f"{' †' if entry['greyed'] else ''}{' ‡' if cell['floor'] else ''}"
    words = f"{accuracy} ({points(entry['difference'])}{star}) {SIGNS[entry['verdict']]}{marks}"
    return Word(words, "dim" if marks else TONES.get(entry["verdict"], ""))


def _of_task(task: Entry, measured: Sequence[Entry]) -> Iterator[str]:
    """What stands under a task's table."""
    asked = f"A seeded random {task['n']} of {task['total']}" if task["subset"] else f"All {task['n']}"
    yield f"{asked} documents. Chance: {100 * task['chance']:.1f} %."
    least = [entry["detectable"] for entry in measured if entry["detectable"] is not None]
    if least:
        low, high = (f"{100 * limit:.1f}" for limit in (min(least), max(least)))
        span = low if low == high else f"{low} to {high}, by how often a cell's answers flip"
        yield f"Smallest difference that this many documents would show (power 80 %, level 5 %), in points: {span}."
    for what in ("truncated", "skipped"):
        if task[what]:
            yield f"{task[what]} of the documents were longer than the model takes and {what}."


def _knees(group: Entry) -> Iterator[str]:
    """The headline: for each policy, the smallest budget that is ok on the mean, then on each task."""
    for policy in dict.fromkeys(knee["policy"] for knee in group["knees"]):
        found = {knee["task"]: knee for knee in group["knees"] if knee["policy"] == policy}
        headline = _knee(found.pop(MEAN))
        yield f"{policy}: smallest budget that is ok: {headline} (mean); {', '.join(f'{_knee(found[task])} ({task})' for task in found)}"


def _knee(knee: Entry) -> str:
    told = [spaced(knee["budget"])] if knee["budget"] else []
    return "; ".join([*told, *([knee["note"]] if knee["note"] else [])])


def _noise(group: Entry) -> Iterator[str]:
    if noise := group["noise"]:
        moved = "without bound" if noise["furthest"] is None else f"by at most {noise['furthest']:.2g} nats"
        yield (
            f"Noise floor: the full cache, batched otherwise, picks another answer on {noise['flips']} of {noise['n']} documents; "
            f"log-likelihoods move {moved}."
        )


def _front(group: Entry) -> Iterator[str]:
    labels = {cell["key"]: cell["label"] for cell in group["cells"]}
    for cost, what in (("bytes", "bytes held"), ("read", "entries read")):
        front = ", ".join(labels[key] for key in group["pareto"][cost])
        yield f"Pareto front of mean accuracy against {what}: {front or 'not known'}."


def _published(reference: Mapping[str, Any], group: Entry) -> Section:
    """Published accuracies beside those measured for the same policy, budget and task, whatever the model."""
    ours = {(cell["policy"], size(cell["budget"]), task): entry for cell in group["cells"] for task, entry in cell["tasks"].items()}
    table = []
    for row in reference["rows"]:
        mine = ours.get((row["policy"], size(row["budget"]), row["task"]))
        names = (row.get("model") or "", row["policy"], spaced(str(row["budget"])), row["task"])
        found = f"{100 * mine['accuracy']:.1f}" if mine else ""
        table.append([*map(Word, names), Word(f"{row['accuracy']:.1f}"), Word(found)])
    note = [reference["note"]] if reference.get("note") else []
    header = ["published for", "policy", "budget", "task", "published", f"ours ({group['model']})"]
    return Section("published", 3, header, table, [f"Accuracy in percent. Source: {reference['source']}", *note])


LEGEND = (
    "Accuracy in percent; in brackets the difference to full on the same documents, in percentage points.",
    (
        "An asterisk: the difference is significant, p below 0.05 after Holm's adjustment over the cells of the table. For a task p is "
        "McNemar's exact one (where documents share a passage, no smaller than the clustered one), for the mean normal. Cells at 100 % "
        "that pick what full picks are the full cache and are not counted."
    ),
    (
        "ok: the 95 % interval of the difference lies above {margin} points; worse: it lies below 0; ?: neither. That a difference is "
        "not significant does not make it ok."
    ),
    (
        "†: the policy acted on fewer than half of the prompts (for the mean: of some task). ‡: it cannot hold as little as its budget. "
        "Such a cell is never ok and gives no smallest budget."
    ),
)


def _legend(report: Report) -> Section:
    return Section("How to read it", 2, lines=[line.format(margin=points(-report.margin)) for line in LEGEND])


def _provenance(report: Report) -> Section:
    return Section("Where it comes from", 2, lines=[f"{name}: {value}" for name, value in flat(report.provenance).items()])


def flat(value: Any, where: str = "") -> dict[str, str]:
    """Return the leaves of nested mappings and lists by their dotted way; those that say nothing (null) are left out."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        value = {item.get("name", str(place)): item for place, item in enumerate(value)}
    if isinstance(value, dict):
        below = [flat(item, f"{where}.{name}" if where else name) for name, item in value.items()]
        return {at: leaf for leaves in below for at, leaf in leaves.items()}
    return {} if value is None else {where: ", ".join(map(str, value)) if isinstance(value, list) else str(value)}


def points(difference: float) -> str:
    """A difference in percentage points, with its sign."""
    return f"{round(100 * difference, 1) + 0.0:+.1f}"


def share(value: float | None) -> str:
    """A share in percent."""
    return "-" if value is None else f"{100 * value:.0f} %"


def of_whole(size: float | None, whole: float) -> str:
    """A size in percent of the whole, to a tenth."""
    return "-" if size is None or not whole else f"{100 * size / whole:.1f} %"


def spaced(budget: str) -> str:
    """A budget as people write it: 10 %, 256 tokens."""
    return budget.replace("%", " %") if "%" in budget else f"{budget} tokens"
