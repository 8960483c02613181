"""Policy losses: from log-probs and advantages to one loss a trained token.

    LOSSES["ppo_clip"](tokens, spec) -> TokenLoss

Losses are pure functions of a `Tokens`, the trained tokens of whole rows laid end to end. They return one loss a token
and do no averaging: the backend takes ``sum(weights * loss)`` with the weights of `outrider.rl.normalisation`.
Another loss is one more file here and a line below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from outrider.protocols import LossSpec
from outrider.rl.losses.cispo import cispo
from outrider.rl.losses.gspo import gspo
from outrider.rl.losses.kl import k1, k2, k3
from outrider.rl.losses.ppo_clip import ppo_clip
from outrider.rl.losses.reinforce import reinforce
from outrider.rl.losses.tokens import TokenLoss, Tokens

Loss = Callable[[Tokens, LossSpec], TokenLoss]

LOSSES: Mapping[str, Loss] = MappingProxyType(
    {"ppo_clip": ppo_clip, "reinforce": reinforce, "cispo": cispo, "gspo": gspo}
)

__all__ = ["LOSSES", "Loss", "TokenLoss", "Tokens", "cispo", "gspo", "k1", "k2", "k3", "ppo_clip", "reinforce"]
