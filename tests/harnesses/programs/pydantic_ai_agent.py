"""Pydantic-AI."""

import asyncio
import sys

from pydantic_ai import Agent

MODELS = {
    "chat": "openai-chat:gpt-4o",
    "responses": "openai:gpt-4o",
    "messages": "anthropic:claude-sonnet-4-5",
}


def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


async def main(dialect: str, streamed: bool) -> None:
    agent = Agent(MODELS[dialect], tools=[add])
    prompt = "What is 41235 + 27184? Find out with the tool, then tell me."
    if streamed:
        async with agent.run_stream(prompt) as result:
            print(await result.get_output())
    else:
        print((await agent.run(prompt)).output)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] == "streamed"))
