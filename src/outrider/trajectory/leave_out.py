"""Which calls of an attempt are context only: auxiliary ones, and those of models that are not trained.

Harnesses make calls that are not part of the work: a title for the talk, a summary for the status line, a probe of the
quota. Their answers share the rollout's reward without having had a part in it. A rule names such calls by what their
requests have in common; a call that meets all conditions of a rule is left out, and counted under the rule's name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from outrider.config import LeaveOutRule
from outrider.trajectory.requests import Asked, asked
from outrider.types import Call

OTHER_MODEL = "model not trained"


def left_out(calls: Sequence[Call], rules: Sequence[LeaveOutRule] = (), models: Sequence[str] = ()) -> dict[str, str]:
    """The reason, by call id, of each call of one attempt that is left out; the first rule that fits gives it.

    `models` are patterns of the names of models that are trained, as the harness asks for them; none means all.
    """
    reasons: dict[str, str] = {}
    requests = [asked(call) for call in calls] if rules else []
    some_have_tools = any(request.tools for request in requests)
    for call in calls:
        if models and not any(fnmatchcase(call.model, pattern) for pattern in models):
            reasons[call.id] = OTHER_MODEL
    for call, request in zip(calls, requests, strict=False):
        for rule in rules:
            if call.id not in reasons and _meets(call, request, rule, some_have_tools):
                reasons[call.id] = f"rule: {rule.name}"
    return reasons


def _meets(call: Call, request: Asked, rule: LeaveOutRule, some_have_tools: bool) -> bool:
    return (
        (not rule.model or fnmatchcase(call.model, rule.model))
        and (not rule.dialect or fnmatchcase(call.dialect, rule.dialect))
        and (not rule.system or re.search(rule.system, request.system) is not None)
        and (not rule.user or re.search(rule.user, request.first_user) is not None)
        and (not rule.max_tokens or (request.max_tokens is not None and request.max_tokens <= rule.max_tokens))
        and (not rule.no_tools or (some_have_tools and not request.tools))
        and (not rule.no_history or request.answers == 0)
        and (not rule.json_schema or request.schema)
    )
