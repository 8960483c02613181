"""Strands Agents."""

import sys

from strands import Agent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


def model(dialect: str):
    if dialect == "messages":
        from strands.models.anthropic import AnthropicModel

        return AnthropicModel(model_id="claude-sonnet-4-5", max_tokens=200)
    from strands.models.openai import OpenAIModel

    return OpenAIModel(model_id="gpt-4o")


if __name__ == "__main__":
    agent = Agent(model=model(sys.argv[1]), tools=[add], callback_handler=None)
    print(agent("What is 41235 + 27184? Find out with the tool, then tell me."))
