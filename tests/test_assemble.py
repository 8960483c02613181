"""What the services of a run are started with."""

from __future__ import annotations

from itertools import pairwise

from fakes.scripted_run import Listener
from outrider.assemble import Services
from outrider.config import parse
from outrider.runfolder import RunFolder
from outrider.train import Progress

TREE = {"tasks": {"train": "tasks.jsonl"}, "harness": {"command": ["agent"]}}


def test_the_password_of_the_store_is_no_argument_of_the_gateway(tmp_path):
    config = parse(TREE | {"store": {"url": "postgresql://u:s3cret@db/x"}})
    gateway = Services(config, RunFolder(tmp_path), tmp_path, Progress(), Listener()).gateway()
    assert "postgresql://u@db/x" in gateway.argv()
    assert not [word for word in gateway.argv() if "s3cret" in word]
    assert gateway.env["PGPASSWORD"] == "s3cret"


def test_without_a_password_the_environment_keeps_its_own(tmp_path):
    for url in ("", "postgresql://u@db/x"):
        gateway = Services(parse(TREE | {"store": {"url": url}}), RunFolder(tmp_path), tmp_path, Progress(), Listener())
        assert "PGPASSWORD" not in gateway.gateway().env


def test_a_call_may_wait_for_a_step_of_training_as_long_as_for_an_answer(tmp_path):
    config = parse(TREE | {"gateway": {"upstream_timeout_s": 1234}})
    argv = Services(config, RunFolder(tmp_path), tmp_path, Progress(), Listener()).gateway().argv()
    waits = dict(pairwise(argv))
    assert (waits["--upstream-timeout-s"], waits["--pause-wait-s"]) == ("1234.0", "1234.0")
