"""The run folder after crashes at awkward places."""

import json
import multiprocessing
import shutil
from pathlib import Path

import pytest

from outrider.config import parse
from outrider.errors import ConfigError
from outrider.runfolder import RunFolder

TREE = {"tasks": {"train": "tasks.jsonl"}, "harness": {"command": ["agent"]}}


@pytest.fixture
def folder(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        yield folder


def finish(folder, step, version):
    folder.checkpoint_dir(step).mkdir()
    folder.weights_dir(version).mkdir(exist_ok=True)
    folder.finish_step(step, version, folder.weights_dir(version), {"next": step})


def test_a_torn_last_line_is_ignored(folder):
    folder.append({"kind": "step", "step": 1, "wall_s": 1.0})
    with folder.metrics_file.open("a") as file:
        file.write('{"kind": "step", "st')
    assert [record["step"] for record in folder.records()] == [1]
    folder.forget_after(1)
    folder.append({"kind": "step", "step": 2, "wall_s": 2.0})
    assert [record["step"] for record in folder.records()] == [1, 2]


def test_records_of_unfinished_steps_are_dropped_on_resume(folder):
    for step in (1, 2, 3):
        folder.append({"kind": "step", "step": step})
    folder.forget_after(2)
    assert [record["step"] for record in folder.records()] == [1, 2]


def test_a_checkpoint_without_its_last_file_does_not_count(folder):
    assert folder.latest() is None
    finish(folder, 1, 1)
    folder.checkpoint_dir(2).mkdir()  # killed while writing
    latest = folder.latest()
    assert latest is not None
    assert (latest.step, latest.policy_version, latest.weights) == (1, 1, folder.weights_dir(1))


def test_pruning_keeps_the_weights_that_kept_checkpoints_serve(folder):
    finish(folder, 1, 1)
    finish(folder, 2, 2)
    finish(folder, 3, 2)  # a skipped step publishes nothing
    folder.weights_dir(3).mkdir()  # published, its checkpoint not finished yet
    folder.prune(keep=1)
    assert [path.name for path in sorted(folder.checkpoints.iterdir())] == ["step-0003"]
    assert [path.name for path in sorted(folder.weights.iterdir())] == ["v0002", "v0003"]


def test_a_run_goes_on_beyond_the_digits_of_its_names(folder):
    for step in (9999, 10_000, 10_001):
        finish(folder, step, step)
        folder.prune(keep=2)
        assert folder.latest().step == step
    assert {path.name for path in folder.checkpoints.iterdir()} == {"step-10000", "step-10001"}
    assert {path.name for path in folder.weights.iterdir()} == {"v10000", "v10001"}


def _try_to_lock(root, answers):
    try:
        with RunFolder(root):
            answers.put("locked")
    except ConfigError as error:
        answers.put(str(error))


def test_a_second_trainer_is_kept_out(folder):
    answers = multiprocessing.get_context("spawn").Queue()
    other = multiprocessing.get_context("spawn").Process(target=_try_to_lock, args=(folder.root, answers))
    other.start()
    assert "is in use by process" in answers.get(timeout=60)
    other.join()


def test_a_run_goes_on_with_its_own_configuration_only(folder):
    folder.adopt(parse(TREE))
    folder.append({"kind": "eval", "step": 0})
    folder.adopt(parse(TREE, ["train.steps=99", "executor.concurrency=2"]))  # how far and where, not what
    with pytest.raises(ConfigError, match=r"other values of seed, train\.lr"):
        folder.adopt(parse(TREE, ["train.lr=1.0", "seed=5"]))
    assert json.loads((folder.root / "config.json").read_text())["train"]["lr"] == 2e-5


def test_the_password_of_a_store_is_not_written_and_need_not_be_the_same(folder):
    folder.adopt(parse(TREE | {"store": {"url": "postgresql://outrider:s3cret@db/runs"}}))
    folder.append({"kind": "eval", "step": 0})
    text = (folder.root / "config.json").read_text()
    assert "s3cret" not in text
    assert json.loads(text)["store"]["url"] == "postgresql://outrider@db/runs"
    as_once = text.replace("outrider@db", "outrider:s3cret@db")
    (folder.root / "config.json").write_text(as_once)
    folder.adopt(parse(TREE | {"store": {"url": "postgresql://outrider:changed@db/runs"}}))
    assert json.loads((folder.root / "config.json").read_text())["store"]["url"] == "postgresql://outrider@db/runs"


def test_a_run_of_an_older_outrider_goes_on(folder):
    folder.adopt(parse(TREE))
    folder.append({"kind": "eval", "step": 0})
    old = json.loads((folder.root / "config.json").read_text())
    del old["train"]["lora_rank"]
    (folder.root / "config.json").write_text(json.dumps(old))
    with pytest.raises(ConfigError, match=r"other values of train\.lora_rank"):
        folder.adopt(parse(TREE, ["train.lora_rank=8"]))
    folder.adopt(parse(TREE))
    old["train"]["no_more"] = 1
    (folder.root / "config.json").write_text(json.dumps(old))
    with pytest.raises(ConfigError, match=r"train\.no_more"):
        folder.adopt(parse(TREE))


def test_what_failed_before_anything_was_done_may_be_mended(folder):
    folder.adopt(parse(TREE, ["train.lr=1.0"]))
    folder.adopt(parse(TREE, ["train.lr=2.0"]))
    folder.store_file.touch()
    with pytest.raises(ConfigError, match=r"other values of train\.lr"):
        folder.adopt(parse(TREE, ["train.lr=1.0"]))


def published(folder, version):
    weights = folder.weights_dir(version)
    (weights / "part").mkdir(parents=True)
    (weights / "model.safetensors").write_text(f"weights {version}")
    (weights / "part" / "config.json").write_text("{}")
    return weights


def test_the_best_weights_are_a_copy_that_outlives_what_they_were_copied_from(folder):
    assert folder.best() is None
    folder.keep_best(published(folder, 1), {"score": [0.5, 0.5]})
    folder.keep_best(published(folder, 2), {"score": [0.75, 0.5]})
    for version in (1, 2):
        shutil.rmtree(folder.weights_dir(version))
    assert folder.best() == {"score": [0.75, 0.5]}
    assert (folder.best_weights / "model.safetensors").read_text() == "weights 2"
    assert (folder.best_weights / "part" / "config.json").read_text() == "{}"


@pytest.mark.parametrize("renames", [0, 1])
def test_a_crash_while_the_best_weights_are_replaced_leaves_one_whole_version(folder, monkeypatch, renames):
    folder.keep_best(published(folder, 1), {"score": [0.5, 0.5]})
    rename, done = Path.rename, []

    def dies(self, target):
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(target)
        return rename(self, target)

    with monkeypatch.context() as crash:
        crash.setattr(Path, "rename", dies)
        with pytest.raises(KeyboardInterrupt):
            folder.keep_best(published(folder, 2), {"score": [0.75, 0.5]})
    assert folder.best() == {"score": [0.5, 0.5]}
    assert (folder.best_weights / "model.safetensors").read_text() == "weights 1"
    folder.keep_best(published(folder, 3), {"score": [1.0, 0.5]})
    assert (folder.best_weights / "model.safetensors").read_text() == "weights 3"


def test_without_links_the_best_weights_are_copied(folder, monkeypatch):
    monkeypatch.setattr("os.link", lambda source, target: (_ for _ in ()).throw(OSError("not here")))
    folder.keep_best(published(folder, 1), {"score": [0.5, 0.5]})
    assert (folder.best_weights / "model.safetensors").read_text() == "weights 1"
