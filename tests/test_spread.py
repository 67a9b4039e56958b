"""Who scores packs: several processes give what one gives, and what happens to one of them is told in a line."""

import logging
import os
import subprocess
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path

import psutil
import pytest

from evalkit.errors import UsageError
from evalkit.spread import LOST, alone, processes
from evalkit.store import Store
from evalkit.sweep import Sweep
from tests.doubler import Doubler, refused
from tests.saved import save
from tests.stub import mini_alone, planned

ROOT = Path(__file__).parent.parent
PACKS = [(number, number) for number in range(8)]


@pytest.mark.parametrize("crews", [alone, processes(2)], ids=["alone", "processes"])
def test_every_pack_is_scored_once(crews):
    with crews(Doubler) as crew:
        assert sorted(crew.scored(PACKS)) == [(number, 2 * number) for number in range(8)]
        assert list(crew.scored([])) == []
        assert (crew.call("described") == os.getpid()) == (crews is alone)


def test_a_worker_that_is_killed_is_told_in_a_line_and_what_was_finished_is_handed_over():
    with processes(1)(partial(Doubler, 5, "killed")) as crew:
        scored = crew.scored(PACKS)
        kept = list(islice(scored, 5))
        with pytest.raises(UsageError) as caught:
            next(scored)
        assert str(caught.value) == LOST
        with pytest.raises(UsageError, match="a worker was lost, perhaps for want of memory"):
            crew.call("described")
    assert kept == [(number, 2 * number) for number in range(5)]


@pytest.mark.parametrize("crews", [alone, processes(2)], ids=["alone", "processes"])
def test_what_a_scorer_refuses_comes_back_as_it_is(crews):
    with pytest.raises(UsageError, match=r"^document 3 is too long$"), crews(partial(Doubler, 3, "document 3 is too long")) as crew:
        list(crew.scored(PACKS))


@pytest.mark.parametrize("crews", [alone, processes(1)], ids=["alone", "processes"])
def test_what_is_wrong_with_a_model_comes_back_as_it_is(crews):
    with pytest.raises(UsageError, match=r"^no such model$"), crews(refused) as crew:
        crew.call("described")


HOLDER = """
import time
from evalkit.spread import processes
from tests.doubler import Doubler
if __name__ == "__main__":
    with processes(2)(Doubler) as crew:
        print(*{pid for _, pid in [(n, crew.call("described")) for n in range(20)]}, flush=True)
        time.sleep(60)
"""


def test_workers_end_when_their_sweep_is_killed(tmp_path):
    (tmp_path / "holder.py").write_text(HOLDER)
    where = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, tmp_path / "holder.py"], env=where, stdout=subprocess.PIPE, text=True) as holder:
        workers = [psutil.Process(int(pid)) for pid in holder.stdout.readline().split()]
        holder.kill()
    assert workers
    assert psutil.wait_procs(workers, timeout=20)[1] == []


@mini_alone()
def test_two_workers_write_the_packs_that_one_writes(tmp_path):
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model = {"name": str(save(tmp_path / "model")), "args": {"dtype": "float64", "device": "cpu"}}
    plan = planned(models=[model], policies=["h2o"], tasks=["mini_copa", "mini_piqa"], shard=3)
    stores = {}
    for name, crews in (("one", alone), ("two", processes(2))):
        start = time.perf_counter()
        stores[name] = Sweep(plan, tmp_path / name, crews=crews).run()
        print(f"{name}: {time.perf_counter() - start:.1f} s")
    one, two = stores.values()
    assert one.names() == two.names()
    assert contents(one) == contents(two)


def contents(store: Store) -> list[object]:
    """All packs, seconds aside."""
    packs = [store.read(name) for name in store.names()]
    return [({**head, "seconds": None}, lines) for head, lines in packs]
