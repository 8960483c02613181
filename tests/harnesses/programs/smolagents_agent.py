"""smolagents; `code` for the agent that writes Python instead of tool calls, `short` for one that soon gives up."""

import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


if __name__ == "__main__":
    model = OpenAIModel(model_id="gpt-4o")
    kind = CodeAgent if "code" in sys.argv else ToolCallingAgent
    steps = 4 if "short" in sys.argv else 50
    agent = kind(tools=[add], model=model, stream_outputs=sys.argv[2] == "streamed", max_steps=steps)
    print(agent.run("What is 41235 + 27184? Find out with the tool, then tell me."))
