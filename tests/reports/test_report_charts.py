from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.reports import charts
from outrider.reports.charts import Measured, Series

NUMBERS = st.floats(-1e9, 1e9) | st.none()


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_round_and_inside(low, span):
    found = charts.ticks(low, low + span)
    assert len(found) <= 6
    assert all(low - 1e-6 * span <= value <= low + span + 1e-6 * span for value in found)


@given(st.lists(NUMBERS, min_size=1, max_size=50))
def test_any_series_gives_sound_svg_within_its_frame(ys):
    svg = charts.plot([Series(name="a<b", xs=list(range(len(ys))), ys=ys)], label='"quoted"', width=300, height=120)
    if all(y is None for y in ys):
        assert "No figures yet" in svg
        return
    tree = ET.fromstring(svg)
    for element in tree.iter("circle"):
        assert -1 <= float(element.get("cx")) <= 301
        assert -1 <= float(element.get("cy")) <= 121
    assert len(list(tree.iter("circle"))) == sum(y is not None for y in ys)


def test_a_gap_breaks_the_line():
    svg = charts.plot([Series(name="a", xs=[1, 2, 3, 4, 5], ys=[1.0, 2.0, None, 3.0, 4.0])], label="a")
    assert svg.count("<polyline") == 2


def test_one_step_and_equal_values_are_drawn():
    svg = charts.plot([Series(name="a", xs=[1], ys=[0.0])], label="a")
    assert ET.fromstring(svg).find("circle") is not None
    assert "nan" not in svg


def test_error_bars_span_the_interval():
    one = Series(name="eval", xs=[0, 8], ys=[0.5, 0.8], low=[0.4, None], high=[0.6, None], points=True)
    svg = charts.plot([one], label="a", y_range=(0.0, 1.0))
    bars = [e for e in ET.fromstring(svg).iter("line") if e.get("class", "").startswith("bar")]
    assert len(bars) == 1
    middle = next(e for e in ET.fromstring(svg).iter("circle"))
    assert float(bars[0].get("y1")) > float(middle.get("cy")) > float(bars[0].get("y2"))


def test_stacked_bars_add_up_to_the_total():
    parts = [Series(name="a", xs=[1, 2], ys=[1.0, 2.0]), Series(name="b", xs=[1, 2], ys=[3.0, None], colour=2)]
    tree = ET.fromstring(charts.stacked([1, 2], parts, label="times"))
    heights = [float(rect.get("height")) for rect in tree.iter("rect")]
    assert len(heights) == 3  # a missing part is no bar
    assert heights[0] / heights[1] == pytest.approx(1 / 3, rel=0.02)
    assert "No figures yet" in charts.stacked([], [], label="times")


@pytest.mark.parametrize("count", [1, 2, 8, 9, 100, 12345])
def test_step_labels_are_whole_and_do_not_crowd(count):
    xs = list(range(1, count + 1))
    svg = charts.plot([Series(name="a", xs=xs, ys=[math.sin(x) for x in xs])], label="a", width=260, height=140)
    labels = re.findall(r'text-anchor="middle">([^<]+)<', svg)
    assert 1 <= len(labels) <= 5
    assert labels[0] == "1"


def test_track_puts_a_share_on_its_scale():
    tree = ET.fromstring(
        charts.track([Measured(name="before", value=0.5, low=0.25, high=0.75, colour=1)], label="success")
    )
    line = next(e for e in tree.iter("line") if "range" in e.get("class", ""))
    circle = tree.find("circle")
    assert float(circle.get("cx")) == pytest.approx((float(line.get("x1")) + float(line.get("x2"))) / 2, abs=0.2)
