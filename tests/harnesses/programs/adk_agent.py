"""Google's Agent Development Kit, through LiteLLM."""

import asyncio
import sys

from google.adk.agents import Agent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

MODELS = {"chat": "openai/gpt-4o", "messages": "anthropic/claude-sonnet-4-5"}


def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


async def main(dialect: str, streamed: bool) -> None:
    agent = Agent(name="adder", model=LiteLlm(model=MODELS[dialect]), instruction="Add with your tool.", tools=[add])
    runner = InMemoryRunner(agent=agent, app_name="adder")
    session = await runner.session_service.create_session(app_name="adder", user_id="user")
    prompt = types.Content(role="user", parts=[types.Part(text="What is 41235 + 27184?")])
    config = RunConfig(streaming_mode=StreamingMode.SSE if streamed else StreamingMode.NONE)
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=prompt, run_config=config):
        if event.is_final_response():
            print("".join(part.text or "" for part in event.content.parts))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] == "streamed"))
