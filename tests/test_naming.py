"""What reports say of where files lay: their names."""

import pytest

from evalkit.naming import placeless


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("/disk/me/talks/mtrag.jsonl", "mtrag.jsonl"),
        ("evalkit sweep /plans/a.yaml --data=/rows/six --out runs/a", "evalkit sweep a.yaml --data=six --out runs/a"),
        ("~/models/one two", "one two"),
        (r"C:\models\one", "one"),
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
        ("http://localhost:8000/v1", "http://localhost:8000/v1"),
        ("</s> [/INST] / 3.5 // x", "</s> [/INST] / 3.5 // x"),
        ("(/disk/me/x) [/disk/me/y] host:/disk/me/z", "(x) [y] host:z"),
        (r"'\n\n' + \d+\.\d", r"'\n\n' + \d+\.\d"),
        ({"source": ["/a/b", 3, None], "name": "/a/b"}, {"source": ["b", 3, None], "name": "/a/b"}),
    ],
)
def test_paths_are_cut_to_names_and_all_else_stays(given, told):
    assert placeless(given) == told
