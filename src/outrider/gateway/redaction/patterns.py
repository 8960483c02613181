"""Which words are secrets.

That is known best by a library that is kept for it: detect-secrets, by its pattern detectors (not its guesses by
entropy or by key words, which take out what is harmless). Beside them stand patterns for what it lacks and what flows
here most: keys of model providers and our own, and e-mail addresses.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

Find = Callable[[str], Iterator[tuple[int, int]]]

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
# In a scan these are looked for by their words alone: what they begin with is everywhere in lists of token ids.
_BY_WORDS = frozenset({"telegram_token"})
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
_EMAIL = re.compile(r"[A-Za-z0-9_.+-]@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}(?![A-Za-z0-9])")
# What stands before the @ is looked at once there is one.
_DOMAIN = re.compile(r"@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}(?![A-Za-z0-9])")
_LOCAL_PART = re.compile(r"(?:(?<=\\[nrtbf])|(?<![\\A-Za-z0-9_.+-]))[A-Za-z0-9_.+-]{1,64}\Z")


class Pattern(NamedTuple):
    kind: str
    regex: re.Pattern[str]
    """It is found in every text that `find` finds something in."""
    find: Find
    """Where what has to be taken out starts and ends: the expression's group ``secret`` where it has one."""
    words: tuple[str, ...] = ()
    """One of them is in such a text too; none where a look is cheap."""
    by_words: bool = False
    """They are a better sign of it than the expression."""


def patterns(own: Sequence[str]) -> list[Pattern]:
    """All of them; `own` are the user's."""
    found = [_pattern(kind, re.compile(pattern)) for kind, pattern in _OWN]
    found += [_pattern("pattern", re.compile(pattern)) for pattern in own]
    for module, name, kind, words in _DETECTORS:
        detector = getattr(importlib.import_module(f"detect_secrets.plugins.{module}"), name)
        found += [_pattern(kind, regex, tuple(filter(None, words.split("|")))) for regex in detector.denylist]
    found.append(Pattern("email", _EMAIL, _email_addresses, ("@",)))
    return found


def _pattern(kind: str, regex: re.Pattern[str], words: tuple[str, ...] = ()) -> Pattern:
    group = "secret" if "secret" in regex.groupindex else 0

    def find(text: str) -> Iterator[tuple[int, int]]:
        return (match.span(group) for match in regex.finditer(text))

    return Pattern(kind, regex, find, words, kind in _BY_WORDS)


def _email_addresses(text: str) -> Iterator[tuple[int, int]]:
    for match in _DOMAIN.finditer(text):
        name = _LOCAL_PART.search(text, max(0, match.start() - 66), match.start())
        if name is not None:
            yield name.start(), match.end()
