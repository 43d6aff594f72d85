"""Curves of a report in a real headless Chromium: values under the pointer, zoom, colours, print."""

from __future__ import annotations

import base64
import time

import pytest

from cosmos_core.run.report.curves import Chart, Series, environment

from .browser import Browser, find

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(find() is None, reason="no Chromium on this machine (make browser installs one on Debian)"),
]

TEMPLATE = """{% extends "base.html.j2" %}{% from "plots.html.j2" import plots %}
{% block title %}curves{% endblock %}{% block main %}{{ plots(charts) }}
<script>document.title = 'owned'</script><img src=x onerror="document.title = 'owned'">{% endblock %}"""
EVERY = [(float(step), step / 100) for step in range(101)]
SELDOM = [(0.0, 0.1), (50.0, 0.5), (100.0, 0.9)]
CHARTS = [
    Chart(
        title="Learning",
        series=[Series(label="<b>reward</b>", points=EVERY), Series(label="held-out", points=SELDOM, marked=True)],
        changes=(30.5,),
    ),
    Chart(title="Norm", series=[Series(label="held-out", points=[(x, 10**y) for x, y in EVERY])], logarithmic=True),
    Chart(title="Warm-up", series=[Series(label="loss", points=EVERY)], x_label="step of the warm-up"),
]
PLOT = "document.querySelectorAll('.plot')[{}]"
SPAN = "(({{min, max}}) => max - min)(" + PLOT + ".chart.scales.x)"


@pytest.fixture
def browser(tmp_path):
    (tmp_path / "curves.html.j2").write_text(TEMPLATE)
    (tmp_path / "curves.html").write_text(environment(tmp_path).get_template("curves.html.j2").render(charts=CHARTS))
    with Browser(tmp_path / "browser") as found:
        found.look(width=1280, height=900)
        found.go(f"file://{tmp_path}/curves.html")
        found.until("[...document.querySelectorAll('.plot')].every((place) => place.chart)")
        yield found


def mouse(browser, kind, x, y, **more):
    browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)


def inks(browser):
    """The colours that are drawn beside the vertical axis, as `red,green,blue`."""
    return browser.evaluate(
        f"(() => {{ const c = {PLOT.format(0)}.querySelector('canvas'), d = c.getContext('2d').getImageData(0, 0, "
        "110, c.height).data, found = new Set(); for (let i = 0; i < d.length; i += 4) if (d[i + 3] === 255) "
        "found.add(d.slice(i, i + 3).join()); return [...found]; })()"
    )


DARK, LIGHT = "28,35,48", "231,234,240"


def test_curves_are_hovered_zoomed_and_printed(browser):
    # No line of the legend is markup, and no script runs but the page's own.
    assert browser.evaluate("document.title") == "curves · cosmos-core"
    assert browser.evaluate("document.querySelectorAll('.u-legend b').length") == 0
    rows = f"[...{PLOT.format(0)}.querySelectorAll('.u-series')]"
    legend = f"{rows}.map((row) => [...row.cells].map((cell) => cell.innerText).join(': ')).join(' ')"
    assert browser.evaluate(legend) == "step: 100 <b>reward</b>: 1 held-out: 0.9", "the last values, at first"

    # Under the pointer are the values of every line, of another step where that is said.
    left, top, width, height = browser.evaluate(
        f"(({{left, top, width, height}}) => [left, top, width, height])"
        f"({PLOT.format(0)}.querySelector('.u-over').getBoundingClientRect())"
    )
    mouse(browser, "mouseMoved", left + 0.3 * width, top + height / 2)
    browser.until(f"{legend} === 'step: 30 <b>reward</b>: 0.3 held-out: 0.5 @50'")
    assert browser.evaluate(f"{PLOT.format(1)}.chart.cursor.idx") == 30, "all charts of an axis follow"
    assert browser.evaluate(f"{PLOT.format(2)}.chart.cursor.idx") is None

    # A drag zooms all charts of an axis, and the button undoes it.
    mouse(browser, "mousePressed", left + 0.3 * width, top + 20, button="left", clickCount=1)
    for part in (0.4, 0.5, 0.6):
        mouse(browser, "mouseMoved", left + part * width, top + 20, button="left")
    mouse(browser, "mouseReleased", left + 0.6 * width, top + 20, button="left", clickCount=1)
    browser.until(f"Math.abs({SPAN.format(0)} - 30) < 2 && Math.abs({SPAN.format(1)} - 30) < 2")
    assert browser.evaluate(SPAN.format(2)) == 100
    browser.evaluate("document.querySelector('.card h3 button:not([hidden])').click()")
    browser.until(f"{SPAN.format(0)} === 100 && {SPAN.format(1)} === 100")

    # A click on a name hides the lines of that name everywhere.
    shown = "[...document.querySelectorAll('.plot')].map((place) => place.chart.series.at(-1).show).join()"
    browser.evaluate(f"{rows}[2].querySelector('th').click()")
    assert browser.evaluate(shown) == "false,false,true"
    browser.evaluate(f"{rows}[2].querySelector('th').click()")
    assert browser.evaluate(shown) == "true,true,true"

    # Ink is dark by day, light by night, dark on paper, and nothing is wider than a phone.
    assert DARK in inks(browser)
    browser.look(width=390, height=800, dark=True)
    browser.until(f"{PLOT.format(0)}.chart.width < 390")
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    time.sleep(0.2)
    assert LIGHT in inks(browser)
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert DARK in inks(browser)
    assert LIGHT not in inks(browser)
    assert base64.b64decode(browser.call("Page.printToPDF")["data"]).startswith(b"%PDF")
    assert all("script-src" in each or "img-src" in each for each in browser.complaints), browser.complaints
