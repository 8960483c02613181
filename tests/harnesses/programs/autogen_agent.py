"""AutoGen's assistant."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-4o")
    agent = AssistantAgent("adder", client, tools=[add], reflect_on_tool_use=True, max_tool_iterations=50)
    result = await agent.run(task="What is 41235 + 27184? Find out with the tool, then tell me.")
    print(result.messages[-1].content)
    await client.close()


if __name__ == "__main__":
    asyncio.run(main())
