"""The Anthropic SDK in an agent loop of its own."""

import sys

import anthropic

ADD = {
    "name": "add",
    "description": "Add two whole numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def ask(client, messages, streamed):
    request = {"model": "claude-sonnet-4-5", "max_tokens": 200, "tools": [ADD], "messages": messages}
    if not streamed:
        return client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        return stream.get_final_message()


def run(client, streamed):
    messages = [{"role": "user", "content": "What is 41235 + 27184? Find out with the tool, then tell me."}]
    while True:
        message = ask(client, messages, streamed)
        if message.stop_reason != "tool_use":
            return "".join(block.text for block in message.content if block.type == "text")
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": str(block.input["a"] + block.input["b"])}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


if __name__ == "__main__":
    print(run(anthropic.Anthropic(), sys.argv[2] == "streamed"))
