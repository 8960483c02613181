"""Task files: what is read, and what is told about a line that cannot be."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.data.tasks import load_tasks
from outrider.errors import ConfigError


def load(tmp_path, text):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_tasks(path, field="tasks.train")


def test_order_fields_and_ids(tmp_path):
    tasks = load(tmp_path, '{"id": "b", "q": "wörld"}\n\n{"id": 7, "deep": {"x": [1, null]}}\r\n')
    assert [task.id for task in tasks] == ["b", "7"]
    assert tasks[0].fields == {"id": "b", "q": "wörld"}
    assert tasks[1].fields["deep"] == {"x": [1, None]}


def test_a_last_line_without_newline_and_a_byte_order_mark(tmp_path):
    assert [task.id for task in load(tmp_path, '\ufeff{"id": 1}\n{"id": 2}')] == ["1", "2"]


def test_only_newlines_end_a_line(tmp_path):
    """U+2028 and form feeds may stand raw inside a JSON string."""
    (task,) = load(tmp_path, '{"id": 1, "q": "a\u2028b\u0085c"}\n')
    assert task.fields["q"] == "a\u2028b\u0085c"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"id": 1}\n{"id": 2\n', "line 2: not valid JSON"),
        ('{"id": 1}\n\n[1]\n', "line 3: each line must be a JSON object, this is a list"),
        ('{"id": 1}\n"x"\n', "line 2: each line must be a JSON object, this is a str"),
        ('{"q": 1}\n', "line 1: needs an `id`"),
        ('{"id": null}\n', "line 1: needs an `id`"),
        ('{"id": true}\n', "line 1: needs an `id`"),
        ('{"id": 1.5}\n', "line 1: needs an `id`"),
        ('{"id": ""}\n', "line 1: needs an `id`"),
        ('{"id": "a"}\n{"id": "b"}\n{"id": "a"}\n', "line 3: id 'a' was used before, in line 1"),
        ('{"id": 1}\n{"id": "1"}\n', "line 2: id '1' was used before, in line 1"),
        ("", "holds no task"),
        ("\n \n", "holds no task"),
        (b'{"id": 1}\n{"id": "\xff"}\n', "not UTF-8"),
        ("[" * 100_000, "line 1: not valid JSON"),
    ],
)
def test_what_is_wrong_is_told_with_file_and_line(tmp_path, text, said):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    message = str(error.value)
    assert message.startswith("tasks.train: ")
    assert "tasks.jsonl" in message
    assert said in message


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"^tasks\.eval: there is no file .*nothing\.jsonl"):
        load_tasks(tmp_path / "nothing.jsonl", field="tasks.eval")
    with pytest.raises(ConfigError, match=r"^tasks\.eval: .* cannot be read"):
        load_tasks(tmp_path, field="tasks.eval")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.text(), json_values, max_size=4), min_size=1, max_size=5), st.booleans())
def test_whatever_was_written_is_read(tmp_path, rows, ascii_only):
    rows = [row | {"id": i} for i, row in enumerate(rows)]
    text = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows)
    assert [task.fields for task in load(tmp_path, text.encode("utf-8"))] == rows
