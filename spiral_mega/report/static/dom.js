// Elements, number formats, tables, and the embedded data.

function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svgEl(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

// Text never becomes markup: children are elements or text nodes.
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false && value !== undefined)
      node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function note(text) {
  return el("p", { class: "note" }, text);
}

function formatNumber(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

function formatPercent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`;
}

// A value with its interval in small print.
function withInterval(value, [low, high], percent = false) {
  const format = percent ? formatPercent : formatNumber;
  const bound = (number) => (percent ? (100 * number).toFixed(1) : formatNumber(number));
  return el("span", {}, format(value), " ", el("small", {}, `${bound(low)} to ${bound(high)}`));
}

// The first `textColumns` columns are text, the others numbers.
function dataTable(head, rows, textColumns = 1) {
  const cell = (tag) => (value, i) => el(tag, { class: i < textColumns ? "text" : null }, value);
  const body = rows.map((row) => el("tr", {}, row.map(cell("td"))));
  return el(
    "div",
    { class: "scroll" },
    el("table", {}, el("thead", {}, el("tr", {}, head.map(cell("th")))), el("tbody", {}, body)),
  );
}

function color(run) {
  return `var(--s${run.index % 8})`;
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const blocks = new Map();

// A block of episodes is unpacked when one of them is shown for the first time.
async function block(number) {
  if (!blocks.has(number)) blocks.set(number, await unpack(document.getElementById(`block-${number}`).textContent));
  return blocks.get(number);
}
