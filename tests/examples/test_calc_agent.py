"""The agent as it ships: run by the local executor as its run file says, against a scripted model."""

import ast
import json

import pytest

from fakes.engine import Answer, ScriptedEngine, json_answer
from fakes.records import make_call
from outrider.config import load
from outrider.data.tasks import load_tasks
from outrider.executors.local import LocalExecutor
from outrider.protocols import Launch
from outrider.registry import resolve
from outrider.types import Attempt, Episode, Task

TASK = Task(id="t", fields={"question": "Add 5 and 12.", "tool": "add", "a": 5, "b": 12, "answer": 17})
CALL = '{"tool": "add", "a": 5, "b": 12}'


def says(text):
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}


@pytest.fixture(scope="module")
def executor(calc_agent):
    executor = LocalExecutor(load(calc_agent / "run.toml").harness, root=calc_agent)
    yield executor
    executor.close()


@pytest.fixture
def run(executor, tmp_path):
    """Run the agent on `TASK` while the model gives `answers` in turn; returns the engine and how it ended."""

    def run(*answers):
        with ScriptedEngine() as engine:
            engine.answers += [
                answer if isinstance(answer, Answer) else json_answer(says(answer)) for answer in answers
            ]
            env = {"OPENAI_BASE_URL": f"{engine.base_url}/v1", "OPENAI_API_KEY": "key", "OPENAI_MODEL": "policy"}
            workdir = tmp_path / "work"
            workdir.mkdir()
            executor.start(Launch(attempt_id="a1", task=TASK, env=env, workdir=workdir))
            (found,) = executor.poll(60)
            return engine.received, found

    return run


def test_the_run_file_is_whole(calc_agent, executor):
    config = load(calc_agent / "run.toml")
    executor.validate()
    for key in ("train", "eval"):
        for task in load_tasks(calc_agent / getattr(config.tasks, key), field=f"tasks.{key}"):
            executor.check(task)
    assert callable(resolve("reward", config.reward.name, field="reward.name", root=calc_agent))


def test_two_calls_then_the_answer(run, agent):
    received, found = run(CALL, "The answer is 17.")
    assert (found.exit_code, found.stdout_tail, found.stderr_tail) == (0, "The answer is 17.\n", "")
    first, second = (request.json for request in received)
    assert first["messages"] == agent.opening("Add 5 and 12.")
    tail = [{"role": "assistant", "content": CALL}, {"role": "user", "content": "Result: 17"}]
    assert second["messages"] == first["messages"] + tail
    # The provider's own sampling is left alone, so that Outrider's settings are the only ones.
    assert set(first) == set(second) == {"model", "messages", "max_tokens"}
    assert first["model"] == "policy"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("The answer is 17.", "Error: that is no JSON."),
        ("", "Error: that is no JSON."),
        ("[1, 2]", "Error: give tool (add, subtract or multiply), a and b."),
        ('{"tool": "add", "a": 5}', "Error: give tool (add, subtract or multiply), a and b."),
        ('{"tool": "divide", "a": 5, "b": 1}', "Error: give tool (add, subtract or multiply), a and b."),
        ('{"tool": ["add"], "a": 5, "b": 1}', "Error: give tool (add, subtract or multiply), a and b."),
        ('{"tool": "add", "a": "5", "b": 1}', "Error: a and b must be whole numbers."),
        ('{"tool": "add", "a": true, "b": 1}', "Error: a and b must be whole numbers."),
        ('{"tool": "subtract", "a": 5, "b": 12}', "Result: -7"),
        ('{"tool": "multiply", "a": 5, "b": 12}', "Result: 60"),
        ("[" * 100_000, "Error: that is no JSON."),
    ],
)
def test_what_the_tool_says(agent, reply, said):
    assert agent.run_tool(reply) == said


def test_a_call_that_makes_no_sense_ends_well_all_the_same(run):
    received, found = run("no idea", "Still 17?")
    assert (found.exit_code, found.stdout_tail) == (0, "Still 17?\n")
    assert received[1].json["messages"][-1] == {"role": "user", "content": "Error: that is no JSON."}


def test_an_upstream_that_fails_ends_badly(run):
    """Not graded as if the model had answered."""
    _, found = run(json_answer({"error": {"message": "no"}}, status=400))
    assert found.exit_code == 1
    assert "BadRequestError" in found.stderr_tail
    assert found.stdout_tail == ""


def test_a_whole_episode_is_scored(run, calc_agent):
    """Harness, records and reward fit together."""
    received, found = run(CALL, "The answer is 17.")
    replies = [CALL, "The answer is 17."]
    calls = tuple(
        make_call(f"c{i}", request=request.body, response=json.dumps(says(reply)).encode())
        for i, (request, reply) in enumerate(zip(received, replies, strict=True))
    )
    attempt = Attempt(id="a1", rollout_id="r", number=1, exit_code=found.exit_code, stdout_tail=found.stdout_tail)
    score = resolve("reward", load(calc_agent / "run.toml").reward.name, field="reward.name", root=calc_agent)
    assert score(Episode(task=TASK, attempt=attempt, calls=calls)).value == 1.0


def test_the_agent_knows_nothing_of_outrider(calc_agent):
    source = (calc_agent / "agent.py").read_text(encoding="utf-8")
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "")])
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported == {"__future__", "json", "operator", "os", "sys", "openai"}
    assert "outrider" not in source.lower()
    assert len(source.splitlines()) < 70
