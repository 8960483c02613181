"""A password is taken out of a URL, and the rest stays."""

from __future__ import annotations

import pytest

from outrider.keys import split_password


@pytest.mark.parametrize(
    ("url", "without", "password"),
    [
        ("postgresql://u:se%40cret@db:5432/x?sslmode=require", "postgresql://u@db:5432/x?sslmode=require", "se@cret"),
        ("postgresql://u:p@a:1,b:2/x", "postgresql://u@a:1,b:2/x", "p"),
        ("postgresql:///x?host=/run&password=p%26&user=u", "postgresql:///x?host=/run&user=u", "p&"),
        ("postgresql://u@db?password=p", "postgresql://u@db", "p"),
        ("postgresql://u:first@db/x?password=second", "postgresql://u@db/x", "second"),
        ("postgresql://u@db/x", "postgresql://u@db/x", ""),
        ("postgresql://u:@db/x", "postgresql://u:@db/x", ""),
        ("sqlite:////srv/a:b@c/store.sqlite3", "sqlite:////srv/a:b@c/store.sqlite3", ""),
        ("", "", ""),
    ],
)
def test_the_password_of_a_url_stands_apart(url, without, password):
    assert split_password(url) == (without, password)
