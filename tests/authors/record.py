"""Writes the fixtures of this folder anew from a folder of checked-out repositories; knows no method."""

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

from recording import h2o, infinigen, kivi, kvpress, quest, snapkv, streaming_llm, tova
from recording.checkout import Source

HERE = Path(__file__).parent
RECORDERS = [h2o, infinigen, snapkv, tova, quest, kivi, streaming_llm, kvpress]


def main() -> None:
    """`python record.py FOLDER`: FOLDER holds one checkout for each repository, under the repository's own name."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path, help="folder with the checked-out repositories")
    folder = options.parse_args().folder
    warnings.simplefilter("ignore")  # the borrowed code is older than the torch that runs it
    for recorder in RECORDERS:
        for name, source, cases in recorder.fixtures(folder):
            sys.stdout.write(f"{name}: {len(cases)} cases, {write(name, source, cases)} bytes\n")


def write(name: str, source: Source, cases: list[dict[str, Any]]) -> int:
    """Writes one fixture, one case to a line, and returns its size in bytes."""
    head = json.dumps({"method": name, "source": source.described()}, indent=1)
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    text = head.removesuffix("\n}") + f',\n "cases": [\n{lines}\n ]\n}}\n'
    (HERE / f"{name}.json").write_text(text)
    return len(text)


if __name__ == "__main__":
    main()
