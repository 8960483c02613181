"""Tools that an agent offered and its model never saw, because the chat template has no place for them.

Nothing fails then: the model answers as if it had no tools, and the run learns nothing. It is found in what was
recorded: a prompt that has none of the offered tools' names with their parameters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from outrider.protocols import Store
from outrider.reports.text import one_line
from outrider.reports.tokens import Tokenizer, pieces
from outrider.types import Call

_LOOKED_AT = 4


def unseen_tools(calls: Sequence[Call], tokenizer: Tokenizer | None) -> str:
    """A sentence on it, where the first call of an attempt that offers tools shows it; else nothing."""
    for call in calls:
        tools = _tools(call.request)
        if not tools or call.prompt_ids is None:
            continue
        prompt = "".join(pieces(call.prompt_ids.tolist(), tokenizer) or ())
        if prompt and not any(all(word in prompt for word in words) for words in tools.values()):
            return (
                f"The model saw no tools: its chat template dropped {one_line(', '.join(tools), 60)}. Describe them in "
                "the system prompt, show a call in the history, or take a model whose template writes them."
            )
        return ""
    return ""


def unseen_in_run(store: Store, tokenizer: Tokenizer | None) -> str:
    """The same for a run, by some of its rollouts."""
    looked_at = [rollout for rollout in store.rollouts() if rollout.attempt][-_LOOKED_AT:]
    found = {unseen_tools(store.calls(one.attempt_id), tokenizer) for one in looked_at}
    return found.pop() if len(found) == 1 else ""


def _tools(body: bytes) -> dict[str, tuple[str, ...]]:
    """The tools that a request offers, in any of the protocols: name -> words that a prompt which tells of it has."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    given = request.get("tools") if isinstance(request, dict) else None
    found: dict[str, tuple[str, ...]] = {}
    for tool in given if isinstance(given, list) else ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            continue
        name = function.get("name")
        if isinstance(name, str) and name:
            schema = function.get("parameters") or function.get("input_schema")
            properties = schema.get("properties") if isinstance(schema, dict) else None
            found[name] = (name, *(properties if isinstance(properties, dict) else ()))
    return found
