"""Outrider trains the model behind an agent through the harness the agent ships in."""

__version__ = "0.1.0"
