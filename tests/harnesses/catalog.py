"""The real harnesses that are run through the gateway: what to install, how to start, which variable to set.

Texts hold `$name` placeholders: `$url` is the base URL without ``/v1``, `$key` the API key, `$bin` the folder of the
installed programs, `$python` the harness's own interpreter, `$programs` the folder of our programs, `$work` the empty
folder that the harness runs in, and `$prompt` the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from outrider.types import Break

PROMPT = "What is 41235 + 27184? Find out with the tool, then tell me."


class Dialect(StrEnum):
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"


class Installer(StrEnum):
    PIP = "pip"
    NPM = "npm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to start a harness."""

    dialect: Dialect
    streamed: bool
    command: tuple[str, ...]
    label: str = ""
    """Tells variants of the same dialect apart."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Beside the base URL and the API key, which `environment` sets."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files to write into `$work` before the start."""
    rewrites: tuple[Break, ...] = ()
    """What it does to its history, so that a conversation can't go on with its tokens."""
    left_to_engine: str = ""
    """What it asks for, so that the gateway can't make its prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    name: str
    requirements: tuple[str, ...]
    """What pip or npm installs; the first one names the harness's own version."""
    variants: tuple[Variant, ...]
    installer: Installer = Installer.PIP
    python: tuple[int, int] = (3, 11)
    """The oldest Python that it runs on."""
    env: Mapping[str, str] = field(default_factory=dict)
    """For every variant: telemetry off, and what the harness insists on."""
    needs: str = ""
    """What must be set beside the base URL and the key, for people to read."""
    timeout_s: float = 180.0

    @property
    def version(self) -> str:
        return self.requirements[0].rpartition("@" if self.installer is Installer.NPM else "==")[2]


def program(name: str, dialect: Dialect, *arguments: str, streamed: bool = False, label: str = "") -> Variant:
    """A variant that runs `programs/NAME.py DIALECT plain|streamed ARGUMENTS`."""
    command = ("$python", f"$programs/{name}.py", dialect.value, "streamed" if streamed else "plain", *arguments)
    return Variant(dialect=dialect, streamed=streamed, command=command, label=label)


LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}

SDKS = (
    Harness(
        name="openai",
        requirements=("openai==3.57.0",),
        variants=(
            program("openai_sdk", Dialect.CHAT),
            program("openai_sdk", Dialect.CHAT, streamed=True),
            program("openai_sdk", Dialect.RESPONSES),
            program("openai_sdk", Dialect.RESPONSES, streamed=True),
        ),
    ),
    Harness(
        name="anthropic",
        requirements=("anthropic==2.14.0",),
        variants=(
            program("anthropic_sdk", Dialect.MESSAGES),
            program("anthropic_sdk", Dialect.MESSAGES, streamed=True),
        ),
    ),
)

FRAMEWORKS = (
    Harness(
        name="openai-agents",
        requirements=("openai-agents==0.24.0",),
        env={"OPENAI_AGENTS_DISABLE_TRACING": "1"},
        variants=(
            program("openai_agents", Dialect.CHAT),
            program("openai_agents", Dialect.CHAT, streamed=True),
            program("openai_agents", Dialect.RESPONSES),
            program("openai_agents", Dialect.RESPONSES, streamed=True),
        ),
    ),
    Harness(
        name="langgraph",
        requirements=(
            "langgraph==1.2.24",
            "langchain==1.5.2",
            "langchain-openai==1.7.4",
            "langchain-anthropic==1.7.10",
        ),
        variants=(
            program("langgraph_agent", Dialect.CHAT),
            program("langgraph_agent", Dialect.CHAT, streamed=True),
            program("langgraph_agent", Dialect.RESPONSES),
            program("langgraph_agent", Dialect.MESSAGES),
        ),
    ),
    Harness(
        name="deepagents",
        requirements=("deepagents==0.7.32", "langchain-openai==1.7.4"),
        variants=(program("deep_agent", Dialect.RESPONSES), program("deep_agent", Dialect.MESSAGES)),
    ),
    Harness(
        name="autogen",
        requirements=("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"),
        variants=(program("autogen_agent", Dialect.CHAT),),
    ),
    Harness(
        name="crewai",
        requirements=("crewai==1.15.30",),
        env={"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"},
        variants=(program("crewai_agent", Dialect.CHAT), program("crewai_agent", Dialect.CHAT, streamed=True)),
    ),
    Harness(
        name="pydantic-ai",
        requirements=("pydantic-ai-slim[openai,anthropic]==2.62.0",),
        variants=(
            program("pydantic_ai_agent", Dialect.CHAT),
            program("pydantic_ai_agent", Dialect.CHAT, streamed=True),
            program("pydantic_ai_agent", Dialect.RESPONSES),
            program("pydantic_ai_agent", Dialect.MESSAGES, streamed=True),
        ),
    ),
    Harness(
        name="smolagents",
        requirements=("smolagents[openai]==1.26.0",),
        variants=(
            program("smolagents_agent", Dialect.CHAT),
            program("smolagents_agent", Dialect.CHAT, streamed=True),
            program("smolagents_agent", Dialect.CHAT, "code", label="code agent"),
        ),
    ),
    Harness(
        name="strands",
        requirements=("strands-agents[openai,anthropic]==1.62.0",),
        variants=(
            program("strands_agent", Dialect.CHAT, streamed=True),
            program("strands_agent", Dialect.MESSAGES, streamed=True),
        ),
    ),
    Harness(
        name="google-adk",
        requirements=("google-adk==2.13.0", "litellm==1.110.2"),
        env=LITELLM,
        variants=(
            program("adk_agent", Dialect.CHAT),
            program("adk_agent", Dialect.CHAT, streamed=True),
            program("adk_agent", Dialect.MESSAGES),
        ),
    ),
    Harness(
        name="qwen-agent",
        requirements=("qwen-agent==0.0.34", "numpy", "soundfile", "python-dateutil", "tqdm"),
        variants=(
            program("qwen_agent_agent", Dialect.CHAT, "raw", streamed=True, label="use_raw_api"),
            program("qwen_agent_agent", Dialect.CHAT, "text", streamed=True, label="calls as text"),
        ),
    ),
    Harness(
        name="openhands",
        requirements=("openhands-sdk==1.58.2", "openhands-tools==1.58.2"),
        python=(3, 12),
        env=LITELLM,
        variants=(program("openhands_agent", Dialect.CHAT), program("openhands_agent", Dialect.MESSAGES)),
    ),
)

MINI = ("$bin/mini", "--yolo", "--exit-immediately", "--task", "$prompt", "--output", "$work/trajectory.json")
CODEX = (
    "$bin/codex",
    "exec",
    "--skip-git-repo-check",
    "--dangerously-bypass-approvals-and-sandbox",
    "-c",
    "analytics.enabled=false",
)
CODEX_PROVIDER = """\
model = "scripted"
model_provider = "gateway"

[model_providers.gateway]
name = "gateway"
base_url = "$url/v1"
env_key = "CODEX_API_KEY"
wire_api = "responses"
"""
QWEN_SETTINGS = {".qwen/settings.json": '{"privacy": {"usageStatisticsEnabled": false}}'}
OPENCODE = ("$bin/opencode", "run", "--title", "sum", "--model")
OPENCODE_CHAT = """\
{"provider": {"gateway": {
  "npm": "@ai-sdk/openai-compatible",
  "options": {"baseURL": "$url/v1", "apiKey": "$key"},
  "models": {"scripted": {"name": "scripted"}}
}}}
"""

CLIS = (
    Harness(
        name="mini-swe-agent",
        requirements=("mini-swe-agent==2.4.6",),
        env={"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", **LITELLM},
        needs="`MSWEA_CONFIGURED=true`; `MSWEA_COST_TRACKING=ignore_errors` for a model without a price",
        variants=(
            Variant(dialect=Dialect.CHAT, streamed=False, command=(*MINI, "--model", "openai/gpt-4o")),
            Variant(
                dialect=Dialect.CHAT,
                label="text",
                streamed=False,
                command=(
                    *(*MINI, "--model", "openai/gpt-4o", "--model-class", "litellm_textbased"),
                    *("--config", "mini_textbased.yaml"),
                ),
            ),
            Variant(
                dialect=Dialect.RESPONSES,
                streamed=False,
                command=(*MINI, "--model", "openai/gpt-4o", "--model-class", "litellm_response"),
            ),
            Variant(
                dialect=Dialect.MESSAGES,
                streamed=False,
                command=(*MINI, "--model", "anthropic/claude-sonnet-4-5"),
            ),
        ),
    ),
    Harness(
        name="claude-code",
        installer=Installer.NPM,
        requirements=("@anthropic-ai/claude-code@2.1.197",),
        env={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        variants=(
            Variant(
                dialect=Dialect.MESSAGES,
                streamed=True,
                command=("$bin/claude", "-p", "$prompt", "--allowedTools", "Bash"),
            ),
        ),
    ),
    Harness(
        name="codex",
        installer=Installer.NPM,
        requirements=("@openai/codex@0.171.0",),
        env={"CODEX_API_KEY": "$key"},
        needs="`-c openai_base_url=…` or a provider in `config.toml` (it ignores `OPENAI_BASE_URL`); `CODEX_API_KEY`",
        variants=(
            Variant(
                dialect=Dialect.RESPONSES,
                label="default model, flag",
                streamed=True,
                command=(*CODEX, "-c", "openai_base_url=$url/v1", "$prompt"),
            ),
            Variant(
                dialect=Dialect.RESPONSES,
                label="own model, config.toml",
                streamed=True,
                command=(*CODEX, "$prompt"),
                files={".codex/config.toml": CODEX_PROVIDER},
            ),
        ),
    ),
    Harness(
        name="opencode",
        installer=Installer.NPM,
        requirements=("opencode-ai@1.18.33",),
        env={"OPENCODE_DISABLE_MODELS_FETCH": "1"},
        needs="`ANTHROPIC_BASE_URL` with `/v1`; chat completions by a provider in `opencode.json`",
        variants=(
            Variant(
                dialect=Dialect.CHAT,
                streamed=True,
                command=(*OPENCODE, "gateway/scripted", "$prompt"),
                files={"opencode.json": OPENCODE_CHAT},
            ),
            Variant(dialect=Dialect.RESPONSES, streamed=True, command=(*OPENCODE, "openai/gpt-4o", "$prompt")),
            Variant(
                dialect=Dialect.MESSAGES,
                streamed=True,
                command=(*OPENCODE, "anthropic/claude-sonnet-4-5", "$prompt"),
                env={"ANTHROPIC_BASE_URL": "$url/v1"},
            ),
        ),
    ),
    Harness(
        name="qwen-code",
        installer=Installer.NPM,
        requirements=("@qwen-code/qwen-code@0.15.10",),
        needs="`OPENAI_MODEL`; `--auth-type anthropic` and `ANTHROPIC_MODEL` for Messages",
        variants=(
            Variant(
                dialect=Dialect.CHAT,
                streamed=True,
                command=("$bin/qwen", "--yolo", "$prompt"),
                env={"OPENAI_MODEL": "gpt-4o"},
                files=QWEN_SETTINGS,
            ),
            Variant(
                dialect=Dialect.MESSAGES,
                streamed=True,
                command=("$bin/qwen", "--yolo", "--auth-type", "anthropic", "$prompt"),
                env={"ANTHROPIC_MODEL": "claude-sonnet-4-5"},
                files=QWEN_SETTINGS,
            ),
        ),
    ),
)

HARNESSES = (*SDKS, *FRAMEWORKS, *CLIS)
