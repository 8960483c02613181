"""OpenAI Agents SDK."""

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api


@function_tool
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


async def main(dialect: str, streamed: bool) -> None:
    if dialect == "chat":
        set_default_openai_api("chat_completions")
    agent = Agent(name="Adder", instructions="Use your tool for sums.", tools=[add], model="gpt-4o")
    prompt = "What is 41235 + 27184? Find out with the tool, then tell me."
    if streamed:
        result = Runner.run_streamed(agent, prompt, max_turns=50)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, prompt, max_turns=50)
    print(result.final_output)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] == "streamed"))
