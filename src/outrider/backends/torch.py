"""The backend for one machine: a Hugging Face model, trained whole or by LoRA, on CPU or one GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import safetensors
import torch
from torch import Tensor

from outrider.backends.files import atomic_directory, open_tensors, write_hugging_face, write_tensors
from outrider.backends.language_model import LanguageModel, MicroBatch
from outrider.backends.lora import adapters_off, add_adapters, merged_weights
from outrider.backends.optimiser import MasterAdamW
from outrider.backends.statistics import Statistics
from outrider.errors import BatchError, ConfigError, RunError
from outrider.protocols import LossSpec, OptimStats, StepStats
from outrider.rl.losses import KL, LOSSES, Tokens
from outrider.types import FloatArray, Row, Sample

FORMAT = 1
OPTIONAL = ("reference_logprobs", "old_logprobs", "returns", "old_values")
"""Arrays that all rows of a batch have, or none."""


class TorchBackend:
    """Satisfies `outrider.protocols.Backend`.

    All trained weights have float32 masters; the model computes in `dtype` with rounded copies, which are also what is
    published. One thread may call `save` while no other calls `optim_step` or `load`.
    """

    def __init__(
        self,
        model: Path,
        *,
        lora_rank: int = 0,
        lora_alpha: float = 32.0,
        token_budget: int = 4096,
        share_prefixes: bool = True,
        gradient_checkpointing: bool = False,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        max_grad_norm: float = 1.0,
        dtype: str = "bfloat16",
        device: str = "auto",
        threads: int = 0,
        seed: int = 0,
    ) -> None:
        """`model` is a Hugging Face folder. `token_budget` is in positions computed at once; `threads` 0 means all."""
        torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
        self._path = model
        self._dtype = dtype
        self._device = _device(device)
        self._token_budget = token_budget
        self._share_prefixes = share_prefixes
        self._lora = bool(lora_rank)
        self._model = LanguageModel(
            model, dtype=dtype, device=self._device, gradient_checkpointing=gradient_checkpointing
        )
        if lora_rank:
            add_adapters(self._model.module, rank=lora_rank, alpha=lora_alpha, seed=seed)
        trained = {name: p for name, p in self._model.module.named_parameters() if p.requires_grad}
        self._optimiser = MasterAdamW(
            trained, betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm
        )
        self._reference: LanguageModel | None = None

    # -- learning ----------------------------------------------------------------------------------------------------

    def forward_backward(self, rows: Sequence[Row], loss: LossSpec) -> StepStats:
        """Accumulate the gradient of ``sum(weights * loss)``; see `outrider.protocols.Backend`."""
        if loss.name not in LOSSES:
            raise ConfigError(f"train.loss: there is no {loss.name!r}. Known: {', '.join(sorted(LOSSES))}.")
        rows = [row for row in rows if row.sample.loss_mask.any()]
        _check(rows, loss, self._model.module.config.vocab_size)
        statistics = Statistics()
        for batch in self._micro_batches([row.sample for row in rows]):
            logp, entropy = self._model.score(batch)
            tokens, weights, reference = _tokens(rows, batch, logp)
            policy = LOSSES[loss.name](tokens, loss)
            total = (weights * policy.loss).sum()
            kl = KL[loss.kl](logp, reference) if reference is not None else None
            if kl is not None and loss.kl_coef:
                total = total + loss.kl_coef * (weights * kl).sum()
            if loss.entropy_coef:
                total = total - loss.entropy_coef * (weights * entropy).sum()
            total.backward()  # type: ignore[no-untyped-call]
            statistics.add(batch.pack.size, total, tokens, policy, entropy, kl)
        return statistics.result()

    def optim_step(self, lr: float) -> OptimStats:
        """Clip, step, zero the gradient. Skipped where there is no gradient, or one that is not finite."""
        return self._optimiser.step(lr)

    def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[FloatArray]:
        """Log-probs of the trained tokens, shape (T,) for each sample; 0 where its mask is false.

        `reference` asks for the starting weights: with LoRA the adapters are switched off; otherwise the model is
        read a second time at the first such call, and kept.
        """
        found = [np.zeros(len(sample.token_ids), dtype=np.float32) for sample in samples]
        kept = [index for index, sample in enumerate(samples) if sample.loss_mask.any()]
        model = self._reference_model() if reference and not self._lora else self._model
        with torch.no_grad(), adapters_off(self._model.module, reference and self._lora):
            for batch in self._micro_batches([samples[index] for index in kept]):
                values = model.score(batch)[0].cpu().numpy()
                for local in np.unique(batch.row):
                    of_row = batch.row == local
                    found[kept[local]][batch.position[of_row]] = values[of_row]
        return found

    def _micro_batches(self, samples: Sequence[Sample]) -> Iterator[MicroBatch]:
        return self._model.micro_batches(samples, token_budget=self._token_budget, share_prefixes=self._share_prefixes)

    def _reference_model(self) -> LanguageModel:
        if self._reference is None:
            self._reference = LanguageModel(self._path, dtype=self._dtype, device=self._device)
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
        """Write masters, moments and random state, float32, atomically. No optimiser step may run meanwhile."""
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
            tables = {name: open_tensors(directory / f"{name}.safetensors") for name in MasterAdamW.TABLES}
            self._optimiser.restore(tables, state["steps"])
            torch.set_rng_state(open_tensors(directory / "random.safetensors")["torch"])
        except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
            raise RunError(
                f"{directory} is no whole checkpoint: {error}. Remove it to go on from an older one."
            ) from error


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _tokens(rows: Sequence[Row], batch: MicroBatch, logp: Tensor) -> tuple[Tokens, Tensor, Tensor | None]:
    """What a loss wants of a micro-batch's M trained tokens, their weights, and reference log-probs if any."""
    _, row = np.unique(batch.row, return_inverse=True)

    def column(arrays: Sequence[FloatArray]) -> Tensor:
        values = np.array([arrays[r][p] for r, p in zip(batch.row, batch.position, strict=True)], dtype=np.float32)
        return torch.from_numpy(values).to(logp.device)

    def optional(arrays: Sequence[FloatArray | None]) -> Tensor | None:
        given = [array for array in arrays if array is not None]
        return column(given) if given else None

    tokens = Tokens(
        logp=logp,
        behaviour_logp=column([item.sample.logprobs for item in rows]),
        old_logp=optional([item.old_logprobs for item in rows]),
        advantages=column([item.advantages for item in rows]),
        row=torch.from_numpy(row.astype(np.int64)).to(logp.device),
    )
    return tokens, column([item.weights for item in rows]), optional([item.reference_logprobs for item in rows])


def _check(rows: Sequence[Row], loss: LossSpec, vocabulary: int) -> None:
    """Raise `BatchError` on rows that must not be trained on."""
    for row in rows:
        name, total = row.sample.rollout_id, len(row.sample.token_ids)
        arrays = {"advantages": row.advantages, "weights": row.weights, "logprobs": row.sample.logprobs}
        for field in OPTIONAL:
            if getattr(row, field) is not None:
                arrays[field] = getattr(row, field)
        if loss.kl_coef and row.reference_logprobs is None:
            raise BatchError(f"rollout {name}: train.kl_coef is set, but its row has no reference log-probs.")
        for field, values in arrays.items():
            if len(values) != total:
                raise BatchError(f"rollout {name}: {field} has length {len(values)} for {total} tokens.")
            if not np.isfinite(values).all():
                raise BatchError(f"rollout {name}: {field} holds a number that is not finite.")
        _check_sample(row.sample, vocabulary)
    for field in OPTIONAL:
        if len({getattr(row, field) is None for row in rows}) > 1:
            raise BatchError(f"some rows have {field} and some have not.")


def _check_sample(sample: Sample, vocabulary: int) -> None:
    name = sample.rollout_id
    if sample.loss_mask[0]:
        raise BatchError(f"rollout {name}: the first token of a row cannot be trained, it has no context.")
    if not 0 <= sample.token_ids.min() <= sample.token_ids.max() < vocabulary:
        raise BatchError(f"rollout {name}: a token id is outside the model's vocabulary of {vocabulary}.")
    if sample.temperature <= 0:
        raise BatchError(f"rollout {name}: a temperature of {sample.temperature} has no log-probs.")
