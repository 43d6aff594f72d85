// Draws each .plot of the page from its data, by uPlot: values under the pointer, zoom by dragging, both in all charts of one axis.

// Printed at this resolution, too: a canvas has that of the screen.
window.devicePixelRatio = Math.max(2, window.devicePixelRatio);

(() => {
  const COLOURS = ["#4c8dff", "#f28e2b", "#3fa95c", "#d64f6c", "#9a6ee0", "#17a2b0", "#b8860b", "#8a94a6"];
  const DASHES = [[], [6, 3], [2, 3]];
  const PAPER = { "--ink": "#1c2330", "--line": "#e2e5eb" };
  const HEIGHT = 210;
  const PRINTED = [640, 200];
  const charts = [];
  let isPrinted = false;

  const colour = (name) => (isPrinted ? PAPER[name] : getComputedStyle(document.documentElement).getPropertyValue(name).trim());

  function short(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
    return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  }

  // The index of a line's point that is nearest to where the pointer is; others may have points there, and it none.
  function nearest(u, line, index) {
    const [xs, ys] = [u.data[0], u.data[line]];
    if (ys[index] != null) return index;
    let [low, high] = [index, index];
    while (low >= 0 && ys[low] == null) low -= 1;
    while (high < ys.length && ys[high] == null) high += 1;
    if (low < 0 || high >= ys.length) return low < 0 ? (high < ys.length ? high : index) : low;
    return xs[index] - xs[low] <= xs[high] - xs[index] ? low : high;
  }

  // A line's value under the pointer or, without one, its last; with its step where that is another than the axis tells.
  function told(u, _, line, index) {
    const [xs, ys] = [u.data[0], u.data[line]];
    const at = index === null ? xs.length - 1 : (u.cursor.idx ?? index);
    const own = index === null ? ys.findLastIndex((each) => each != null) : index;
    return own === at || ys[own] == null ? short(ys[own]) : `${short(ys[own])} @${short(xs[own])}`;
  }

  function marks(changes) {
    return (u) => {
      u.ctx.save();
      u.ctx.strokeStyle = COLOURS[1];
      u.ctx.setLineDash([6, 6]);
      for (const change of changes) {
        const x = u.valToPos(change, "x", true);
        if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
        u.ctx.beginPath();
        u.ctx.moveTo(x, u.bbox.top);
        u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
        u.ctx.stroke();
      }
      u.ctx.restore();
    };
  }

  // uPlot knows the mouse alone: a finger moves it, along; up and down it scrolls the page.
  function takesFingers(u) {
    const pairs = { pointerdown: "mousedown", pointermove: "mousemove", pointerup: "mouseup", pointercancel: "mouseup" };
    for (const [from, to] of Object.entries(pairs)) {
      u.over.addEventListener(from, (event) => {
        if (event.pointerType !== "touch") return;
        const where = { clientX: event.clientX, clientY: event.clientY, movementX: 1, bubbles: true };
        if (from === "pointerdown") u.over.dispatchEvent(new MouseEvent("mousemove", where));
        u.over.dispatchEvent(new MouseEvent(to, where));
      });
    }
  }

  // What is hidden in one chart is hidden in all that have a line of that name.
  function hides(u, line, { show }) {
    if (show === undefined || line === null) return;
    for (const other of charts) {
      const same = other.series.findIndex((each) => each.label === u.series[line].label);
      if (same > 0 && other.series[same].show !== show) other.setSeries(same, { show });
    }
  }

  function zoomed(u, button) {
    const xs = u.data[0];
    button.hidden = u.scales.x.min <= xs[0] && u.scales.x.max >= xs[xs.length - 1];
  }

  function draw(place, width) {
    const chart = JSON.parse(place.dataset.chart);
    const axis = () => ({ stroke: () => colour("--ink"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" });
    const button = Object.assign(document.createElement("button"), { textContent: "whole", hidden: true, title: "Undo the zoom" });
    const options = {
      width,
      height: HEIGHT,
      padding: [10, 14, 0, 0],
      scales: { x: { time: false }, y: chart.logarithmic ? { distr: 3 } : {} },
      axes: [{ ...axis(), size: 30 }, { ...axis(), size: 62, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))) }],
      cursor: { sync: { key: chart.x, scales: ["x", null] }, drag: { x: true, y: false, dist: 8 }, dataIdx: nearest, y: false, points: { size: 7 } },
      series: [
        { label: chart.x, value: (u, value, _, index) => short(index === null ? u.data[0].at(-1) : value) },
        ...chart.series.map((line) => ({
          label: line.label,
          stroke: COLOURS[line.colour % COLOURS.length],
          dash: DASHES[Math.floor(line.colour / COLOURS.length) % DASHES.length],
          width: line.marked ? 1.8 : 1.3,
          // Where only other lines have points there is no gap; where it is null there is.
          spanGaps: false,
          points: { show: line.marked || line.xs.length < 3, size: 7 },
          value: told,
        })),
      ],
      hooks: { draw: [marks(chart.changes)], setScale: [(u, key) => key === "x" && zoomed(u, button)], setSeries: [hides], ready: [takesFingers] },
    };
    const u = new uPlot(options, uPlot.join(chart.series.map((line) => [line.xs, line.ys])), place);
    button.addEventListener("click", () => u.over.dispatchEvent(new MouseEvent("dblclick", { bubbles: true })));
    place.closest(".card").querySelector("h3").append(button);
    charts.push(u);
    return u;
  }

  const widths = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      const width = Math.floor(contentRect.width);
      // What is folded away has no width, and is drawn once it is shown.
      if (width === 0 || isPrinted) continue;
      if (target.chart === undefined) target.chart = draw(target, width);
      else if (target.chart.width !== width) target.chart.setSize({ width, height: HEIGHT });
    }
  });

  function print(isOn) {
    isPrinted = isOn;
    for (const u of charts) {
      const [width, height] = isOn ? PRINTED : [u.root.parentElement.clientWidth, HEIGHT];
      if (width > 0) u.setSize({ width, height });
      u.redraw(false, true);
    }
  }

  document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(".plot").forEach((place) => widths.observe(place)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((u) => u.redraw(false, true)));
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
})();
