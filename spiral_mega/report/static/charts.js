// Line charts and stacked bars in SVG. A chart takes the focus; the arrow keys move its cursor.

const SIZE = { width: 420, height: 230, left: 50, right: 12, top: 8, bottom: 34 };
const DASHES = ["", "6 3", "2 3", "9 3 2 3"];

// series: [{name, color, dash, points: [[x, y, low, high], ...]}], low and high optional.
function lineChart({ title, unit, xLabel, series, logX = false, logY = false, percent = false, zero = false }) {
  const drawn = series
    .map((line) => ({
      ...line,
      points: line.points.filter(([x, y]) => y !== null && (!logY || y > 0) && (!logX || x > 0)),
    }))
    .filter((line) => line.points.length);
  const format = percent ? formatPercent : formatNumber;
  const svg = svgEl("svg", { viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, tabindex: 0, role: "img" });
  const figure = el(
    "figure",
    { class: "chart" },
    el("h3", {}, title, " ", el("span", { class: "unit" }, unit ? `(${unit})` : "")),
  );
  figure.append(chartKeys(drawn), svg);
  if (!drawn.length) {
    svg.append(
      svgEl(
        "text",
        { x: SIZE.width / 2, y: SIZE.height / 2, "text-anchor": "middle" },
        "no run that is shown has this",
      ),
    );
    return figure;
  }
  const points = drawn.flatMap((line) => line.points);
  const xs = [...new Set(points.map(([x]) => x))].sort((a, b) => a - b);
  const ys = points.flatMap(([, y, low, high]) => [y, low ?? y, high ?? y]);
  const x = scale(xs[0], xs[xs.length - 1], SIZE.left, SIZE.width - SIZE.right, logX);
  const bounds = [zero || percent ? Math.min(0, ...ys) : Math.min(...ys), Math.max(...ys)];
  if (logY) [bounds[0], bounds[1]] = [Math.min(...ys), Math.max(...ys)];
  const y = scale(bounds[0], bounds[1], SIZE.height - SIZE.bottom, SIZE.top, logY);
  axes(svg, x, y, xs, { xLabel, format, logX });
  for (const line of drawn) svg.append(...band(line, x, y), path(line, x, y), ...dots(line, x, y));
  svg.setAttribute(
    "aria-label",
    `${title}: ${drawn.map((line) => `${line.name} ends at ${format(line.points.at(-1)[1])}`).join("; ")}`,
  );
  addCursor(figure, svg, { drawn, xs, x, format, xLabel });
  return figure;
}

function chartKeys(series) {
  const sample = (line) =>
    svgEl(
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
  return el(
    "div",
    { class: "keys" },
    series.length > 1 ? series.map((line) => el("span", {}, sample(line), " ", line.name)) : [],
  );
}

function scale(low, high, from, to, log) {
  if (low === 0 && high === 0) high = 1;
  if (low === high)
    [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const of = log ? Math.log : (value) => value;
  const place = (value) => from + ((of(value) - of(low)) / (of(high) - of(low))) * (to - from);
  return Object.assign(place, { low, high, log });
}

function ticks({ low, high, log }, count) {
  if (log) {
    const decades = Math.log10(high / low);
    const found = [];
    const steps = decades > 2 ? [1] : decades > 0.8 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += Math.ceil(decades / 8) || 1)
      for (const step of steps) found.push(step * 10 ** power);
    return found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  }
  const rough = (high - low) / count;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * unit).find((value) => value >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step)
    found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return found;
}

function axes(svg, x, y, xs, { xLabel, format, logX }) {
  for (const value of ticks(y, 5)) {
    const at = y(value);
    svg.append(svgEl("line", { class: "gridline", x1: SIZE.left, x2: SIZE.width - SIZE.right, y1: at, y2: at }));
    svg.append(
      svgEl(
        "text",
        { x: SIZE.left - 6, y: at + 3.5, "text-anchor": "end" },
        format === formatPercent ? `${formatNumber(100 * value)}%` : format(value),
      ),
    );
  }
  const marks = logX && xs.length <= 9 ? xs : ticks(x, 6).filter((value) => x.high > 12 || Number.isInteger(value));
  for (const value of marks)
    svg.append(
      svgEl("text", { x: x(value), y: SIZE.height - SIZE.bottom + 15, "text-anchor": "middle" }, formatNumber(value)),
    );
  svg.append(svgEl("text", { x: (SIZE.left + SIZE.width) / 2, y: SIZE.height - 4, "text-anchor": "middle" }, xLabel));
}

function band(line, x, y) {
  const ranged = line.points.filter((point) => point.length > 2 && point[2] !== null);
  if (ranged.length < 2) return [];
  const edge = (points, side) =>
    points.map(
      (point) => `${x(point[0]).toFixed(1)},${y(Math.max(point[side], y.log ? y.low : -Infinity)).toFixed(1)}`,
    );
  const outline = [...edge(ranged, 3), ...edge([...ranged].reverse(), 2)].join(" ");
  return [svgEl("polygon", { points: outline, fill: line.color, opacity: 0.13 })];
}

function path(line, x, y) {
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

function addCursor(figure, svg, { drawn, xs, x, format, xLabel }) {
  const cursor = svgEl("line", { class: "cursor", y1: SIZE.top, y2: SIZE.height - SIZE.bottom, visibility: "hidden" });
  const tip = el("div", { class: "tip", hidden: true, role: "status" });
  svg.append(cursor);
  figure.append(tip);
  let at = null;
  const show = (index) => {
    at = Math.max(0, Math.min(xs.length - 1, index));
    const px = x(xs[at]);
    for (const name of ["x1", "x2"]) cursor.setAttribute(name, px);
    cursor.setAttribute("visibility", "visible");
    const values = drawn.flatMap((line) => {
      const point = line.points.find(([value]) => value === xs[at]);
      if (!point) return [];
      const range = point.length > 2 && point[2] !== null ? ` [${format(point[2])}, ${format(point[3])}]` : "";
      return [
        el(
          "div",
          {},
          el("span", { class: "swatch", style: `background:${line.color}` }),
          ` ${line.name}: ${format(point[1])}${range}`,
        ),
      ];
    });
    tip.replaceChildren(el("b", {}, `${xLabel} ${formatNumber(xs[at])}`), ...values);
    tip.hidden = false;
    const share = px / SIZE.width;
    tip.style.top = "40px";
    tip.style.left = share < 0.5 ? `${100 * share + 4}%` : "auto";
    tip.style.right = share < 0.5 ? "auto" : `${100 * (1 - share) + 4}%`;
  };
  const hide = () => {
    tip.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const px = ((event.clientX - box.left) / box.width) * SIZE.width;
    show(xs.reduce((best, value, i) => (Math.abs(x(value) - px) < Math.abs(x(xs[best]) - px) ? i : best), 0));
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const moves = {
      ArrowLeft: () => (at ?? xs.length) - 1,
      ArrowRight: () => (at ?? -1) + 1,
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

// rows: [{name, parts: [{name, value}]}]; the parts of one name have one color.
function stackedBars({ title, unit, rows }) {
  const names = [...new Set(rows.flatMap((row) => row.parts.map((part) => part.name)))];
  const most = Math.max(...rows.map((row) => row.parts.reduce((sum, part) => sum + part.value, 0)));
  const figure = el("figure", { class: "chart" }, el("h3", {}, title, " ", el("span", { class: "unit" }, `(${unit})`)));
  const key = names.map((name, i) =>
    el("span", {}, el("span", { class: "swatch", style: `background:var(--s${i % 8})` }), " ", name),
  );
  figure.append(el("div", { class: "keys" }, key));
  for (const row of rows) {
    const bar = el("div", { style: "display:flex;height:18px;border-radius:4px;overflow:hidden;margin:2px 0 8px" });
    for (const part of row.parts) {
      const width = `${(100 * part.value) / most}%`;
      const label = `${part.name}: ${formatNumber(part.value)}`;
      bar.append(
        el("div", { style: `width:${width};background:var(--s${names.indexOf(part.name) % 8})`, title: label }),
      );
    }
    figure.append(el("div", {}, row.name), bar);
  }
  return figure;
}
