"""What a cache is said to take without weights is what caches take: against real runs, and against arithmetic by hand."""

import csv
import io
import json

import pytest

from evalkit import attention, policies
from evalkit.documents import Document
from evalkit.entries import Holding
from evalkit.errors import UsageError
from evalkit.layer import Head, Layer
from evalkit.session import Engine
from evalkit.shares import BYTES, FETCHED, HELD, QUERIES
from evalkit.size import Load, Size, amount, shape, sizes, together, tokens
from tests import tiny

pytestmark = pytest.mark.usefixtures("own_cache")

LENGTHS = (1, 5, 12, 13, 40, 71)  # tokens held; the windows of the tiny models are of 12
BUDGETS = ("100%", "70%", "45%", "20%", "9")
PRESETS = [f"{name}:{preset}" for name in policies.shipped() for preset in policies.find(name).presets]
SMALLER = {"kivi": {"group": 8}, "quest": {"page": 5}}  # so that tiny prompts are of several groups and pages
LLAMA_8B = {  # Llama 3.1 8B's shape
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip


def built(names, **knobs):
    """Every policy at every budget that it takes."""
    found = []
    for name in names:
        for budget in BUDGETS if policies.build(name).lossless else [None]:
            try:
                found.append(policies.build(name, budget, **knobs.get(name, {})))
            except UsageError:
                continue
    return found


def runnable(policy, model):
    return "rope" not in policy.needs or bool(attention.ropes(model))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_oss", "gpt_neox", "opt"])
def test_sizes_are_what_the_ledger_counts_in_a_real_run(family):
    model = tiny.model(family)
    engine = Engine(model, calibration=lambda: tiny.tokens(100, 7))
    documents = [Document(tiny.tokens(length + 1, length), (tiny.tokens(1, 99),)) for length in LENGTHS]
    asked = built([*policies.shipped(), *PRESETS]) + built(SMALLER, **SMALLER)
    asked = [policy for policy in asked if runnable(policy, model)]
    layers = attention.shape(model.config)
    wrong = []
    for policy, result in zip(asked, engine.score(documents, asked), strict=True):
        simulated = "whole_answer" in policy.needs and not policy.lossless  # takes in the waiting token and the answer
        for length, tally in zip(LENGTHS, result.tally.T.tolist(), strict=True):
            found = together(sizes(policy, layers, Load(tokens=length + 2 * simulated)))
            counted = (tally[HELD], tally[BYTES])
            reckoned = (found.entries, found.cache + found.metadata + found.host)
            at_most = (
                getattr(policy, "columns", "") == "union"
            )  # how many channels two choices share is known with the weights only
            if counted[0] != reckoned[0] or counted[1] > reckoned[1] or (counted != reckoned and not at_most):
                wrong.append((policy, length, counted, reckoned))
    assert wrong == []


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_config_tells_the_shape_that_the_model_has(family):
    model = tiny.model(family)
    session = Engine(model).open(policies.build("full"))
    session.feed(tiny.tokens(5))
    found = [
        (head.layer.index, head.layer.depth, head.layer.window, head.size, count) for head, count in attention.shape(model.config)
    ]
    real = [
        (held.layer.index, held.layer.depth, held.layer.window, held.entries.size, held.positions.shape[1])
        for held in session.caches
    ]
    assert found == real


def test_the_most_that_is_fetched_is_no_less_than_what_a_run_fetches():
    engine = Engine(tiny.model(), calibration=lambda: tiny.tokens(100, 7))
    document = Document(tiny.tokens(61), (tiny.tokens(1, 99),))
    layers = attention.shape(engine.model.config)
    for budget in ("100%", "20%"):
        policy = policies.build("infinigen", budget, alpha=1e9)  # as many as the budget grants
        (result,) = engine.score([document], [policy])
        assert float(result.tally[QUERIES].sum()) == 1
        most = sum(count * policy.fetched(head, 60) for head, count in layers)
        assert float(result.tally[FETCHED].sum()) == most
        assert (
            together(sizes(policy, layers, Load(tokens=60))).fetched == 2 * 60 * 16 * 2
        )  # a dense layer's, of one layer at a time


# By hand


def llama_8b():
    return [(Head(Layer(index, 32), 128, 128), 8) for index in range(32)]


def one(policy, load, layers=None):
    return together(sizes(policy, layers or llama_8b(), load))


def test_llama_8b_takes_131072_bytes_a_token():
    assert one(policies.build("full"), Load(tokens=1)) == Size(32 * 8, 131072, 0, 0, 0)
    assert one(policies.build("full"), Load(tokens=32768, batch=8)).device == 131072 * 32768 * 8 == 32 * 2**30
    assert one(policies.build("full"), Load(tokens=100, element=4)).cache == 100 * 131072 * 2


def test_h2o_holds_its_share_and_a_score_for_each_entry():
    found = one(policies.build("h2o", "10%"), Load(tokens=32768))
    assert found.entries == 32 * 8 * 3276
    assert (found.cache, found.metadata, found.host) == (found.entries * 256 * 2, found.entries * 2, 0)


def test_quest_holds_everything_and_the_bounds_of_pages_from_the_third_layer_on():
    found = one(policies.build("quest", "10%"), Load(tokens=1001))
    assert found.cache == 1001 * 131072
    assert found.metadata == 30 * 8 * 63 * 2 * 128 * 2  # 63 pages of 16 tokens, a largest and a least value for each channel


def test_infinigen_holds_partial_keys_on_the_device_and_all_else_in_host_memory():
    found = one(policies.build("infinigen", "10%"), Load(tokens=1000))
    assert found.cache == 0
    assert found.metadata == 30 * 8 * 1000 * 25 * 2  # a fifth of 128 channels
    assert found.fetched == 8 * 1000 * 256 * 2
    assert found.host == 1000 * 131072


def test_kivi_holds_codes_and_two_numbers_for_each_group():
    found = one(policies.build("kivi:2bit"), Load(tokens=1024))
    keys = 1024 * 128 // 4  # coded as often as 128 have come together
    values = (1024 - 128) * 128 // 4 + 128 * 128 * 2
    assert found.cache == 32 * 8 * (keys + values)
    assert found.metadata == 32 * 8 * (1024 // 32 * 128 + (1024 - 128) * 4) * 2 * 2
    double = one(policies.build("kivi:2bit"), Load(tokens=1024, element=4))  # codes stay as they are
    assert double.cache - found.cache == 32 * 8 * 128 * 128 * 2
    assert double.metadata == 2 * found.metadata


def test_layers_may_differ_in_windows_heads_and_sizes():
    layers = [(Head(Layer(0, 2, window=100), 64, 64), 4), (Head(Layer(1, 2), 32, 16), 2)]
    first, second = sizes(policies.build("full"), layers, Load(tokens=1000, batch=3))
    assert (first.entries, first.cache) == (3 * 4 * 100, 3 * 4 * 100 * 128 * 2)
    assert (second.entries, second.cache) == (3 * 2 * 1000, 3 * 2 * 1000 * 48 * 2)
    assert [size.entries for size in sizes(policies.build("tova", "256"), layers, Load(tokens=1000))] == [4 * 100, 2 * 256]


@pytest.mark.parametrize(("devices", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_heads_are_shared_out_and_replicated_where_they_are_too_few(devices, heads):
    whole = one(policies.build("full"), Load(tokens=64))
    assert one(policies.build("full"), Load(tokens=64, devices=devices)).cache == whole.cache * heads // 8


@pytest.mark.parametrize("devices", [3, 6, 12])
def test_heads_that_cannot_be_shared_out_evenly_are_refused(devices):
    with pytest.raises(UsageError, match=f"tensor-parallel={devices} shares out 8 key/value heads unevenly"):
        one(policies.build("full"), Load(tokens=64, devices=devices))


def test_a_holding_counts_numbers_by_their_type_and_codes_as_they_are():
    held = Holding(entries=1, numbers=10, codes=7, scales=3, noted=2)
    assert (held.stored(), held.about(), held.bytes()) == (27, 10, 37)
    assert (held.stored(4), held.about(4), held.bytes(4)) == (47, 20, 67)


# The command


@pytest.fixture
def llama(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B))
    return file


def test_the_command_reads_a_config_alone(command, llama):
    words = ("size", "--model", llama, "--context", "32k", "--batch", 8, "--policy", "full,h2o", "--budget", "0.1,512")
    code, out, err = command(*words, "--format", "json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["token_bytes"], told["context"], told["layers"]) == (131072, 32768, [])
    assert [(cell["policy"], cell["budget"], cell["device_bytes"]) for cell in told["cells"]] == [
        ("full", "100%", 32 * 2**30),
        ("h2o", "10%", 32 * 8 * 8 * 3276 * 257 * 2),
        ("h2o", "512", 32 * 8 * 8 * 512 * 257 * 2),
    ]
    assert told["block_waste_worst_bytes"] == 8 * 15 * 131072
    assert told["block_waste_average_bytes"] == 8 * 15 * 131072 // 2
    assert "32 layers, 8 key/value heads of 128 + 128 numbers: 131,072 bytes a token." in command(*words, "--format", "md")[1]
    folder = command("size", "--model", llama.parent, *words[3:], "--format", "json")[1]
    assert json.loads(folder)["cells"] == told["cells"]


def test_knobs_may_follow_a_policy_in_brackets(command, llama):
    words = ("size", "--model", llama, "--format", "json", "--context", "4k", "--budget", "0.1", "--policy")
    told = json.loads(command(*words, "full,quest(dense_layers=0, page=8),h2o")[1])["cells"]
    assert [cell["policy"] for cell in told] == ["full", "quest(dense_layers=0, page=8)", "h2o"]
    assert told[1]["metadata_bytes"] == 32 * 8 * 4096 // 8 * 2 * 128 * 2, "pages of 8 tokens in every layer"


def test_layers_are_told_one_by_one_or_those_alike_together(command, llama):
    words = ("size", "--model", llama, "--policy", "quest", "--budget", "0.1", "--by-layer", "--format")
    rows = list(csv.DictReader(io.StringIO(command(*words, "csv")[1])))
    assert [row["layer"] for row in rows] == ["", *map(str, range(32))]
    for what in ("entries", "cache_bytes", "metadata_bytes"):
        assert int(rows[0][what]) == sum(int(row[what]) for row in rows[1:])
    page = command(*words, "md")[1]
    assert "| 0 to 1, each | 10% |" in page
    assert "| 2 to 31, each | 10% |" in page


def test_replicated_heads_are_told(command, llama):
    words = ("size", "--model", llama, "--policy", "full", "--format", "md", "--tensor-parallel")
    assert "each of 16 devices" in (page := command(*words, 16)[1])
    assert "each head is held 2 times" in page
    assert "held 2 times" not in command(*words, 8)[1]


def test_a_policy_that_cannot_go_so_low_is_told_and_the_others_are_sized(command, llama):
    words = ("size", "--model", llama, "--budget", "0.1", "--format", "md", "--policy")
    code, page, _ = command(*words, "full,kivi,kivi:2bit")
    assert code == 0
    assert "kivi: budget=10% is below 18.75%" in page
    assert "| kivi:2bit | 100% |" in page
    code, _, err = command(*words, "kivi")
    assert (code, err.count("\n")) == (2, 1)
    assert "is below 18.75%" in err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--policy", "h20"), "policy=h20 is not known (did you mean 'h2o'?)"),
        (("--policy", "quest(pages=8)"), "quest has no knob 'pages' (did you mean 'page'?)"),
        (("--policy", "quest(page=[)"), "policy=quest(page=[) cannot be read: give knobs as quest(NAME=VALUE, ...)"),
        (("--budget", "1.5"), "budget=1.5 is not allowed"),
        (("--context", "-4k"), "context=-4k is not allowed"),
        (("--context", "0"), "context=0 is not allowed"),
        (("--dtype", "bfloat"), "dtype=bfloat is not known (did you mean 'bfloat16'?)"),
        (("--format", "jsn"), "unknown format 'jsn' (did you mean 'json'?)"),
        (("--policy", ","), "there is nothing to size"),
        (("--tensor-parallel", "3"), "tensor-parallel=3 shares out 8 key/value heads unevenly"),
    ],
)
def test_what_cannot_be_honoured_is_one_line(command, llama, words, reason):
    code, out, err = command("size", "--model", llama, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert reason in err


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "deepseek_v3"}, "models of type 'deepseek_v3' are not supported"),
        ({"model_type": "mamba"}, "models of type 'mamba' with linear_attention are not supported"),
        ({"model_type": "nothing_known"}, "has no config that can be read"),
        ({}, "has no config that can be read"),
    ],
)
def test_models_of_unknown_families_are_refused(config, reason, tmp_path):
    file = tmp_path / "other.json"
    file.write_text(json.dumps(config))
    with pytest.raises(UsageError, match=reason):
        shape(str(file))


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"is a folder without config\.json"):
        shape(str(tmp_path))


@pytest.mark.parametrize(("text", "count"), [("4096", 4096), ("32k", 32768), ("1.5K", 1536), ("1m", 2**20), (" 8k ", 8192)])
def test_contexts_are_read_as_people_write_them(text, count):
    assert tokens(text) == count


@pytest.mark.parametrize(
    ("count", "text"), [(0, "-"), (512, "512 B"), (1536, "1.5 KiB"), (2**20 * 3, "3 MiB"), (int(2**30 * 31.25), "31.25 GiB")]
)
def test_amounts_are_told_in_four_figures(count, text):
    assert amount(count) == text
