// Small charts in SVG. Text is set as text, never as markup.

const SPACE = "http://www.w3.org/2000/svg";
const WIDTH = 420;
const HEIGHT = 150;
const LEFT = 54;
const BOTTOM = 18;
const TOP = 8;

export function short(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

export function element(name, attributes, text) {
  const found = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  if (text !== undefined) found.textContent = text;
  return found;
}

function drawing(label, height = HEIGHT) {
  return element("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label });
}

export function lineChart(name, points) {
  const xs = points.map((point) => point[0]);
  const ys = points.map((point) => point[1]);
  const [firstX, lastX, low, high] = [xs[0], xs[xs.length - 1], Math.min(...ys), Math.max(...ys)];
  const x = (value) => LEFT + ((value - firstX) / (lastX - firstX || 1)) * (WIDTH - LEFT - 6);
  const y = (value) => TOP + (1 - (value - low) / (high - low || 1)) * (HEIGHT - TOP - BOTTOM);
  const svg = drawing(`${name}, steps ${short(firstX)} to ${short(lastX)}: from ${short(low)} to ${short(high)}, now ${short(ys[ys.length - 1])}`);
  for (const value of low === high ? [low] : [low, (low + high) / 2, high]) {
    svg.append(element("line", { x1: LEFT, x2: WIDTH - 6, y1: y(value), y2: y(value), class: "grid" }));
    svg.append(element("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  svg.append(element("text", { x: LEFT, y: HEIGHT - 4 }, short(Math.round(firstX))));
  svg.append(element("text", { x: WIDTH - 6, y: HEIGHT - 4, "text-anchor": "end" }, `step ${short(Math.round(lastX))}`));
  svg.append(element("polyline", { class: "curve", points: points.map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join(" ") }));
  if (points.length < 12) for (const point of points) svg.append(element("circle", { class: "dot", cx: x(point[0]), cy: y(point[1]), r: 2.5 }));
  return svg;
}

export function bars(name, rows) {
  const height = Math.max(1, rows.length) * 24;
  const most = Math.max(1, ...rows.map((row) => row[1]));
  const svg = drawing(`${name}: ${rows.map((row) => `${row[0]} ${row[1]}`).join(", ") || "none"}`, height);
  rows.forEach(([label, value], index) => {
    const top = index * 24 + 4;
    svg.append(element("text", { x: 0, y: top + 12 }, label));
    svg.append(element("rect", { class: "track", x: 130, y: top, width: 220, height: 16, rx: 3 }));
    svg.append(element("rect", { class: "bar", x: 130, y: top, width: ((220 * value) / most).toFixed(1), height: 16, rx: 3 }));
    svg.append(element("text", { x: 358, y: top + 12 }, short(value)));
  });
  return svg;
}
