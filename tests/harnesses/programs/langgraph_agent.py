"""LangGraph's prebuilt agent, over LangChain's OpenAI or Anthropic model."""

import sys

from langchain.agents import create_agent


def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


def model(dialect: str):
    if dialect == "messages":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model="claude-sonnet-4-5", max_tokens=200)
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="gpt-4o", use_responses_api=dialect == "responses")


def main(dialect: str, streamed: bool) -> None:
    agent = create_agent(model(dialect), [add])
    request = {"messages": [("user", "What is 41235 + 27184? Find out with the tool, then tell me.")]}
    if streamed:
        for chunk, _ in agent.stream(request, stream_mode="messages"):
            print(chunk.text, end="")
        print()
    else:
        print(agent.invoke(request)["messages"][-1].text)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "streamed")
