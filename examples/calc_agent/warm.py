"""For `harness.preload`: what the agent's first client imports, imported once for all attempts."""

from openai import OpenAI


def client() -> None:
    """Make a client and throw it away; the SDK imports most of itself only now."""
    with OpenAI(api_key="none", base_url="http://127.0.0.1:9/v1") as unused:
        _ = unused.chat.completions
