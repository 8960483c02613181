"""OpenHands SDK with its terminal."""

import os
import sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool

MODELS = {"chat": "openai/gpt-4o", "messages": "anthropic/claude-sonnet-4-5"}

if __name__ == "__main__":
    agent = Agent(llm=LLM(model=MODELS[sys.argv[1]], usage_id="agent"), tools=[Tool(name=TerminalTool.name)])
    conversation = Conversation(agent=agent, workspace=os.getcwd())
    conversation.send_message("What is 41235 + 27184? Find out with the tool, then tell me.")
    conversation.run()
    print("status:", conversation.state.execution_status.value)
