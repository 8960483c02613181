"""Policy losses: from log-probs and advantages to one loss a trained token.

    LOSSES["ppo_clip"](tokens, spec) -> TokenLoss

Losses are pure functions of a `Tokens`, the trained tokens of whole rows laid end to end (each tensor of shape (N,)),
and of a `LossSpec` with their numbers. They return one loss a token and do no averaging: the backend takes
``sum(weights * loss)`` with the weights of `outrider.rl.normalisation`. They are homogeneous in the advantages: a token
whose advantage is multiplied by w >= 0 has w times the loss, which is how `outrider.rl.correction` acts. Another loss
is one more file here and a line below, or ``module:function`` in a run file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from outrider.protocols import LossSpec
from outrider.rl.find import find
from outrider.rl.losses.cispo import cispo
from outrider.rl.losses.dppo import dppo_kl, dppo_tv
from outrider.rl.losses.gspo import gspo
from outrider.rl.losses.kl import KL, k1, k2, k3
from outrider.rl.losses.ppo_clip import ppo_clip
from outrider.rl.losses.reinforce import reinforce
from outrider.rl.losses.sapo import sapo
from outrider.rl.losses.tokens import TokenLoss, Tokens
from outrider.rl.losses.value import value_loss

Loss = Callable[[Tokens, LossSpec], TokenLoss]

LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "ppo_clip": ppo_clip,
        "reinforce": reinforce,
        "cispo": cispo,
        "gspo": gspo,
        "sapo": sapo,
        "dppo_tv": dppo_tv,
        "dppo_kl": dppo_kl,
    }
)


def find_loss(name: str) -> Loss:
    """By name or as ``module:function``. Raises `ConfigError`."""
    return find(LOSSES, name, "train.loss")


__all__ = [
    "KL",
    "LOSSES",
    "Loss",
    "TokenLoss",
    "Tokens",
    "cispo",
    "dppo_kl",
    "dppo_tv",
    "find_loss",
    "gspo",
    "k1",
    "k2",
    "k3",
    "ppo_clip",
    "reinforce",
    "sapo",
    "value_loss",
]
