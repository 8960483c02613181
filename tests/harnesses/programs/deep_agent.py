"""deepagents, with one tool beside its own."""

import sys

from deepagents import create_deep_agent

MODELS = {"responses": "openai:gpt-4o", "messages": "anthropic:claude-sonnet-4-5"}


def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


if __name__ == "__main__":
    agent = create_deep_agent(model=MODELS[sys.argv[1]], tools=[add])
    answer = agent.invoke({"messages": [("user", "What is 41235 + 27184? Find out with the tool, then tell me.")]})
    print(answer["messages"][-1].text)
