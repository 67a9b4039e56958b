"""The doctor's findings; that an installation is found healthy is tested with the packaging."""

import json
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from evalkit import doctor, fetch, hook


def test_a_missing_core_package_is_a_problem_and_a_missing_extra_a_note(monkeypatch) -> None:
    lines = ["packaging>=1", "no-such-core[hf]>=2", "no-such-extra>=3; extra == 'vllm'"]
    monkeypatch.setattr(doctor, "requires", lambda _: lines)
    monkeypatch.setattr(doctor, "metadata", lambda _: SimpleNamespace(get_all=lambda _: ["vllm"]))
    core, extra = doctor.packages()
    assert (core.state, core.detail) == ("problem", "no-such-core missing")
    assert core.remedy == "pip install 'no-such-core[hf]>=2'"
    assert (extra.topic, extra.state, extra.detail) == ("extra vllm", "note", "no-such-extra missing")


def test_a_version_out_of_range_is_named(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "requires", lambda _: ["pytest<1"])
    monkeypatch.setattr(doctor, "metadata", lambda _: SimpleNamespace(get_all=lambda _: []))
    (core,) = doctor.packages()
    assert (core.state, core.detail) == ("problem", f"pytest {pytest.__version__}")
    assert core.remedy == "pip install 'pytest<1'"


def test_a_checkout_that_was_never_installed_is_a_problem(monkeypatch) -> None:
    def requires(_: str) -> list[str]:
        raise PackageNotFoundError

    monkeypatch.setattr(doctor, "requires", requires)
    (finding,) = doctor.packages()
    assert (finding.state, finding.remedy) == ("problem", "install it with pip")


@pytest.mark.parametrize(
    ("registry", "switch", "expected"),
    [
        (SimpleNamespace(model_registry={}), "1", "switched off by EVALKIT_NO_HOOK"),
        (SimpleNamespace(model_registry={}), "", "start-up files did not run"),
        (SimpleNamespace(model_registry={"kv": ""}), "", "PATH has no lm_eval"),
        (SimpleNamespace(model_registry={}, load_plugins=print), "1", "PATH has no lm_eval"),
    ],
)
def test_it_says_why_the_plain_command_cannot_work(monkeypatch, registry, switch, expected) -> None:
    monkeypatch.setenv(hook.SWITCH, switch)
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    monkeypatch.setattr(doctor.importlib, "import_module", lambda _: registry)
    finding = doctor.plain_command()
    assert finding.state == "note"
    assert expected in finding.detail
    assert "or use: evalkit lm-eval" in finding.remedy


def test_entry_points_of_a_policy_that_came_later_are_missed(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "entry_points", lambda group: [])
    finding = doctor.entry_point_names()
    assert finding.state == "note"
    assert "kv_h2o" in finding.detail


def test_it_says_how_to_get_the_model(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path))
    assert doctor.model().remedy == f"evalkit models get {fetch.DEFAULT}"


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("note", 0), ("problem", 1)])
def test_only_a_problem_changes_the_exit_code(monkeypatch, capsys, state, code) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding("topic", state, "detail", "remedy")])
    assert doctor.report(as_json=True) == code
    printed = json.loads(capsys.readouterr().out)
    assert printed["able"] == (code == 0)
    assert printed["findings"] == [{"topic": "topic", "state": state, "detail": "detail", "remedy": "remedy"}]
    assert doctor.report(as_json=False) == code
    assert capsys.readouterr().out.splitlines()[-1].split() == [state, "topic", "detail", "remedy"]
