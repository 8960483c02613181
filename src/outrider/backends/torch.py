"""The backend for one machine: a Hugging Face model, trained whole or by LoRA, on CPU or one GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import safetensors
import torch
from torch import Tensor

from outrider.backends.files import atomic_directory, open_tensors, write_hugging_face, write_tensors
from outrider.backends.language_model import LanguageModel, MicroBatch
from outrider.backends.lora import adapters_off, add_adapters, merged_weights
from outrider.backends.optimiser import AdamSettings, FlatAdamW, MasterAdamW
from outrider.backends.rows import check_rows, check_sample, loss_inputs
from outrider.backends.statistics import Statistics
from outrider.backends.stochastic import StochasticAdamW
from outrider.backends.terms import loss_terms
from outrider.errors import ConfigError, RunError
from outrider.protocols import LossSpec, OptimStats, StepStats
from outrider.rl.losses import find_loss
from outrider.types import FloatArray, Row, Sample

FORMAT = 1

PRECISIONS = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "bfloat16-stochastic": torch.bfloat16}
)
"""What the model computes in, by `precision`."""

VALUE_HEADS = MappingProxyType({"none": False, "shared": True, "detached": True})
"""Whether there is a critic, by `value_head`."""

_T = TypeVar("_T")


class TorchBackend:
    """Satisfies `outrider.protocols.Backend`.

    What the model computes with is bit for bit what is published. One thread may call `save` while no other calls
    `optim_step` or `load`.
    """

    def __init__(
        self,
        model: Path,
        *,
        lora_rank: int = 0,
        lora_alpha: float = 32.0,
        value_head: str = "none",
        value_lr_ratio: float = 1.0,
        token_budget: int = 4096,
        share_prefixes: bool = True,
        attention: str = "auto",
        gradient_checkpointing: bool = False,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        max_grad_norm: float = 1.0,
        precision: str = "bfloat16",
        device: str = "auto",
        threads: int = 0,
        seed: int = 0,
    ) -> None:
        """`model` is a Hugging Face folder. `token_budget` is in positions computed at once; `threads` 0 means all.

        `precision` is ``float32``; ``bfloat16``, which computes in it and keeps float32 masters and moments; or
        ``bfloat16-stochastic``, which keeps nothing wider between steps. `value_head` is ``none``; ``shared``, a critic
        whose loss also shapes the trunk; or ``detached``, one that leaves the trunk to the policy. `attention` is how
        prefixes are shared: ``tiles`` of plain products, PyTorch's ``flex`` attention, or ``auto``, flex on a GPU.
        """
        torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
        self._path = model
        self._dtype = _named(precision, PRECISIONS, "train.precision")
        self._device = _device(device)
        self._token_budget = token_budget
        self.share_prefixes = share_prefixes
        """May be changed between calls."""
        self._attention = attention
        self._lora = bool(lora_rank)
        self._model = LanguageModel(
            model,
            dtype=self._dtype,
            device=self._device,
            attention=attention,
            gradient_checkpointing=gradient_checkpointing,
        )
        if lora_rank:
            add_adapters(self._model.module, rank=lora_rank, alpha=lora_alpha, seed=seed)
        critic = None
        if _named(value_head, VALUE_HEADS, "train.critic"):
            critic = self._model.add_value_head(detached=value_head == "detached").trained()
        trained = {name: p for name, p in self._model.module.named_parameters() if p.requires_grad}
        settings = AdamSettings(
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            value_lr_ratio=value_lr_ratio,
        )
        self._optimiser: FlatAdamW
        if precision == "bfloat16-stochastic":
            self._optimiser = StochasticAdamW(trained, settings, critic, seed=seed)
        else:
            self._optimiser = MasterAdamW(trained, settings, critic)
        self._reference: LanguageModel | None = None

    # -- learning ----------------------------------------------------------------------------------------------------

    def forward_backward(self, rows: Sequence[Row], loss: LossSpec) -> StepStats:
        """Accumulate the gradient of ``sum(weights * loss)``; see `outrider.protocols.Backend`."""
        find_loss(loss.name)  # a wrong name is told before anything is computed
        rows = [row for row in rows if row.sample.loss_mask.any()]
        check_rows(rows, loss, self._model.vocabulary, critic=self._model.value_head is not None)
        statistics = Statistics()
        for batch in self._micro_batches([row.sample for row in rows]):
            scores = self._model.score(batch)
            given = loss_inputs(rows, batch, scores)
            terms = loss_terms(scores, given, loss)
            terms.total.backward()  # type: ignore[no-untyped-call]
            statistics.add(batch.pack, scores, given, terms)
        return statistics.result()

    def optim_step(self, lr: float) -> OptimStats:
        """Clip, step, zero the gradient. Skipped where there is no gradient, or one that is not finite."""
        return self._optimiser.step(lr)

    def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[FloatArray]:
        """Log-probs of the trained tokens, shape (T,) for each sample; 0 where its mask is false.

        `reference` asks for the starting weights: with LoRA the adapters are switched off; otherwise the model is
        read a second time at the first such call, and kept.
        """
        model = self._reference_model() if reference and not self._lora else self._model
        with adapters_off(self._model.module, reference and self._lora):
            return self._each_token(samples, lambda batch: model.score(batch).logp)

    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """The critic's value of the state before each trained token, (T,) for each sample; 0 where its mask is false.

        Raises `ConfigError` where the backend was made without a value head.
        """
        return self._each_token(samples, self._model.values)

    @torch.no_grad()
    def _each_token(self, samples: Sequence[Sample], score: Callable[[MicroBatch], Tensor]) -> list[FloatArray]:
        """What `score` gives the trained tokens of each micro-batch, (M,), put where they stand in their samples."""
        found = [np.zeros(len(sample.token_ids), dtype=np.float32) for sample in samples]
        kept = [index for index, sample in enumerate(samples) if sample.loss_mask.any()]
        for index in kept:
            check_sample(samples[index], self._model.vocabulary)
        for batch in self._micro_batches([samples[index] for index in kept]):
            values = score(batch).cpu().numpy()
            for local in np.unique(batch.row):
                of_row = batch.row == local
                found[kept[local]][batch.position[of_row]] = values[of_row]
        return found

    def _micro_batches(self, samples: Sequence[Sample]) -> Iterator[MicroBatch]:
        return self._model.micro_batches(samples, token_budget=self._token_budget, share_prefixes=self.share_prefixes)

    def _reference_model(self) -> LanguageModel:
        if self._reference is None:
            self._reference = LanguageModel(
                self._path, dtype=self._dtype, device=self._device, attention=self._attention
            )
            self._reference.module.requires_grad_(False)
        return self._reference

    # -- weights -----------------------------------------------------------------------------------------------------

    def publish(self, directory: Path) -> Path:
        """Write the present weights in bfloat16, with the tokenizer and chat template of the starting model."""
        module = self._model.module
        weights = merged_weights(module) if self._lora else module.state_dict()
        with atomic_directory(directory) as folder:
            write_hugging_face(folder, weights, module, start=self._path)
        return directory

    def save(self, directory: Path) -> None:
        """Write trained weights (the critic's too), moments and random state, atomically.

        No optimiser step may run meanwhile.
        """
        state = {"format": FORMAT, "steps": self._optimiser.steps, "model": str(self._path)}
        with atomic_directory(directory) as folder:
            for name, tensors in self._optimiser.tensors().items():
                write_tensors(folder / f"{name}.safetensors", tensors)
            write_tensors(folder / "random.safetensors", {"torch": torch.get_rng_state()})
            (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")

    def load(self, directory: Path) -> None:
        """Go on exactly where `save` was called, with no gradient. Raises `RunError` where the folder does not fit."""
        try:
            state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
            if state["format"] != FORMAT:
                raise RunError(f"{directory} has checkpoint format {state['format']}; this version reads {FORMAT}.")
            tables = {name: open_tensors(directory / f"{name}.safetensors") for name in FlatAdamW.TABLES}
            self._optimiser.restore(tables, state["steps"])
            torch.set_rng_state(open_tensors(directory / "random.safetensors")["torch"])
        except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
            raise RunError(
                f"{directory} is no whole checkpoint: {error}. Remove it to go on from an older one."
            ) from error


def _named(name: str, table: Mapping[str, _T], field: str) -> _T:
    if name not in table:
        raise ConfigError(f"{field}: there is no {name!r}. Known: {', '.join(table)}.")
    return table[name]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
