"""What a retention test may be asked for, by file and by flag."""

import inspect

import pytest

from evalkit import cli
from evalkit.errors import UsageError
from evalkit.retention.endpoint import SERVERS
from evalkit.retention.protocol import DECISIVE, FLAGS, INDIFFERENT, Bucket, Protocol, load
from evalkit.retention.run import policies
from evalkit.rooms import room


def test_the_shipped_protocol_says_all_there_is():
    assert load().model_fields_set == set(Protocol.model_fields)


def test_every_field_takes_a_side():
    assert set(Protocol.model_fields) == DECISIVE | INDIFFERENT and not DECISIVE & INDIFFERENT


def test_every_field_is_a_flag():
    flags = set(inspect.signature(cli.retention).parameters) - {"out", "protocol", "jobs", "endpoint", *SERVERS}
    assert {FLAGS.get(flag, flag) for flag in flags} == set(Protocol.model_fields)


def test_flags_are_set_over_the_file(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("policies: [full, h2o]\nbudgets: [10%]\nbuckets: [1k-2k]\nseed: 3\n")
    found = load(file, {"policy": "tova, quest(page=8, dense_layers=0)", "bucket": "500-900,2k-3k", "turns": "2,5", "seed": None})
    assert [(one.name, one.knobs) for one in found.policies] == [("tova", {}), ("quest", {"page": 8, "dense_layers": 0})]
    assert (found.buckets, found.turns, found.seed) == (((500, 900), (2048, 3072)), (2, 5), 3)
    assert found.identity()["budgets"] == ["10%"]


def test_full_is_measured_once_and_first():
    cells = load(given={"policy": "h2o,full,tova", "budget": "0.1,0.3"}).measured()
    assert [(choice.name, str(budget)) for choice, budget in cells] == [
        ("full", "100%"), ("h2o", "10%"), ("h2o", "30%"), ("tova", "10%"), ("tova", "30%"),
    ]  # fmt: skip


def test_figures_of_flags_are_decimal():
    assert load(given={"turns": "02,010"}).turns == (2, 10)


def test_full_takes_no_knobs():
    with pytest.raises(UsageError, match="foo"):
        policies(load(given={"policy": "full(foo=1),h2o"}))


def test_buckets_are_written_as_they_are_read():
    assert [str(Bucket.of(given)) for given in ("1k-2k", "1024-2K", "500-1500", "0.5k-1k")] == [
        "1k-2k",
        "1k-2k",
        "500-1500",
        "512-1k",
    ]


@pytest.mark.parametrize(
    ("flag", "given", "told"),
    [
        ("bucket", "2k-1k", "buckets.0='2k-1k' is not allowed: give a range of tokens such as 1k-2k"),
        ("bucket", "1k-2k,1k-2k", "give each range once"),
        ("turns", "4,2", "give turns in rising order"),
        ("replies", "invent", "replies='invent' is not allowed: give 'generate' or 'replay'"),
        ("inject_at", "13", "no turn that is asked at comes after it"),
        ("conversations", "0", "conversations=0 is not allowed"),
        ("budget", "200%", "above 0 and at most 100%"),
        ("policy", "h2o,tova,h2o", "it repeats entry 0: give each once"),
        ("policy", "quest(page=8),quest(page=8)", "it repeats entry 0: give each once"),
        ("seed", "{", r"seed='\{' is not allowed: give a whole number"),
        ("turns", "2,@", "turns.1='@' is not allowed: give a whole number"),
        ("conversations", "1:30", "conversations='1:30' is not allowed: give a whole number"),
        ("fuzzy", "%85", "fuzzy='%85' is not allowed: give a number"),
        ("control", "perhaps", "control='perhaps' is not allowed: give true or false"),
    ],
)
def test_what_is_not_allowed_is_said_in_a_line(flag, given, told):
    with pytest.raises(UsageError, match=f"the command line: .*{told}"):
        load(given={flag: given})


def test_an_unknown_field_of_a_file_is_named(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("policies: [full]\nbudgets: [10%]\nbuckets: [1k-2k]\ntunrs: [2]\n")
    with pytest.raises(UsageError, match=r"p.yaml: unknown field tunrs \(did you mean 'turns'\?\)"):
        load(file)


def test_what_only_judges_finished_numbers_leaves_the_identity():
    assert load(given={"margin": "2"}).identity() == load().identity()
    assert load(given={"seed": "2"}).identity() != load().identity()


def test_the_demos_protocol_needs_nothing_but_what_ships():
    protocol = load(room("retention") / "demo.yaml")
    assert (protocol.model, protocol.source, protocol.replies) == (None, "builtin", "replay")
    assert [policy.name for policy, _ in protocol.measured()] == ["full", "h2o", "infinigen", "streaming_llm", "random"]
