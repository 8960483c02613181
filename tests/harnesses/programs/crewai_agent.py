"""A crew of one."""

import sys

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("add")
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


if __name__ == "__main__":
    llm = LLM(model="gpt-4o", stream=sys.argv[2] == "streamed")
    adder = Agent(
        role="Adder", goal="Right sums", backstory="You add with your tool.", llm=llm, tools=[add], max_iter=50
    )
    task = Task(
        description="What is 41235 + 27184? Find out with the tool.", expected_output="One sentence.", agent=adder
    )
    print(Crew(agents=[adder], tasks=[task]).kickoff())
