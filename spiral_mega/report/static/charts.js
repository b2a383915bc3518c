// Line charts and stacked bars in SVG. A chart can be focused; the arrow keys then move its cursor.

const SIZE = { width: 420, height: 230, left: 50, right: 12, top: 8, bottom: 34 };
const DASHES = ["", "6 3", "2 3", "9 3 2 3"];

// series: [{name, color, dash, points: [[x, y, low, high], ...]}]; low and high, the interval of y, are optional.
function lineChart({ title, unit, xLabel, series, logX = false, logY = false, percent = false }) {
  const lines = visibleLines(series, logX, logY);
  const format = percent ? formatPercent : formatNumber;
  const svg = svgEl("svg", { viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, tabindex: 0, role: "img" });
  const figure = chartFigure(title, unit, lines.length > 1 ? lines.map((line) => [lineSample(line), line.name]) : []);
  figure.append(svg);
  if (!lines.length) {
    const center = { x: SIZE.width / 2, y: SIZE.height / 2, "text-anchor": "middle" };
    svg.append(svgEl("text", center, "none of the selected runs has this"));
    return figure;
  }
  const xs = [...new Set(lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
  const x = scale(xs[0], xs[xs.length - 1], SIZE.left, SIZE.width - SIZE.right, logX);
  const [low, high] = yBounds(lines, percent && !logY);
  const y = scale(low, high, SIZE.height - SIZE.bottom, SIZE.top, logY);
  drawAxes(svg, x, y, xs, { xLabel, percent, logX });
  for (const line of lines) svg.append(...intervalBand(line, x, y), linePath(line, x, y), ...dots(line, x, y));
  const ends = lines.map((line) => `${line.name} ends at ${format(line.points.at(-1)[1])}`);
  svg.setAttribute("aria-label", `${title}: ${ends.join("; ")}`);
  addCursor(figure, svg, { lines, xs, x, format, xLabel });
  return figure;
}

// Lines without the points that have no value, or that a logarithmic axis cannot show.
function visibleLines(series, logX, logY) {
  const isVisible = ([x, y]) => y !== null && (!logY || y > 0) && (!logX || x > 0);
  return series
    .map((line) => ({ ...line, points: line.points.filter(isVisible) }))
    .filter((line) => line.points.length);
}

function chartFigure(title, unit, legend) {
  return el(
    "figure",
    { class: "chart" },
    el("h3", {}, title, " ", el("span", { class: "unit" }, unit ? `(${unit})` : "")),
    el(
      "div",
      { class: "keys" },
      legend.map(([sample, name]) => el("span", {}, sample, " ", name)),
    ),
  );
}

function lineSample(line) {
  return svgEl(
    "svg",
    { width: 22, height: 8, "aria-hidden": true, style: "width:22px;display:inline-block;vertical-align:middle" },
    svgEl("line", {
      x1: 0,
      x2: 22,
      y1: 4,
      y2: 4,
      stroke: line.color,
      "stroke-width": 2,
      "stroke-dasharray": line.dash || "",
    }),
  );
}

function yBounds(lines, fromZero) {
  const ys = lines.flatMap((line) => line.points.flatMap(([, y, low, high]) => [y, low ?? y, high ?? y]));
  return [fromZero ? Math.min(0, ...ys) : Math.min(...ys), Math.max(...ys)];
}

// A function from values to pixels, with its bounds as properties.
function scale(low, high, from, to, log) {
  if (low === 0 && high === 0) high = 1;
  if (low === high)
    [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const transform = log ? Math.log : (value) => value;
  const [start, end] = [transform(low), transform(high)];
  const toPixel = (value) => from + ((transform(value) - start) / (end - start)) * (to - from);
  return Object.assign(toPixel, { low, high, log });
}

function ticks({ low, high, log }, count) {
  return log ? logTicks(low, high) : linearTicks(low, high, count);
}

function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const factors = decades > 2 ? [1] : decades > 0.8 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8];
  const values = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += Math.ceil(decades / 8) || 1)
    for (const factor of factors) values.push(factor * 10 ** power);
  return values.filter((value) => value >= low * 0.999 && value <= high * 1.001);
}

function linearTicks(low, high, count) {
  const rough = (high - low) / count;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * unit).find((value) => value >= rough);
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step)
    values.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return values;
}

function drawAxes(svg, x, y, xs, { xLabel, percent, logX }) {
  for (const value of ticks(y, 5)) {
    const height = y(value);
    const label = percent ? `${formatNumber(100 * value)}%` : formatNumber(value);
    svg.append(
      svgEl("line", { class: "gridline", x1: SIZE.left, x2: SIZE.width - SIZE.right, y1: height, y2: height }),
      svgEl("text", { x: SIZE.left - 6, y: height + 3.5, "text-anchor": "end" }, label),
    );
  }
  const marks = logX && xs.length <= 9 ? xs : ticks(x, 6).filter((value) => x.high > 12 || Number.isInteger(value));
  const markHeight = SIZE.height - SIZE.bottom + 15;
  for (const value of marks)
    svg.append(svgEl("text", { x: x(value), y: markHeight, "text-anchor": "middle" }, formatNumber(value)));
  svg.append(svgEl("text", { x: (SIZE.left + SIZE.width) / 2, y: SIZE.height - 4, "text-anchor": "middle" }, xLabel));
}

function hasInterval(point) {
  return point.length > 2 && point[2] !== null;
}

function intervalBand(line, x, y) {
  const points = line.points.filter(hasInterval);
  if (points.length < 2) return [];
  const corner = (px, value) => `${x(px).toFixed(1)},${y(Math.max(value, y.log ? y.low : -Infinity)).toFixed(1)}`;
  const upper = points.map(([px, , , high]) => corner(px, high));
  const lower = points.map(([px, , low]) => corner(px, low)).reverse();
  return [svgEl("polygon", { points: [...upper, ...lower].join(" "), fill: line.color, opacity: 0.13 })];
}

function linePath(line, x, y) {
  const d = line.points.map(([px, py], i) => `${i ? "L" : "M"}${x(px).toFixed(1)} ${y(py).toFixed(1)}`).join("");
  return svgEl("path", {
    d,
    fill: "none",
    stroke: line.color,
    "stroke-width": 1.8,
    "stroke-dasharray": line.dash || "",
    "stroke-linejoin": "round",
  });
}

function dots(line, x, y) {
  if (line.points.length > 40) return [];
  return line.points.map(([px, py]) => svgEl("circle", { cx: x(px), cy: y(py), r: 2.4, fill: line.color }));
}

// A vertical line at one x, and a tooltip with every line's value there.
function addCursor(figure, svg, { lines, xs, x, format, xLabel }) {
  const cursor = svgEl("line", { class: "cursor", y1: SIZE.top, y2: SIZE.height - SIZE.bottom, visibility: "hidden" });
  const tooltip = el("div", { class: "tip", hidden: true, role: "status" });
  svg.append(cursor);
  figure.append(tooltip);
  let current = null; // index in xs
  const show = (index) => {
    current = Math.max(0, Math.min(xs.length - 1, index));
    const px = x(xs[current]);
    for (const name of ["x1", "x2"]) cursor.setAttribute(name, px);
    cursor.setAttribute("visibility", "visible");
    const values = lines.flatMap((line) => tooltipRow(line, xs[current], format));
    tooltip.replaceChildren(el("b", {}, `${xLabel} ${formatNumber(xs[current])}`), ...values);
    tooltip.hidden = false;
    placeTooltip(tooltip, px / SIZE.width);
  };
  const hide = () => {
    tooltip.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const px = ((event.clientX - box.left) / box.width) * SIZE.width;
    const distance = (i) => Math.abs(x(xs[i]) - px);
    show(xs.reduce((nearest, _, i) => (distance(i) < distance(nearest) ? i : nearest), 0));
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const moves = {
      ArrowLeft: () => (current ?? xs.length) - 1,
      ArrowRight: () => (current ?? -1) + 1,
      Home: () => 0,
      End: () => xs.length - 1,
    };
    if (event.key === "Escape") hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    show(moves[event.key]());
  });
}

function tooltipRow(line, x, format) {
  const point = line.points.find(([value]) => value === x);
  if (!point) return [];
  const range = hasInterval(point) ? ` [${format(point[2])}, ${format(point[3])}]` : "";
  const swatch = el("span", { class: "swatch", style: `background:${line.color}` });
  return [el("div", {}, swatch, ` ${line.name}: ${format(point[1])}${range}`)];
}

// On the side of the cursor that has more room; `share` is the cursor's position in the chart's width.
function placeTooltip(tooltip, share) {
  tooltip.style.top = "40px";
  tooltip.style.left = share < 0.5 ? `${100 * share + 4}%` : "auto";
  tooltip.style.right = share < 0.5 ? "auto" : `${100 * (1 - share) + 4}%`;
}

// rows: [{name, parts: [{name, value}]}]; parts of one name have one color.
function stackedBars({ title, unit, rows }) {
  const names = [...new Set(rows.flatMap((row) => row.parts.map((part) => part.name)))];
  const partColor = (name) => `var(--s${names.indexOf(name) % 8})`;
  const longest = Math.max(...rows.map((row) => row.parts.reduce((sum, part) => sum + part.value, 0)));
  const legend = names.map((name) => [el("span", { class: "swatch", style: `background:${partColor(name)}` }), name]);
  const figure = chartFigure(title, unit, legend);
  for (const row of rows) {
    const parts = row.parts.map((part) =>
      el("div", {
        style: `width:${(100 * part.value) / longest}%;background:${partColor(part.name)}`,
        title: `${part.name}: ${formatNumber(part.value)}`,
      }),
    );
    const bar = el("div", { style: "display:flex;height:18px;border-radius:4px;overflow:hidden;margin:2px 0 8px" });
    bar.append(...parts);
    figure.append(el("div", {}, row.name), bar);
  }
  return figure;
}
