"""The openai SDK, unchanged, against a gateway process."""

from __future__ import annotations

import threading

import openai
import pytest

from fakes.engine import Sampled, ScriptedEngine, chunk, entries, plain, stream, usage
from fakes.process import GatewayProcess
from outrider.keys import hash_key, new_key
from outrider.stores.sqlite import SqliteStore
from outrider.types import Fidelity, Mode, Session

MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2,  "b": 3}'}}


@pytest.fixture(scope="module")
def shared_engine():
    with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
def engine(shared_engine):
    shared_engine.forget()
    return shared_engine


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = SqliteStore(tmp_path_factory.mktemp("sdk") / "s.sqlite3")
    yield store
    store.close()


@pytest.fixture(scope="module")
def gateway(shared_engine, store):
    with GatewayProcess(shared_engine, store.path, pause_wait_s=0.5) as gateway:
        yield gateway


@pytest.fixture
def attempt(request):
    return request.node.name


@pytest.fixture
def client(engine, gateway, store, attempt):
    """Points at the gateway by its base URL alone; its API key means nothing."""
    key = new_key()
    session = Session(attempt_id=attempt, key_hash=hash_key(key), mode=Mode.TRAIN, sampling={"temperature": 1.0})
    store.open_session(session)
    with openai.OpenAI(base_url=f"{gateway.base_url}/s/{key}/v1", api_key="sk-nothing") as client:
        yield client


@pytest.fixture
def exact(store, attempt):
    """Call it for the attempt's calls, all of them exact."""

    def check(count=1):
        calls = store.calls(attempt)
        assert len(calls) == count
        for call in calls:
            assert call.fidelity is Fidelity.EXACT, call.fidelity_reason
        return calls

    return check


def test_plain(client, exact, engine):
    reply = client.chat.completions.create(model="policy", messages=MESSAGES, extra_body={"extra": 1})
    assert reply.choices[0].message.content == Sampled().text
    assert reply.choices[0].logprobs is None
    assert reply.usage.completion_tokens == 5
    assert "prompt_token_ids" not in (reply.model_extra or {})
    assert engine.received[0].json["extra"] == 1
    exact()


def test_streamed(client, exact):
    chunks = list(client.chat.completions.create(model="policy", messages=MESSAGES, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == Sampled().text
    assert all(chunk.usage is None for chunk in chunks)
    exact()


def test_streamed_through_the_accumulator(client, exact):
    options = {"include_usage": True}
    with client.chat.completions.stream(model="policy", messages=MESSAGES, stream_options=options) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == Sampled().text
    assert final.usage.completion_tokens == 5
    exact()


@pytest.mark.parametrize("streamed", [False, True])
def test_two_choices(client, exact, engine, streamed):
    engine.sampled = [Sampled(), Sampled(pieces=["x", ""], ids=[9, 2], logprobs=[-1.0, -2.0], finish_reason="length")]
    if streamed:
        with client.chat.completions.stream(model="policy", messages=MESSAGES, n=2) as stream:
            stream.until_done()
            texts = [choice.message.content for choice in stream.current_completion_snapshot.choices]
    else:
        reply = client.chat.completions.create(model="policy", messages=MESSAGES, n=2)
        texts = [choice.message.content for choice in reply.choices]
    assert texts == [Sampled().text, "x"]
    (call,) = exact()
    assert [choice.token_ids.tolist() for choice in call.choices] == [[11, 12, 13, 14, 2], [9, 2]]
    assert call.choices[1].finish_reason == "length"


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_with_their_arguments_byte_for_byte(client, exact, engine, streamed):
    engine.sampled = [
        Sampled(pieces=["", ""], ids=[8, 2], logprobs=[-1.0, -2.0], finish_reason="tool_calls", tool_calls=[CALL])
    ]
    if streamed:
        with client.chat.completions.stream(model="policy", messages=MESSAGES, tools=[TOOL]) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(model="policy", messages=MESSAGES, tools=[TOOL]).choices[0].message
    assert message.tool_calls[0].function.arguments == CALL["function"]["arguments"]

    engine.sampled = [Sampled()]
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "5"}
    history = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [CALL]}, answer]
    client.chat.completions.create(model="policy", messages=history, tools=[TOOL])
    assert engine.received[1].json["messages"][2] == answer
    exact(2)


@pytest.mark.parametrize("streamed", [False, True])
def test_completions(client, exact, streamed):
    reply = client.completions.create(model="policy", prompt="Once", stream=streamed)
    text = "".join(chunk.choices[0].text for chunk in reply) if streamed else reply.choices[0].text
    assert text == Sampled().text
    exact()


def test_log_probs_that_were_asked_for_arrive(client, exact):
    reply = client.chat.completions.create(model="policy", messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert [entry.logprob for entry in reply.choices[0].logprobs.content] == list(Sampled().logprobs)
    exact()


def test_models(client):
    assert [model.id for model in client.models.list()] == ["policy"]


def test_errors_are_the_sdks_own(client, gateway, store, engine, attempt):
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]"):
        client.chat.completions.create(model="policy", messages=["hi"])
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="policy", input="x")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(base_url=f"{gateway.base_url}/v1", api_key=new_key()).models.list()
    store.seal(attempt)
    with pytest.raises(openai.PermissionDeniedError):
        client.chat.completions.create(model="policy", messages=MESSAGES)


def test_an_error_inside_a_stream_raises(client, engine):
    engine.answers.append(stream(chunk({"content": "a"}), done=False, end="reset"))
    with pytest.raises(openai.APIError, match="Upstream"):
        list(client.chat.completions.create(model="policy", messages=MESSAGES, stream=True))


def test_its_default_retries_live_through_a_pause(client, gateway, exact):
    gateway.client.pause(5.0)
    wake = threading.Timer(2.0, gateway.client.resume, args=(1,))
    wake.start()
    reply = client.chat.completions.create(model="policy", messages=MESSAGES)
    wake.join()
    assert reply.choices[0].message.content == Sampled().text
    exact()


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("streamed", [False, True])
def test_S13_reasoning_under_any_name_reaches_the_agent_and_the_store_and_comes_back(
    client, engine, exact, name, streamed
):
    said = {"role": "assistant", "content": "Hi"} | {name: "hm"}
    if streamed:
        engine.answers.append(
            stream(
                chunk({"role": "assistant"}) | {"prompt_token_ids": [1]},
                chunk(said, token_ids=[5], logprobs=entries(-1.0), finish_reason="stop"),
                usage(1, 1),
            )
        )
        parts = list(client.chat.completions.create(model="policy", messages=MESSAGES, stream=True))
        shown = parts[1].choices[0].delta.to_dict()
    else:
        engine.answers.append(plain({"message": said, "token_ids": [5, 6], "logprobs": entries(-1.0, -2.0)}))
        shown = client.chat.completions.create(model="policy", messages=MESSAGES).choices[0].message.to_dict()
    assert shown[name] == "hm"
    assert f'"{name}": "hm"'.encode() in exact()[0].response
    client.chat.completions.create(model="policy", messages=[*MESSAGES, shown, *MESSAGES])
    assert engine.received[1].json["messages"][1][name] == "hm"
