"""Which words are secrets.

That is known best by a library that is kept for it: detect-secrets, by its pattern detectors (not its guesses by
entropy or by key words, which take out what is harmless). Beside them stand patterns for what it lacks and what flows
here most: keys of model providers and our own, and e-mail addresses.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Module and class; their kind; and what a text must hold for a look to be worth it, where a look takes long. Left out
# are those for Artifactory, Cloudant, Discord, IBM, Softlayer and public IP addresses: they take several times as long
# as all the others, or know no word to look for first.
_DETECTORS = (
    ("aws", "AWSKeyDetector", "aws_key", ""),
    ("azure_storage_key", "AzureStorageKeyDetector", "azure_key", ""),
    ("github_token", "GitHubTokenDetector", "github_token", ""),
    ("gitlab_token", "GitLabTokenDetector", "gitlab_token", "gl|GR"),
    ("mailchimp", "MailchimpDetector", "mailchimp_key", "-us"),
    ("npm", "NpmDetector", "npm_token", "_authToken"),
    ("openai", "OpenAIDetector", "provider_key", ""),
    ("pypi_token", "PypiTokenDetector", "pypi_token", ""),
    ("sendgrid", "SendGridDetector", "sendgrid_key", ""),
    ("slack", "SlackDetector", "slack_token", "xox|hooks.slack"),
    ("square_oauth", "SquareOAuthDetector", "square_secret", ""),
    ("stripe", "StripeDetector", "stripe_key", "k_live_"),
    ("telegram_token", "TelegramBotTokenDetector", "telegram_token", ":AA"),
    ("twilio", "TwilioKeyDetector", "twilio_key", ""),
)
_PEM = r"[A-Z ]*PRIVATE KEY(?: BLOCK)?"


def _word(start: str, rest: str) -> str:
    """`start` at the beginning of a word, then `rest`. The search is for plain text first, which is many times faster.

    A body may hold JSON in a string, where a line end is spelled \\n: that n is no part of the word after it.
    """
    return rf"{start}(?:(?<=\\[nrtbf]{start})|(?<![A-Za-z0-9]{start})){rest}"


_OWN = (
    ("provider_key", _word("sk-", r"(?=[\w-]*\d)[\w-]{20,}")),
    ("provider_key", _word("AIza", r"[\w-]{35}")),
    ("provider_key", _word("hf_", r"\w{30,}")),
    ("provider_key", _word("gsk_", r"\w{40,}")),
    ("provider_key", _word("xai-", r"\w{60,}")),
    ("github_token", _word("github_pat_", r"\w{50,}")),
    ("outrider_key", _word("or", r"[ak]-[\w-]{20,}")),
    ("bearer_token", r"earer (?P<secret>[\w.~+/=-]{20,})"),
    ("jwt", r"eyJ[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]*)?"),
    ("password_in_url", r"://(?P<secret>[^\s:/?#@\"'\\\x00]+:[^\s:/?#@\"'\\\x00]+)@"),
    ("private_key", rf"-----BEGIN {_PEM}-----[^-\x00]{{0,16384}}(?:-----END {_PEM}-----)?"),
)
# What stands before the @ is looked at once there is one.
_EMAIL = re.compile(r"@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}(?![A-Za-z0-9])")
_LOCAL_PART = re.compile(r"(?:(?<=\\[nrtbf])|(?<![\\A-Za-z0-9_.+-]))[A-Za-z0-9_.+-]{1,64}\Z")


class Patterns(NamedTuple):
    """Those that the same words lead to."""

    words: tuple[str, ...]
    """One of them must be there; none where a look is cheap."""
    kinds: list[tuple[str, re.Pattern[str]]]
    """Kind and expression. What to take out is the expression's group ``secret`` where it has one."""


def patterns(own: Sequence[str]) -> list[Patterns]:
    """All of them; `own` are the user's."""
    found: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    found[""] = [(kind, re.compile(pattern)) for kind, pattern in _OWN]
    found[""] += [("pattern", re.compile(pattern)) for pattern in own]
    for module, name, kind, words in _DETECTORS:
        detector = getattr(importlib.import_module(f"detect_secrets.plugins.{module}"), name)
        found.setdefault(words, []).extend((kind, pattern) for pattern in detector.denylist)
    return [Patterns(tuple(filter(None, words.split("|"))), kinds) for words, kinds in found.items()]


def email_addresses(text: str) -> Iterator[tuple[int, int]]:
    """Where they start and end."""
    for match in _EMAIL.finditer(text):
        name = _LOCAL_PART.search(text, max(0, match.start() - 66), match.start())
        if name is not None:
            yield name.start(), match.end()
