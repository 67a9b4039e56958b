"""Packs documents and the cells that score them into a row: which tokens go where, and which jobs attend for them.

Knows tokens, positions and policies' declarations; knows no tokenizer and runs nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .decoding import Gulp, Wave
from .documents import Asked, Readout
from .memory import Begun, Block, Branch, Cell, Grants, Job, State
from .policy import Policy
from .simulation import Simulated
from .trie import Node, grow

Item = TypeVar("Item")

LEAST_SHARED = 8  # prompts share a beginning only where it saves this many tokens: below, equal shapes are worth more


Branches = list[tuple[Branch, list[Asked]]]  # each branch with what is asked after each of its rows


@dataclass
class _Leaf:
    """A node of an answer tree whose tokens step through a wave after some cached sequence."""

    state: State | None
    row: int
    node: Node
    asked: Asked

    def shape(self) -> tuple[bool, int]:
        """Whether it starts from nothing, and a number that is equal for leaves of equal lengths before and in the node."""
        return self.state is None, (self.asked.document.start + self.node.depth << 32) + len(self.node.tokens)


class Packing:
    """A row being packed."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.jobs: list[Job] = []
        self.readout = Readout()

    def place(self, tokens: Sequence[int], start: int) -> list[int]:
        """Put tokens at positions `start`... into the row; return their places."""
        places = list(range(len(self.tokens), len(self.tokens) + len(tokens)))
        self.tokens += tokens
        self.positions += range(start, start + len(tokens))
        return places

    # Prompts

    def prompts(self, work: Sequence[Sequence[Asked]]) -> Branches:
        """Take in each document's prompt once for all cells it is asked under; return the cells' branches."""
        root = grow([asked[0].document.taken for asked in work], LEAST_SHARED)
        groups: dict[tuple[object, ...], list[tuple[Node, list[Sequence[Asked]]]]] = defaultdict(list)
        above: dict[int, Node | None] = {}
        for node, parent in _with_parents(root):
            above[id(node)], here = parent, [work[i] for i in node.ends]
            if node.tokens or here:
                cells = tuple(tuple(id(one.cell) for one in asked) for asked in here)
                groups[node.depth, len(node.tokens), cells].append((node, here))
        # Blocks of equal shape lie in one piece in the row.
        own = {id(node): self.place(node.tokens, node.depth) for same in groups.values() for node, _ in same}

        def path(node: Node | None) -> list[int]:
            return [] if node is None else [*path(above[id(node)]), *own.get(id(node), ())]

        found: Branches = []
        for (_, length, _), same in groups.items():
            found += self.block([(path(node), here) for node, here in same], int(length))  # type: ignore[call-overload]
        return found

    def block(self, same: Sequence[tuple[list[int], list[Sequence[Asked]]]], own: int) -> Branches:
        """Take in prompts of equal shape side by side, each by its path in the row, of which it attends for the last `own` tokens."""
        index = torch.tensor([path for path, _ in same], dtype=torch.long).view(len(same), len(same[0][0]))
        branches: Branches = []
        for turn, asked in enumerate(same[0][1]):  # documents with one and the same prompt are branches of one block
            for place in range(len(asked)):
                here = [work[turn][place] for _, work in same]
                branches.append((_branch(here), here))
        self.jobs.append(Block(index, own, [branch for branch, _ in branches]))
        return branches

    def continued(self, work: Sequence[Sequence[Asked]], begun: Begun) -> Branches:
        """Take in each document's prompt from where a common beginning ends."""
        found: Branches = []
        for asked in work:
            rest = asked[0].document.taken[len(begun.tokens) :]
            index = torch.tensor([self.place(rest, len(begun.tokens))])
            branches = [Branch(one.cell, _grants([one]), [one.number], begun.state(one.cell.policy)) for one in asked]
            self.jobs.append(Block(index, len(rest), branches, before=begun.state(asked[0].cell.policy)))
            found += [(branch, [one]) for branch, one in zip(branches, asked, strict=True)]
        return found

    def streams(self, asked: Sequence[Asked]) -> Branches:
        """Take in each document's prompt token by token under the policy of the cells asked under, which differ in budgets alone."""
        branches: Branches = []
        order = sorted(asked, key=lambda one: -len(one.document.taken))
        for group in _in_step(order, asked[0].cell, lambda one: (not one.document.taken, len(one.document.taken))):
            branch = _branch(group)
            if group[0].document.taken:
                index = [self.place(one.document.taken, 0) for one in group]
                lengths = [len(row) for row in index]
                wave = Wave(_right(index), lengths, branch.cell, branch.documents, grants=branch.grants, state=branch.state)
                self.jobs.append(wave)
            branches.append((branch, group))
        return branches

    def simulated(self, asked: Sequence[Asked]) -> None:
        """Score each answer in one pass over its prompt and itself, under policies that simulate it so."""
        for one in asked:
            for answer, slot in zip(one.document.answers, one.slots, strict=True):
                whole, first = (*one.document.prompt, *answer), len(one.document.prompt) - 1
                places = self.place(whole, 0)
                for place, target in zip(places[first:], answer, strict=False):
                    self.readout.add(place, target, slot)
                scored = torch.zeros(1, len(whole), dtype=torch.bool)
                scored[:, first:-1] = True
                grants = Grants([(one.cell.policy.budget, len(whole))])
                self.jobs.append(Simulated(torch.tensor([places]), one.cell, [one.number], grants, scored))

    # Answers

    def answers(self, branches: Branches, *, stream: bool = False) -> None:
        """Score what is asked after each branch's rows; cells that differ in their budgets alone together, where they can be."""
        stepping: dict[object, Branches] = defaultdict(list)
        choosing: dict[object, Branches] = defaultdict(list)
        for branch, asked in branches:
            policy = branch.cell.policy
            if policy.passive or (policy.static and not stream):
                self.gulps([(branch, asked)])
            elif policy.at_once and asked[0].document.start:
                choosing[kin(policy), asked[0].document.start].append((branch, asked))
            else:
                stepping[kin(policy)].append((branch, asked))
        for same in choosing.values():
            self.gulps(same)
        for same in stepping.values():
            self.waves(same, stream)

    def gulps(self, branches: Branches) -> None:
        """Score answers all tokens at once, trees of equal size side by side."""
        sizes: dict[int, list[tuple[int, int, Asked, Node]]] = defaultdict(list)
        for place, (_, asked) in enumerate(branches):
            for row, one in enumerate(asked):
                tree = one.document.tree()
                sizes[sum(len(node.tokens) for node in tree.walk())].append((place, row, one, tree))
        for size, members in sorted(sizes.items()):
            index, depth = torch.zeros(2, len(members), size, dtype=torch.long).unbind()
            above = torch.zeros(len(members), size, size, dtype=torch.bool)
            paths = torch.zeros(len(members), size, dtype=torch.long)
            for i, (_, _, one, tree) in enumerate(members):
                self.tree(one, tree, index[i], depth[i], above[i], paths[i])
            rows: dict[int, list[int]] = defaultdict(list)
            for place, row, _, _ in members:
                rows[place].append(row)
            sources = [(branches[place][0].state, _some(chosen, branches[place][1])) for place, chosen in rows.items()]
            documents = [one.number for _, _, one, _ in members]
            self.jobs.append(Gulp(index, depth, above, sources, documents, branches[0][0].cell, paths))

    def tree(self, one: Asked, tree: Node, index: Tensor, depth: Tensor, above: Tensor, paths: Tensor) -> None:
        """Place one answer tree and fill in its rows of a gulp."""
        known: dict[int, list[int]] = {}
        filled = 0
        for node, parent in _with_parents(tree):
            own = list(range(filled, filled + len(node.tokens)))
            places = self.place(node.tokens, one.document.start + node.depth)
            line = [*(known[id(parent)] if parent else ()), *own]
            known[id(node)] = line
            index[own] = torch.tensor(places)
            depth[own] = torch.arange(node.depth, node.depth + len(own))
            paths[own] = node.through
            above[own[0] : own[-1] + 1, line[: node.depth]] = True
            above[own[0] : own[-1] + 1, own[0] : own[-1] + 1] = torch.ones(len(own), len(own), dtype=torch.bool).tril()
            filled += len(own)
            self.read(one, node, places)

    def waves(self, branches: Branches, stream: bool) -> None:
        """Score answers token by token, one wave for each level of their trees, under cells that differ in their budgets alone."""
        cell = branches[0][0].cell
        level = [
            _Leaf(branch.state if one.document.start else None, row, one.document.tree(), one)
            for branch, asked in branches
            for row, one in enumerate(asked)
        ]
        while level:
            level.sort(key=lambda leaf: -len(leaf.node.tokens))
            level = [child for group in _in_step(level, cell, _Leaf.shape) for child in self.wave(group, cell, stream)]

    def wave(self, leaves: Sequence[_Leaf], cell: Cell, stream: bool) -> list[_Leaf]:
        """Place tree nodes that step together; return those that follow."""
        places = [self.place(leaf.node.tokens, leaf.asked.document.start + leaf.node.depth) for leaf in leaves]
        for leaf, own in zip(leaves, places, strict=True):
            self.read(leaf.asked, leaf.node, own)
        index = _right(places)
        sources, order = _sources(leaves)
        wave = Wave(
            index,
            [len(own) for own in places],
            cell,
            [leaf.asked.number for leaf in leaves],
            sources,
            order,
            grants=None if sources else _grants([leaf.asked for leaf in leaves]),
            completes=0 if stream else index.shape[1],
            paths=torch.tensor([leaf.node.through for leaf in leaves])[:, None].expand_as(index),
        )
        self.jobs.append(wave)
        return [_Leaf(wave.state, row, child, leaf.asked) for row, leaf in enumerate(leaves) for child in leaf.node.children]

    def read(self, one: Asked, node: Node, places: Sequence[int]) -> None:
        """Note what each answer through the node expects after each of its tokens."""
        for answer in _answers(node):
            for i, place in enumerate(places):
                self.readout.add(place, one.document.answers[answer][node.depth + i], one.slots[answer])


def _branch(asked: Sequence[Asked]) -> Branch:
    return Branch(asked[0].cell, _grants(asked), [one.number for one in asked])


def _grants(asked: Sequence[Asked]) -> Grants:
    return Grants([(one.cell.policy.budget, one.document.basis) for one in asked])


def kin(policy: Policy) -> object:
    """What cells have in common that can go side by side: they differ in their budgets alone, and none or all of these are everything."""
    return policy.statistic(), policy.budget.whole


def _some(rows: list[int], asked: Sequence[Asked]) -> Tensor | slice | None:
    """The rows chosen of a branch's; None for all of them in order, a slice for some that lie together."""
    if rows == list(range(len(asked))):
        return None
    run = slice(rows[0], rows[0] + len(rows))
    return run if rows == list(range(run.start, run.stop)) else torch.tensor(rows)


def _in_step(items: Sequence[Item], cell: Cell, shape: Callable[[Item], tuple[bool, int]]) -> list[list[Item]]:
    """Part items into those that step together: all that start from something, or only equals where the policy asks for it."""
    groups: dict[object, list[Item]] = defaultdict(list)
    for item in items:
        nothing, length = shape(item)
        groups[nothing, length if "same_length" in cell.policy.needs else None].append(item)
    return list(groups.values())


def _sources(leaves: Sequence[_Leaf]) -> tuple[list[tuple[State, Tensor | None]], Tensor | None]:
    """Return which rows of which states the leaves go on from, state by state, and the order that makes them the leaves'."""
    if leaves[0].state is None:
        return [], None
    groups: dict[int, tuple[State, list[int]]] = {}
    for i, leaf in enumerate(leaves):
        assert leaf.state is not None
        groups.setdefault(id(leaf.state), (leaf.state, []))[1].append(i)
    order = torch.tensor([i for _, members in groups.values() for i in members]).argsort()
    return [(state, torch.tensor([leaves[i].row for i in members])) for state, members in groups.values()], order


def _answers(node: Node) -> list[int]:
    return [end for below in node.walk() for end in below.ends]


def _with_parents(root: Node) -> Iterable[tuple[Node, Node | None]]:
    """Every node with its parent, parents first."""
    yield root, None
    for node in root.walk():
        for child in node.children:
            yield child, node


def _right(rows: Sequence[Sequence[int]]) -> Tensor:
    """[B, T] rows of places, aligned to the right."""
    width = max(len(row) for row in rows)
    return torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], dtype=torch.long)
