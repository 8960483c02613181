"""A body that is only scanned is redacted as if it had been taken apart: nothing is missed."""

from __future__ import annotations

import itertools
import json
import string
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.calls import text_call
from fakes.engine import chunk, sse
from outrider.gateway.redaction import automaton, superset
from outrider.gateway.redaction.patterns import patterns
from outrider.gateway.redaction.redact import Redactor
from outrider.gateway.redaction.scan import Scan

ODD = [
    "proj-[0-9]{4}",
    r"(?i)geheim[ks]\s*[:=]\s*\S+",
    r"\bkunde[ /]\d{6}\b",
    r"(['\"])token\1=\w+",
    r"stra(ss|ß)e\d+(?(1)x|y)",
    r"(?x) k o n t o \ \d{3,5} # and so on",
    r"[^\w\s]{3}x<y&z>'q'\\",
    r"(?s)begin.{2,5}end",
    r"(?a:\w{3})-(?i:kelvins)",
    r"(?<=nr )\d{6,8}(?!\d)",
    r"(?>a|ab)c++/\t[\b\f]",
    "\N{SNOWMAN}[à-ü]{2}é",
]
OWN = ["hunter2/hunter2", "geheimes passwort", 'sagt "nichts"']
PATTERNS = patterns(ODD)
FAST, SLOW = Redactor(ODD), Redactor(ODD, fast=False)


def agree(call, credentials=()):
    """What both find, without counting names that come twice: a scan looks at both values, and has to drop none."""
    fast, fast_hits = FAST.call(call, credentials)
    slow, slow_hits = SLOW.call(call, credentials)
    if slow_hits.keys() <= {"repeated_name"}:
        assert not fast_hits or fast_hits == slow_hits
        return 0
    assert fast_hits == slow_hits
    assert (fast.request, fast.response, fast.error) == (slow.request, slow.response, slow.error)
    return slow_hits.total()


# -- JSON, written in every way that there is --------------------------------------------------------------------------

SHORT = {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\", "/": "\\/"}
HTML = "<>&'"


def spelled(text, random, escaping):
    """The characters between the quotes; `escaping` is how many characters in a hundred are escaped for no reason."""
    parts = []
    for character in text:
        needs = character in '"\\' or character < " " or "\ud800" <= character <= "\udfff"
        if not needs and not (character in HTML and escaping) and random.randrange(100) >= escaping:
            parts.append(character)
        elif character in SHORT and random.randrange(4):
            parts.append(SHORT[character])
        else:
            units = character.encode("utf-16-be", "surrogatepass")
            form = random.choice(["\\u{:04x}", "\\u{:04X}"])
            parts += [form.format(int.from_bytes(units[at : at + 2])) for at in range(0, len(units), 2)]
    return "".join(parts)


def written(tree, random, escaping=0, spaces=0):
    """JSON of a tree in which objects are lists of pairs, so that a name may come twice."""

    def gap():
        return random.choice(["", " ", "\n\t"]) if random.randrange(100) < spaces else ""

    def write(one):
        if isinstance(one, str):
            return f'"{spelled(one, random, escaping)}"'
        if isinstance(one, tuple):
            members = (f"{gap()}{write(name)}{gap()}:{gap()}{write(value)}{gap()}" for name, value in one)
            return "{" + ",".join(members) + "}"
        if isinstance(one, list):
            return "[" + ",".join(f"{gap()}{write(item)}{gap()}" for item in one) + "]"
        return json.dumps(one)

    return write(tree).encode("utf-8", "surrogatepass")


found = st.one_of([st.from_regex(pattern.regex) for pattern in PATTERNS])
harmless = st.text(
    st.sampled_from(string.ascii_letters + string.digits + " \n\t\"'\\/@:.-_=+<&é☃\U0001f511"), max_size=20
)
texts = st.one_of(harmless, found, st.sampled_from(OWN), st.builds("{}{}{}".format, harmless, found, harmless))
names = st.sampled_from(["content", "text", "arguments", "type", "x", "index"]) | texts
indexes = st.tuples(st.just("index"), st.sampled_from([0, 0, 0, 1, "a"]))


def objects(values):
    pairs = st.lists(st.tuples(names, values), max_size=3)
    plain = pairs.map(tuple)
    placed = st.builds(lambda index, rest: (index, *rest), indexes, pairs)
    pieces = st.builds(
        lambda text, cut, name, index: [(index, (name, text[:cut])), (index, (name, text[cut:]))],
        texts, st.integers(0, 20), st.sampled_from(["content", "text"]), indexes,
    )  # fmt: skip
    return plain | placed | st.lists(values | placed, max_size=3) | pieces


trees = st.recursive(texts | st.sampled_from([None, True, 0, -1.5, 123456789]), objects, max_leaves=8)


@settings(max_examples=60)
@given(
    st.builds(lambda one, other: (("messages", one), ("x", other)), trees, trees),
    st.randoms(use_true_random=False),
    st.sampled_from([0, 0, 1, 50, 100]),
    st.sampled_from([0, 50]),
    st.sampled_from([b"", b"", b"}", b"\xff", b"\xed\xa0\x80"]),
    st.sampled_from([(), tuple(OWN)]),
)
def test_a_body_of_json_is_redacted_alike(tree, random, escaping, spaces, tail, credentials):
    body = written(tree, random, escaping, spaces) + tail
    agree(text_call(body, body), credentials)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: f"{pattern.kind}-{pattern.regex.pattern[:12]}")
def test_what_a_pattern_finds_the_scan_finds(pattern):
    scan = Scan([pattern])

    @settings(max_examples=20)
    @given(harmless, st.from_regex(pattern.regex), harmless, st.randoms(use_true_random=False))
    def every_text(before, match, after, random):
        text = before + match + after
        if not next(pattern.find(text), None) or not (not pattern.words or any(word in text for word in pattern.words)):
            return
        assert scan.patterns(text) == [pattern]
        bodies = [written([text], random, escaping) for escaping in (0, 10, 100)]
        bodies.append(text.encode("utf-8", "surrogatepass"))
        if max(text) <= "\xff":
            bodies.append(text.encode("latin-1"))
        assert not any(scan.clean(body, ()) for body in bodies)

    every_text()


@settings(max_examples=30)
@given(st.lists(st.tuples(texts, st.lists(st.integers(0, 40), max_size=4)), min_size=1, max_size=3))
def test_a_stream_is_redacted_alike(parts):
    deltas = []
    for index, (text, cuts) in enumerate(parts):
        edges = [0, *sorted(cuts), len(text)]
        for start, end in itertools.pairwise(edges):
            deltas.append(chunk({"tool_calls": [{"index": index, "function": {"arguments": text[start:end]}}]}))
            deltas.append(chunk({"content": text[start:end]}))
    agree(text_call(b"{}", b"".join(sse(*deltas))))


# -- what has to be scanned for, and what need not be ------------------------------------------------------------------

EMAIL = "ada@mail.example.org"
HALF, REST = "write to ada@ma", "il.example.org now"


@pytest.mark.parametrize(
    "body",
    [
        '{"a": "\\u0061da@mail.example.org"}',
        '{"a": "ada\\u0040mail.example.org"}',
        '{"a": "https:\\/\\/me:s3cret@host"}',
        '{"a": "kunde\\/123456"}',
        '{"a": "x", "a": "ada@mail.example.org", "a": "y"}',
        '{"ada@mail.example.org": 1}',
        f'[{{"index": 0, "content": "{HALF}"}}, {{"index": 0, "content": "{REST}"}}]',
        f'[{{"content": "{HALF}"}}, {{"content": "{REST}", "index": 0}}]',
        f'[{{"\\u0069ndex": 1, "content": "{HALF}"}}, {{"content": "{REST}"}}]',
        "ada@mail.example.org {",
    ],
)
def test_a_spelling_that_hides_is_seen_through(body):
    redacted, hits = FAST.call(text_call(b"{}", body.encode()))
    assert hits
    assert b"il.example" not in redacted.response.replace(b"[redacted", b"")
    assert b"s3cret" not in redacted.response
    assert b"123456" not in redacted.response
    agree(text_call(body.encode(), body.encode()))


@pytest.mark.parametrize("credential", OWN)
@pytest.mark.parametrize("escaping", [0, 100])
@given(random=st.randoms(use_true_random=False))
def test_a_credential_is_found_however_it_is_spelled(credential, escaping, random):
    assert agree(text_call(written([f"I am {credential}"], random, escaping)), [credential]) == 1


REPLY = {
    "choices": [
        {"index": 0, "message": {"content": 'Use <b>f(x)</b> & "quote"\n— it\'s 5€.'}, "finish_reason": "stop"}
    ],
    "prompt_token_ids": [151000] * 100,
}


@pytest.mark.parametrize("ascii", [True, False])
def test_a_clean_body_is_not_taken_apart(ascii, monkeypatch):
    for name in ("_decode", "slim"):
        monkeypatch.setattr(f"outrider.gateway.redaction.redact.{name}", lambda body: pytest.fail("it was"))
    redactor = Redactor(["proj-[0-9]{4}"])
    text = "task-force, disk-usage, @types/node, http://host:80/path?x=1, data:image/png;base64,iVBORw0KGgoAAAANSUhEUg"
    request = json.dumps({"messages": [{"role": "user", "content": text}] * 2}, ensure_ascii=ascii).encode()
    call = text_call(request, json.dumps(REPLY, ensure_ascii=ascii).encode())
    redacted, hits = redactor.call(call, ["sk-abcdef/ghijkl"])
    assert redacted is call
    assert not hits


def test_a_pattern_that_cannot_be_scanned_for_is_looked_for_in_every_body():
    redactor = Redactor([r"(?:x?){3}(?<=xyz)\Z|zzz-\d", r"(?=[a-z]*)(?<![b])", "proj-[0-9]{4}"])
    redacted, hits = redactor.call(text_call(b'{"a": "zzz-1 and proj-1234 and ada@mail.example.org"}'))
    assert hits == {"pattern": 2, "email": 1}
    assert redacted.request == b'{"a":"[redacted:pattern] and [redacted:pattern] and [redacted:email]"}'


@pytest.mark.parametrize("error", [ImportError, ValueError])
def test_without_hyperscan_all_is_found(monkeypatch, error):
    def missing(self, expressions, counted):
        raise error

    monkeypatch.setattr(automaton.Automaton, "__init__", missing)
    redacted, hits = Redactor().call(text_call(b'{"a": "ada@mail.example.org"}'))
    assert hits == {"email": 1}
    assert redacted.request == b'{"a":"[redacted:email]"}'


def test_under_a_python_with_another_parser_all_is_found(monkeypatch):
    monkeypatch.setattr(superset._parser, "parse", None)
    _finds_all_but_scans_nothing()
    monkeypatch.setitem(sys.modules, superset.__name__, None)  # its import fails
    _finds_all_but_scans_nothing()


def _finds_all_but_scans_nothing():
    scan = Scan(patterns(()))
    assert not scan.clean(b"{}", ())
    hidden, hits = Redactor().call(text_call(b'{"a": "ada@mail.example.org"}'))
    assert (hits, hidden.request) == ({"email": 1}, b'{"a":"[redacted:email]"}')


def test_a_gateway_starts_under_a_python_without_that_parser():
    code = """
import re, sys
import outrider.gateway.app
assert "outrider.gateway.redaction.superset" not in sys.modules
del re._parser
sys.modules["re._parser"] = None
from outrider.gateway.redaction.redact import Redactor
hits = __import__("collections").Counter()
print(Redactor().text("write to someone@example.com", [], hits), hits.total())
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert told.stdout == "write to [redacted:email] 1\n", told.stderr


def test_a_body_with_more_finds_than_are_counted_is_taken_apart():
    items = [{"index": 0, "content": HALF}, *[{"index": 1}] * 400, {"index": 0, "content": REST}]
    assert agree(text_call(json.dumps(items).encode())) == 1
