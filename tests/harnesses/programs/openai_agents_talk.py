"""OpenAI Agents SDK: three questions in one session, after three examples of how the tool is used."""

import asyncio

from agents import Agent, ModelSettings, Runner, SQLiteSession, function_tool, set_default_openai_api

QUESTIONS = ("What is 12 + 30?", "What is 5 + 8?", "What is 71 + 17?")


@function_tool
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


def example(a: int, b: int) -> list:
    call_id = f"example{a}"
    return [
        {"role": "user", "content": f"What is {a} + {b}?"},
        {"type": "function_call", "call_id": call_id, "name": "add", "arguments": f'{{"a": {a}, "b": {b}}}'},
        {"type": "function_call_output", "call_id": call_id, "output": str(a + b)},
        {"role": "assistant", "content": f"{a} + {b} = {a + b}"},
    ]


async def main() -> None:
    set_default_openai_api("chat_completions")
    settings = ModelSettings(max_tokens=48)
    agent = Agent(
        name="Adder", instructions="Add with your tool.", tools=[add], model="policy", model_settings=settings
    )
    session = SQLiteSession("talk")
    await session.add_items([*example(31, 46), *example(7, 5), *example(60, 21)])
    for question in QUESTIONS:
        result = await Runner.run(agent, question, session=session, max_turns=4)
        print(result.final_output)


if __name__ == "__main__":
    asyncio.run(main())
