"""Which models tree attention is right for, as far as their configuration tells.

A probe on a few tokens shows most of what differs (`LanguageModel`), but not what only acts on long rows: windows,
chunks, sparse attention. Each function gives a reason, or an empty string.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

_PLAIN = frozenset({"full_attention", "sliding_attention"})
_ON_LOGITS = ("logit_scale", "logits_scaling", "final_logit_softcapping", "lm_head_multiplier")


def unsupported_layers(config: Any) -> str:
    """Layers that mix tokens in another way than ordinary attention does."""
    text = config.get_text_config()
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _PLAIN)
    return f"it has layers of kind {', '.join(others)}" if others else ""


def ignored(config: Any, windows: Set[int | None]) -> str:
    """Where its layers went past tree attention. `windows` are those that they asked it for."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else window is not None
    if not windows:
        return "its attention cannot be replaced"
    return f"its sliding window of {window} is not handed to its attention" if slides and window not in windows else ""


def logit_changes(config: Any) -> str:
    """What its configuration does to logits after the vocabulary projection, which the backend computes itself."""
    text = config.get_text_config()
    names = [name for name in _ON_LOGITS if getattr(text, name, None) not in (None, 1, 1.0)]
    return f"its logits are changed by {', '.join(names)}" if names else ""
