"""A causal language model, and how rows go through it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.backends import tree_attention
from outrider.backends.head import Targets, token_logprobs
from outrider.backends.lean import slim, unslim
from outrider.backends.packing import Index, Pack, pack
from outrider.backends.support import ignored, logit_changes, unsupported_layers
from outrider.backends.value_head import ValueHead
from outrider.errors import ConfigError
from outrider.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A pack and the trained tokens in it: M of them, in the order in which they are scored."""

    pack: Pack
    targets: Targets
    row: Index
    """(M,): which of the given samples a token belongs to."""
    position: Index
    """(M,): where in its sample it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Of a micro-batch's M trained tokens, float32 (M,) each and with a gradient."""

    logp: Tensor
    entropy: Tensor
    values: Tensor | None
    """What the critic gives the state before each; None where there is no critic."""


class LanguageModel:
    """A Hugging Face model in `path`, for training on packed rows.

    Models with ordinary attention run with tree attention; that is checked on a few tokens at the start, and a model
    that does not agree with itself (recurrent layers, capped logits, attention sinks) runs row by row, with a warning.
    `attention` says how the tree is attended to: see `outrider.backends.tree_attention`.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        attention: str = "auto",
        gradient_checkpointing: bool = False,
    ) -> None:
        self.device = device
        ways = tree_attention.ways(attention, device)
        self.module = load_model(path, dtype).to(device)
        self.vocabulary: int = self.module.config.get_text_config().vocab_size
        for module in self.module.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(getattr(module, "attention_dropout", None), float):
                module.attention_dropout = 0.0
        self.module.train()  # checkpointing asks for it; with dropout gone nothing else does
        if gradient_checkpointing:
            # Renamed within transformers 5; the older name warns.
            enable = getattr(self.module, "activation_checkpointing_enable", None)
            (enable or self.module.gradient_checkpointing_enable)({"use_reentrant": False})
        self.value_head: ValueHead | None = None
        self._windows: set[int | None] = set()
        self._make_tree = ways[0]
        self.packed = self._use_tree_attention(ways)

    def add_value_head(self, *, detached: bool) -> ValueHead:
        """Put a critic on the last hidden state."""
        size = self.module.get_output_embeddings().weight.shape[1]
        self.value_head = ValueHead(size, self.device, detached=detached)
        return self.value_head

    def micro_batches(
        self, samples: Sequence[Sample], *, token_budget: int, share_prefixes: bool
    ) -> Iterator[MicroBatch]:
        """Cut `samples` into micro-batches. Tokens after the last trained one are not computed."""
        last = [int(np.flatnonzero(sample.loss_mask)[-1]) for sample in samples]
        rows = [sample.token_ids[:stop] for sample, stop in zip(samples, last, strict=True)]
        for made in pack(rows, token_budget=token_budget, share_prefixes=share_prefixes and self.packed):
            yield _locate(made, samples, self.device)

    def score(self, batch: MicroBatch) -> Scores:
        """Log-probs, entropies and values of the trained tokens."""
        targets = batch.targets
        hidden: Tensor | None
        if self.packed:
            hidden = self._hidden(batch)
            head = self.module.get_output_embeddings()
            logp, entropy = token_logprobs(hidden, head.weight, getattr(head, "bias", None), targets)
        else:
            hidden, logits = self._by_row(batch)
            scaled = logits[targets.places].float() / targets.temperatures[:, None]
            logprobs = torch.log_softmax(scaled, dim=-1)
            logp = logprobs[targets.place_of, targets.token_ids]
            entropy = -(logprobs.exp() * logprobs).sum(-1)[targets.place_of]
        return Scores(logp=logp, entropy=entropy, values=self._values(hidden, targets))

    def values(self, batch: MicroBatch) -> Tensor:
        """What the critic gives the states before the trained tokens, float32 (M,), without the log-probs' cost."""
        hidden = self._hidden(batch) if self.packed else self._by_row(batch)[0]
        found = self._values(hidden, batch.targets)
        if found is None:
            raise ConfigError("there are no values: the backend was made without a value head.")
        return found

    def _values(self, hidden: Tensor | None, targets: Targets) -> Tensor | None:
        if self.value_head is None or hidden is None:
            return None
        values: Tensor = self.value_head(hidden[targets.places])
        return values[targets.place_of]

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """The last hidden state of each node, (N, H)."""
        tree = self._make_tree(batch.pack.chains, self.device)
        hidden: Tensor = self.module.get_decoder()(
            input_ids=_tensor(np.concatenate(batch.pack.token_ids), self.device)[None],
            position_ids=_tensor(np.concatenate(batch.pack.positions), self.device)[None],
            use_cache=False,
            outrider_tree=tree,
        ).last_hidden_state
        self._windows = set(tree.windows)
        return hidden[0]

    def _by_row(self, batch: MicroBatch) -> tuple[Tensor | None, Tensor]:
        """Hidden states where a critic wants them and logits, (N, H) and (N, V), from the model's own forward pass
        over padded rows."""
        chains = batch.pack.chains
        longest = max(len(chain.path) for chain in chains)
        ids = np.zeros((len(chains), longest), dtype=np.int64)
        mask = np.zeros_like(ids)
        for index, (chain, row) in enumerate(zip(chains, batch.pack.token_ids, strict=True)):
            ids[index, : len(chain.path)] = row
            mask[index, : len(chain.path)] = 1
        made = self.module(
            input_ids=_tensor(ids, self.device),
            attention_mask=_tensor(mask, self.device),
            use_cache=False,
            output_hidden_states=self.value_head is not None,
        )
        nodes = _tensor(mask, self.device).bool()  # rows lie end to end in a pack without sharing
        return None if self.value_head is None else made.hidden_states[-1][nodes], made.logits[nodes]

    def _use_tree_attention(self, ways: Sequence[tree_attention.MakeTree]) -> bool:
        """Switch to the first of `ways` by which the model gives the same log-probs as without."""
        standard = self.module.config._attn_implementation
        self.packed = False
        reason = unsupported_layers(self.module.config)
        if not reason:
            with torch.no_grad(), _in_float32(self.module):
                expected = self._probe()
                for way in ways:
                    reason = self._disagreement(way, expected)
                    if not reason:
                        return True
        self.packed = False
        self.module.set_attn_implementation(standard)
        unslim(self.module)
        name = type(self.module).__name__
        warnings.warn(
            f"{name} cannot share prefixes ({reason}); it is trained row by row, which is slower.", stacklevel=4
        )
        return False

    def _disagreement(self, way: tree_attention.MakeTree, expected: Tensor) -> str:
        """Switch to `way`; returns why it is not right for the model, or an empty string."""
        try:
            ALL_ATTENTION_FUNCTIONS.register(tree_attention.NAME, tree_attention.attend)
            self.module.set_attn_implementation(tree_attention.NAME)
            slim(self.module)
            self.packed, self._make_tree = True, way
            difference = float((self._probe() - expected).abs().max())
        except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
            return str(error) or type(error).__name__
        if difference > 1e-3:
            return logit_changes(self.module.config) or f"log-probs differ by {difference:.2g}"
        return ignored(self.module.config, self._windows)

    def _probe(self) -> Tensor:
        """Log-probs of a few tokens."""
        (batch,) = self.micro_batches(_probes(self.vocabulary), token_budget=1 << 20, share_prefixes=True)
        order = np.lexsort((batch.position, batch.row))
        return self.score(batch).logp[_tensor(order, self.device)]


def load_model(path: Path, dtype: torch.dtype) -> Any:
    """Read a Hugging Face folder. Raises `ConfigError` where there is none."""
    if not (path / "config.json").is_file():
        raise ConfigError(f"model.path: {path} is not a Hugging Face folder (it has no config.json).")
    with _no_progress_bar():
        try:
            return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path: {path} cannot be loaded: {error}") from error


@contextlib.contextmanager
def _in_float32(module: nn.Module) -> Iterator[None]:
    """Widen the parameters meanwhile: in bfloat16 two right ways to compute a log-prob differ by 0.1."""
    narrow = [(parameter, parameter.dtype) for parameter in module.parameters() if parameter.dtype != torch.float32]
    for parameter, _ in narrow:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, dtype in narrow:
            parameter.data = parameter.data.to(dtype)


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers draws a bar while it loads, across whatever the terminal shows."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def _locate(made: Pack, samples: Sequence[Sample], device: torch.device) -> MicroBatch:
    """Find the trained tokens of a pack's rows, and the places that predict them."""
    rows, positions, nodes = [], [], []
    for index, path in zip(made.rows, made.paths, strict=True):
        at = np.flatnonzero(samples[index].loss_mask)
        rows.append(np.full(len(at), index))
        positions.append(at)
        nodes.append(path[at - 1])
    row, position, node = np.concatenate(rows), np.concatenate(positions), np.concatenate(nodes)
    temperature = np.array([sample.temperature for sample in samples], dtype=np.float32)[row]
    # Rows of different temperature may meet at a node; they need a projection each.
    places, place_of = np.unique(np.stack([node, temperature.view(np.int32)]), axis=1, return_inverse=True)
    place_of = place_of.reshape(-1)
    order = np.argsort(place_of, kind="stable")
    token_ids = np.array([samples[r].token_ids[p] for r, p in zip(row, position, strict=True)])
    return MicroBatch(
        pack=made,
        targets=Targets(
            places=_tensor(places[0], device),
            temperatures=torch.from_numpy(places[1].astype(np.int32).view(np.float32)).to(device),
            place_of=_tensor(place_of[order], device),
            token_ids=_tensor(token_ids[order], device),
        ),
        row=row[order],
        position=position[order],
    )


def _tensor(values: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device)


def _probes(vocabulary: int) -> list[Sample]:
    """Two rows with a common beginning, all of them scored."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, vocabulary, 12)
    rows = [np.concatenate([start, rng.integers(0, vocabulary, length)]).astype(np.int32) for length in (12, 9)]
    return [
        Sample(
            rollout_id=str(index),
            group_id="probe",
            attempt_id="probe",
            token_ids=ids,
            loss_mask=np.arange(len(ids)) > 0,
            logprobs=np.zeros(len(ids), dtype=np.float32),
            versions=np.zeros(len(ids), dtype=np.int32),
            call_index=np.zeros(len(ids), dtype=np.int32),
        )
        for index, ids in enumerate(rows)
    ]
