"""Blocks hold what sequences hold and nothing twice that may be shared: against examples by hand and a slow allocator."""

import json
import random
from dataclasses import replace
from functools import cache

import pytest

from evalkit import attention, html, manifest
from evalkit.documents import Document
from evalkit.errors import UsageError
from evalkit.harness.tasks import Tasks
from evalkit.harness.worker import Asking, Pack, Worker
from evalkit.paged import Stored, blocks, paged, slack
from evalkit.policies import build
from evalkit.report import report
from evalkit.rooms import room
from evalkit.runs import Run
from evalkit.sections import sections
from evalkit.session import Engine
from evalkit.shares import BYTES, DENSE_BYTES
from evalkit.size import token_bytes
from evalkit.store import Store
from tests import handmade, tiny
from tests.saved import save
from tests.stub import planned


def allocated(sequences, block):
    """What a slow allocator holds that takes in token by token: blocks, as (all tokens up to here, how many of them are the block's)."""
    held = []
    for sequence in sequences:
        own = 0
        for count in range(1, len(sequence) + 1):
            if own in (0, block):
                held.append(None)
                own = 0
            own += 1
            held[-1] = (tuple(sequence[:count]), own)
            if own == block and held[-1] in held[:-1]:
                held.pop()
                own = 0
    return held


def drawn(seed):
    """Sequences of few different tokens, so that beginnings agree; some are equal, some are empty, some go on from others."""
    draw = random.Random(seed)
    found = [tuple(draw.choices("ab", k=draw.randrange(14))) for _ in range(draw.randrange(1, 10))]
    return found + draw.choices(found, k=3) + [(*start, *"abab") for start in draw.choices(found, k=3)]


@pytest.mark.parametrize("block", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(40))
def test_shared_blocks_are_those_of_a_slow_allocator(seed, block):
    sequences = drawn(seed)
    found = paged(sequences, block)
    assert found.together == len(allocated(sequences, block))
    assert found.alone == sum(len(allocated([sequence], block)) for sequence in sequences if sequence)
    assert (found.sequences, found.tokens) == (len(sequences), sum(map(len, sequences)))


def test_the_last_block_of_a_sequence_stands_empty_in_part():
    found = paged([range(40)])
    assert (found.sequences, found.tokens, found.alone, found.together, found.waste) == (1, 40, 3, 3, 8)
    assert paged([range(48)]).waste == 0


def test_only_full_blocks_of_one_beginning_are_shared():
    common = list(range(40))  # two blocks and a half
    found = paged([[*common, 100, 101], [*common, 200]])
    assert (found.alone, found.together, found.saved) == (6, 4, 2)
    assert found.waste == 6 + 7


def test_equal_sequences_share_all_but_a_last_block_that_is_not_full():
    assert paged([range(32)] * 5).together == 2
    assert paged([range(33)] * 5).together == 2 + 5


def test_equal_tokens_after_other_tokens_are_another_block():
    assert paged([[1, 2, 1, 2]], 2).together == 2
    assert paged([[1, 2, 3, 4], [5, 6, 3, 4]], 2).together == 4


def test_nothing_takes_no_block():
    assert (paged([]).sequences, paged([]).tokens, paged([]).alone, paged([]).together) == (0, 0, 0, 0)
    assert paged([()]).alone == 0


@pytest.mark.parametrize("block", [0, -16])
def test_a_block_without_tokens_is_refused(block):
    with pytest.raises(UsageError, match=f"block={block} is not allowed"):
        paged([range(4)], block)


@pytest.mark.parametrize("block", [1, 4, 16])
def test_slack_is_what_lengths_leave_empty(block):
    empty = [blocks(length, block) * block - length for length in range(160, 160 + block)]
    assert slack(160, block) == (sum(empty) / block, max(empty))


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 7, 16, 33])
def test_slack_of_a_window_is_what_it_leaves_empty_wherever_it_lies(window, block):
    touched = [(start + window - 1) // block - start // block + 1 for start in range(block)]
    empty = [count * block - window for count in touched]
    assert slack(100, block, window) == pytest.approx((sum(empty) / block, max(empty)))
    assert slack(window, block, window) == slack(window, block)


@pytest.mark.parametrize("window", [1, 3, 4, 9])
@pytest.mark.parametrize("seed", range(20))
def test_blocks_that_a_window_has_passed_are_free(seed, window):
    """Those that some sequence still sees are held, once if they may be shared."""
    sequences, block = drawn(seed), 4
    found, live, partial, alone = paged(sequences, block, window), set(), 0, 0
    for sequence in sequences:
        for start in range(0, len(sequence), block):
            end = min(start + block, len(sequence))
            if end > len(sequence) - window:
                alone += 1
                partial += end - start < block
                if end - start == block:
                    live.add(tuple(sequence[:end]))
    assert (found.alone, found.together) == (alone, len(live) + partial)
    assert found.tokens == sum(min(len(sequence), window) for sequence in sequences)
    assert found.waste == alone * block - found.tokens


def test_figures_are_bytes_of_all_layers():
    """Of 10 bytes a token where all tokens stay, of 3 more where those before the newest 20 are passed."""
    held = Stored({None: 10, 20: 3})
    held.add([[*range(40), 100], [*range(40), 200]])
    assert held.as_dict() == {
        "block": 16, "sequences": 2, "tokens": 82, "stored_bytes": 820 + 120, "paged_bytes": 960 + 3 * 64,
        "shared_bytes": 640 + 3 * 48, "waste_bytes": 140 + 3 * 24,
    }  # fmt: skip


# What runs say of it


@cache
def model(family):
    return tiny.model(family)


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "gpt_neox"])
def test_in_one_piece_is_what_the_full_cache_holds(family):
    documents = [Document(tiny.tokens(length, length), ((5, 6),)) for length in (1, 5, 13, 40, 70)]
    (full,) = Engine(model(family)).score(documents, [build("full")])
    held = Stored(token_bytes(attention.shape(model(family).config)))
    held.add(document.taken for document in documents)
    assert held.as_dict()["stored_bytes"] == full.tally[BYTES].sum() == full.tally[DENSE_BYTES].sum()


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    return Worker(str(save(tmp_path_factory.mktemp("model"))), {"device": "cpu"}, {})


def test_a_manifest_counts_what_a_run_stores(worker):
    """Prompts of a pack that agree are one, as when they are scored."""
    asked = Tasks(["mini_winogrande", "mini_boolq"], [str(room("tasks"))], limit=5, fewshot=1, prefix=True).asked()
    encoded = {task: worker.encoded(documents) for task, documents in asked.items().items()}
    twins = [replace(ready, doc_id=1000 + ready.doc_id) for ready in encoded["mini_boolq"].documents]
    encoded["mini_boolq"] = replace(encoded["mini_boolq"], documents=[*encoded["mini_boolq"].documents, *twins])
    plan = planned(shard=8)
    (counted,) = manifest.manifest(plan, [(plan.models[0], worker.described(), encoded)], [])["paged"].values()
    for task, found in encoded.items():
        packs = [Pack(task, part, [Asking("full", "100%")], "prompt") for part in manifest.packed(found, plan.shard)]
        sums = [worker.score(pack).cells[0].costs["sums"] for pack in packs]
        assert counted[task]["stored_bytes"] == sum(one["dense_bytes"] for one in sums) == sum(one["bytes"] for one in sums)
        assert counted[task]["shared_bytes"] < counted[task]["stored_bytes"]


def test_it_is_no_part_of_a_runs_identity(tmp_path):
    plain = handmade.write_by_hand(tmp_path / "a", {"full@100%": {"piqa": [1, 0]}})
    counted = handmade.write_by_hand(tmp_path / "b", {"full@100%": {"piqa": [1, 0]}}, paged={"smol": {"piqa": {}}})
    assert plain.digest == counted.digest
    assert Store.create(plain.folder, {**plain.manifest, "paged": {"smol": {}}}).manifest == plain.manifest


COUNTED = {
    "block": 16,
    "sequences": 8,
    "tokens": 40,
    "stored_bytes": 640,
    "paged_bytes": 768,
    "shared_bytes": 512,
    "waste_bytes": 128,
}
RIGHT = {"full@100%": {"piqa": [1] * 8, "copa": [1] * 8}, "h2o@10%": {"piqa": [1] * 8, "copa": [0] * 8}}


@pytest.fixture
def counted(tmp_path):
    """A run that counted blocks of one of its tasks; by hand every document's full cache has 80 bytes, of which h2o holds half."""
    handmade.write_by_hand(tmp_path, RIGHT, paged={"smol": {"piqa": COUNTED}})
    return Run.load(tmp_path)


def table(found):
    return next((section for section in sections(found) if section.title == "memory"), None)


def test_policies_stand_beside_blocks_in_one_table(counted):
    section = table(report(counted))
    assert list(section.header) == ["cache", "piqa"]
    assert [[word.text for word in row] for row in section.rows] == [
        ["full, in one piece", "640 B"],
        ["full, in blocks of 16", "120.0 %"],
        ["full, in shared blocks of 16", "80.0 %"],
        ["h2o@10%", "50.0 %"],
    ]


def test_json_and_page_have_it_too(counted):
    found = report(counted).as_dict()
    told = {task["name"]: task["paged"] for task in found["groups"][0]["tasks"]}
    assert told == {"piqa": {**COUNTED, "held": {"full@100%": 640, "h2o@10%": 320}}, "copa": None}
    assert f'"paged":{json.dumps(told["piqa"], separators=(",", ":"))}' in html.page(counted, found)
    assert "paged" not in found["aside"]


def test_what_holds_something_else_than_the_prompts_has_no_share(tmp_path):
    handmade.write_by_hand(tmp_path, RIGHT, paged={"smol": {"piqa": {**COUNTED, "stored_bytes": 600}}})
    section = table(report(Run.load(tmp_path)))
    assert [word.text for word in section.rows[-1]] == ["h2o@10%", "-"]


def test_a_run_that_did_not_count_it_has_a_report(tmp_path):
    handmade.write_by_hand(tmp_path, RIGHT)
    assert table(report(Run.load(tmp_path))) is None


def test_lm_evals_results_have_it(worker):
    tasks = Tasks(["mini_boolq"], [str(room("tasks"))], limit=4)
    tasks.evaluate(worker.lm)
    ledger = worker.lm.ledger()
    assert ledger["paged"]["mini_boolq"]["stored_bytes"] == ledger["tasks"]["mini_boolq"]["bytes"]
    assert ledger["paged"]["mini_boolq"]["sequences"] == ledger["tasks"]["mini_boolq"]["documents"]
