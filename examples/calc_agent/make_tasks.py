"""Write train.jsonl and heldout.jsonl: word problems for the calculator. The same seed gives the same bytes.

python make_tasks.py [--seed N] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import operator
import random
from pathlib import Path

TRAIN, HELDOUT = 400, 200
SOLVE = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}
# Subtraction is what the untrained model gets wrong most often, so it gets the largest share.
SHARES = {"add": 11, "subtract": 18, "multiply": 11}
# Each list goes from questions that name the operation to questions where it must be understood.
TEMPLATES = {
    "add": (
        "What is {a} plus {b}?",
        "What is the sum of {a} and {b}?",
        "Add {a} and {b}.",
        "What is the total of {a} and {b}?",
    ),
    "subtract": (
        "Subtract {b} from {a}.",
        "{name} has {a} {thing} and loses {b}. How many {thing} are left?",
        "A shop has {a} {thing} and sells {b}. How many {thing} are left?",
        "{name} has {a} {thing} and gives {b} away. How many {thing} are left?",
    ),
    "multiply": (
        "Multiply {a} by {b}.",
        "Take {a} times {b}.",
        "What is {a} multiplied by {b}?",
        "What is the product of {a} and {b}?",
    ),
}
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry")
THINGS = ("apples", "books", "coins", "eggs", "pencils", "stamps", "shells", "tickets")

Row = dict[str, str | int]


def make(rng: random.Random, pair: tuple[int, int], identifier: str) -> Row:
    """One task for an operand pair, the larger first."""
    tool = rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
    a, b = pair if tool == "subtract" or rng.random() < 0.5 else pair[::-1]
    question = rng.choice(TEMPLATES[tool]).format(a=a, b=b, name=rng.choice(NAMES), thing=rng.choice(THINGS))
    return {"id": identifier, "question": question, "tool": tool, "a": a, "b": b, "answer": SOLVE[tool](a, b)}


def generate(seed: int) -> dict[str, list[Row]]:
    """Both sets. Pairs are unordered and drawn without replacement, so that no pair is in both."""
    rng = random.Random(seed)
    pairs = rng.sample([(a, b) for b in range(2, 13) for a in range(b + 1, 100)], TRAIN + HELDOUT)
    return {
        "train": [make(rng, pair, f"train-{i:03}") for i, pair in enumerate(pairs[:TRAIN])],
        "heldout": [make(rng, pair, f"heldout-{i:03}") for i, pair in enumerate(pairs[TRAIN:])],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    for name, rows in generate(args.seed).items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (args.out / f"{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
