"""A sweep on a Ray cluster of two nodes, one of which goes away midway: it ends, with the tables of an undisturbed one."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from evalkit.errors import UsageError
from evalkit.report import report
from evalkit.runs import Run
from evalkit.sections import told
from evalkit.spread import LOST, cluster
from evalkit.store import Store
from evalkit.sweep import Sweep
from tests.doubler import Doubler, refused
from tests.stub import loader, mini_alone, noted, planned

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'kv-evalkit[ray]'")

from ray.cluster_utils import Cluster  # noqa: E402

ROOT = Path(__file__).parent.parent.parent
PACKS = [(number, number) for number in range(12)]

RAYS_OWN = ("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
pytestmark = pytest.mark.filterwarnings(*RAYS_OWN)


@pytest.fixture
def nodes(monkeypatch) -> Iterator[Cluster]:
    """A cluster of two nodes with a core each; the second one can be taken away."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # else a busy machine gives workers next to nothing
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    found.second = found.add_node(num_cpus=1)
    yield found
    found.shutdown()


@dataclass
class Disturbed:
    """A crew to which something happens after so many packs."""

    crew: Any
    after: int
    happens: Callable[[], object]

    def call(self, method: str, *given: Any) -> Any:
        return self.crew.call(method, *given)

    def scored(self, packs: Sequence[Any]) -> Iterator[Any]:
        for number, found in enumerate(self.crew.scored(packs), 1):
            yield found
            if number == self.after:
                self.happens()


def disturbed(address: str, after: int, happens: Callable[[], object]) -> Any:
    @contextmanager
    def crews(make: Any) -> Iterator[Disturbed]:
        with cluster(address, None)(make) as crew:
            yield Disturbed(crew, after, happens)

    return crews


def tables(store: Store) -> list[str]:
    found = told(report(Run.load(store.folder)))
    return [found.text(kind) for kind in ("md", "csv")]


@mini_alone()
def test_a_sweep_outlives_a_node_and_ends_with_the_same_tables(nodes, tmp_path):
    plan = planned(shard=1, limit=8)
    alone = Sweep(plan, tmp_path / "alone", loader=loader(tmp_path / "alone.log")).run()
    crews = disturbed(nodes.address, 4, lambda: nodes.remove_node(nodes.second, allow_graceful=False))
    spread = Sweep(plan, tmp_path / "spread", crews=crews, loader=loader(tmp_path / "spread.log", 0.2)).run()
    assert tables(spread) == tables(alone)
    asked = noted(tmp_path / "spread.log")
    assert asked.count("loaded") == 2, "both nodes were at work"
    assert len(asked) - 2 <= len(spread.names()) + 1, "only what was in flight is scored again"


def test_what_a_cluster_scores_is_whole_and_what_it_refuses_comes_back(nodes):
    with cluster(nodes.address, 2)(Doubler) as crew:
        assert sorted(crew.scored(PACKS)) == [(number, 2 * number) for number in range(12)]
    with cluster(nodes.address, None)(refused) as crew, pytest.raises(UsageError, match=r"^no such model$"):
        crew.call("described")
    refusing = cluster(nodes.address, None)(partial(Doubler, 3, "document 3 is too long"))
    with refusing as crew, pytest.raises(UsageError, match=r"^document 3 is too long$"):
        list(crew.scored(PACKS))
    too_many = cluster(nodes.address, 3)(Doubler)
    with pytest.raises(UsageError, match="--jobs 3 is more than the cluster's 2 cores: give fewer"), too_many:
        pass
    with cluster(nodes.address, None)(partial(Doubler, 3, "killed")) as crew, pytest.raises(UsageError) as caught:
        list(crew.scored(PACKS))
    assert str(caught.value) == LOST, "a pack that kills every worker ends the sweep"


def test_a_cluster_that_is_not_there_is_one_line():
    with (
        pytest.raises(UsageError, match=r"--ray 127\.0\.0\.1:1 cannot be reached") as caught,
        cluster("127.0.0.1:1", None)(Doubler),
    ):
        pass
    assert "\n" not in str(caught.value)
