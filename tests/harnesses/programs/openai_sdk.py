"""The OpenAI SDK in an agent loop of its own: call the model until it asks for no tool."""

import json
import sys

import openai

PROMPT = "What is 41235 + 27184? Find out with the tool, then tell me."
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
ADD = {"name": "add", "description": "Add two whole numbers.", "parameters": PARAMETERS}


def call_add(arguments):
    values = json.loads(arguments)
    return str(values["a"] + values["b"])


def run_chat(client, streamed):
    messages = [{"role": "user", "content": PROMPT}]
    request = {"model": "gpt-4o", "tools": [{"type": "function", "function": ADD}]}
    while True:
        if streamed:
            with client.chat.completions.stream(**request, messages=messages) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**request, messages=messages).choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(
            {
                "role": "assistant",
                "content": message.content,
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.function.name, "arguments": call.function.arguments},
                    }
                    for call in message.tool_calls
                ],
            }
        )
        for call in message.tool_calls:
            result = call_add(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def run_responses(client, streamed):
    """Keeps no history: each turn names the response that it follows."""
    request = {"model": "gpt-4o", "tools": [{"type": "function", **ADD}]}
    turn, previous = PROMPT, openai.omit
    while True:
        if streamed:
            with client.responses.stream(**request, input=turn, previous_response_id=previous) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(**request, input=turn, previous_response_id=previous)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        turn = [
            {"type": "function_call_output", "call_id": call.call_id, "output": call_add(call.arguments)}
            for call in calls
        ]
        previous = response.id


if __name__ == "__main__":
    run = {"chat": run_chat, "responses": run_responses}[sys.argv[1]]
    print(run(openai.OpenAI(), sys.argv[2] == "streamed"))
