// The browser of episodes: a list that draws only the rows in view, and one episode with its sets and traces.

const ROW = 46;
const FLAGS = ["effective", "gated", "truncated", "failed verification"];
const view = { rows: [], at: 0, set: null, filters: { text: "", origin: "", flags: new Set() } };

function episodesTab(runs) {
  const total = runs.reduce((sum, run) => sum + run.episodes.length, 0);
  if (!total) return [el("p", { class: "note" }, "No run that is shown has traces.")];
  const list = el("div", { class: "list", tabindex: 0, role: "listbox", "aria-label": "Episodes", id: "episodes" });
  const detail = el("div", { class: "detail", id: "detail", tabindex: 0, "aria-label": "Episode" });
  const refresh = () => {
    view.rows = runs.flatMap((run) => run.episodes.filter(matches).map((episode) => ({ run, episode })));
    view.at = Math.min(view.at, Math.max(0, view.rows.length - 1));
    side.querySelector("#count").textContent = `${view.rows.length} of ${total} episodes`;
    drawList(list);
    if (view.rows.length) select(view.at);
    else detail.replaceChildren(el("p", { class: "note" }, "No episode passes the filters."));
  };
  const side = el("div", { class: "side" }, filterBar(runs, refresh), list);
  list.addEventListener("scroll", () => drawList(list));
  list.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(list.clientHeight / ROW) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    select(view.at + moves[event.key]);
  });
  list.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) select(Number(row.dataset.at));
  });
  requestAnimationFrame(refresh);
  return [omitted(runs), el("div", { class: "browser" }, side, detail)];
}

function omitted(runs) {
  const notes = runs
    .filter((run) => run.left_out)
    .map((run) => `${run.name}: ${run.left_out.toLocaleString("en")} more are in its folder`);
  return el(
    "p",
    { class: "note" },
    notes.length ? `Evenly spaced episodes. ${notes.join("; ")}.` : "Every episode of the runs shown.",
  );
}

function filterBar(runs, refresh) {
  const { filters } = view;
  const origins = [...new Set(runs.flatMap((run) => run.episodes.map((episode) => episode.origin)))];
  if (!origins.includes(filters.origin)) filters.origin = "";
  const search = el("input", {
    type: "search",
    id: "search",
    placeholder: "Problem or id  ( / )",
    "aria-label": "Search problems",
    value: filters.text,
    oninput: (event) => {
      filters.text = event.target.value;
      refresh();
    },
  });
  const origin = el(
    "select",
    {
      "aria-label": "Where from",
      id: "origin",
      onchange: (event) => {
        filters.origin = event.target.value;
        refresh();
      },
    },
    el("option", { value: "" }, "all steps and evaluations"),
    origins.map((name) => el("option", { value: name, selected: name === filters.origin }, name)),
  );
  const boxes = FLAGS.map((flag) =>
    el(
      "label",
      {},
      el("input", {
        type: "checkbox",
        checked: filters.flags.has(flag),
        "data-flag": flag,
        onchange: (event) => {
          filters.flags[event.target.checked ? "add" : "delete"](flag);
          refresh();
        },
      }),
      flag,
    ),
  );
  return el(
    "div",
    { class: "filters" },
    search,
    origin,
    boxes,
    el("span", { class: "note", id: "count", style: "margin:0", "aria-live": "polite" }),
  );
}

function matches(episode) {
  const { text, origin, flags } = view.filters;
  if (origin && episode.origin !== origin) return false;
  for (const flag of flags) if (!(episode.flags & (1 << FLAGS.indexOf(flag)))) return false;
  const wanted = text.trim().toLowerCase();
  return !wanted || episode.id.toLowerCase().includes(wanted) || episode.title.toLowerCase().includes(wanted);
}

function drawList(list) {
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 4);
  const last = Math.min(view.rows.length, first + Math.ceil(list.clientHeight / ROW) + 8);
  const filler = el("div", { style: `height:${view.rows.length * ROW}px` });
  const rows = [];
  for (let at = first; at < last; at++) {
    const { run, episode } = view.rows[at];
    const flags = FLAGS.filter((_, i) => episode.flags & (1 << i) && i > 0);
    const rewards = `search ${formatPercent(episode.search)}${episode.aggregation === null ? "" : `, aggregation ${formatPercent(episode.aggregation)}`}`;
    rows.push(
      el(
        "div",
        {
          class: at === view.at ? "row selected" : "row",
          style: `top:${at * ROW}px`,
          "data-at": at,
          id: `row-${at}`,
          role: "option",
          "aria-selected": String(at === view.at),
        },
        el("div", {}, el("span", { class: "swatch", style: `background:${color(run)}` }), ` ${episode.title}`),
        el("div", { class: "meta" }, [episode.origin, rewards, ...flags].join(" · ")),
      ),
    );
  }
  list.replaceChildren(filler, ...rows);
  list.setAttribute("aria-activedescendant", `row-${view.at}`);
}

async function select(at) {
  const list = document.getElementById("episodes");
  view.at = Math.max(0, Math.min(view.rows.length - 1, at));
  view.set = null;
  const top = view.at * ROW;
  if (top < list.scrollTop) list.scrollTop = top;
  if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  drawList(list);
  const { run, episode } = view.rows[view.at];
  const whole = (await block(episode.block))[episode.place];
  if (view.rows[view.at]?.episode !== episode) return; // another was chosen meanwhile
  drawEpisode(run, episode, whole);
}

function drawEpisode(run, episode, whole) {
  const detail = document.getElementById("detail");
  const search = whole.traces.filter((trace) => trace.s === null);
  const problem = whole.messages
    .map((message) => (whole.messages.length > 1 ? `${message.role}: ${message.content}` : message.content))
    .join("\n\n");
  const shown = [
    el("h2", { style: "margin-top:0" }, `${run.name} · ${episode.origin} · ${episode.id}`),
    el("div", { class: "problem" }, problem),
    el("p", { class: "note" }, `Answer: ${whole.answer.join(" or ")}`),
    el("h2", {}, `Search traces (${search.length})`),
    el(
      "div",
      { class: "traces" },
      search.map((trace, position) => traceCard(trace, position, whole)),
    ),
  ];
  if (whole.sets.length)
    shown.push(
      el("h2", {}, `Sets (${whole.sets.length})`),
      ...whole.sets.map((members, l) => setBox(members, l, whole)),
    );
  detail.replaceChildren(...shown);
  detail.scrollTop = 0;
}

function setBox(members, l, whole) {
  const first = whole.traces.findIndex((trace) => trace.s === l);
  const answers = whole.traces.filter((trace) => trace.s === l);
  const score = setScore(whole, l);
  const baseline = whole.sets.reduce((sum, _, each) => sum + setScore(whole, each), 0) / whole.sets.length;
  const trained = whole.traces[0].a !== null;
  return el(
    "div",
    { class: "set", id: `set-${l}` },
    el(
      "div",
      { class: "head" },
      el(
        "button",
        { class: "chip", type: "button", "data-set": l, "aria-pressed": "false", onclick: () => markSet(l, whole) },
        `set ${l}`,
      ),
      el("span", {}, `of ${members.map((member) => traceName(member, whole)).join(", ")}`),
      answers.length ? rewardChip(score, "score") : el("span", { class: "chip" }, "for credit alone"),
      answers.length && trained ? signedChip(score - baseline, "set advantage") : null,
    ),
    el(
      "div",
      { class: "traces" },
      answers.map((trace, i) => traceCard(trace, first + i, whole)),
    ),
  );
}

function traceName(position, whole) {
  const trace = whole.traces[position];
  return trace.s === null ? `#${position}` : `set ${trace.s}'s ${trace.i}`;
}

// Shows which traces a set was made of; the same set again, or Escape, shows all.
function markSet(l, whole) {
  view.set = view.set === l ? null : l;
  const members = view.set === null ? null : new Set(whole.sets[l]);
  for (const card of document.querySelectorAll("#detail .trace")) {
    const position = Number(card.dataset.position);
    const answers = whole.traces[position].s === l;
    card.classList.toggle("member", Boolean(members?.has(position)));
    card.classList.toggle("dim", Boolean(members) && !members.has(position) && !answers);
  }
  for (const box of document.querySelectorAll("#detail .set"))
    box.classList.toggle("selected", view.set !== null && box.id === `set-${l}`);
  for (const chip of document.querySelectorAll("#detail [data-set]"))
    chip.setAttribute("aria-pressed", String(view.set === Number(chip.dataset.set)));
}

function traceCard(trace, position, whole) {
  const sets = whole.sets.map((members, l) => (members.includes(position) ? l : -1)).filter((l) => l >= 0);
  const flags = [
    trace.e === "length" ? "truncated" : null,
    trace.g ? "gated" : null,
    trace.v === "ok" ? null : `verification: ${trace.v}`,
  ].filter(Boolean);
  const card = el(
    "div",
    { class: `trace ${trace.r >= 1 ? "right" : trace.r > 0 ? "" : "wrong"}`, "data-position": position },
    el(
      "div",
      { class: "head" },
      el("b", {}, trace.s === null ? `#${position}` : `${trace.i}`),
      rewardChip(trace.r, "reward"),
      trace.a === null ? null : signedChip(trace.a, "advantage"),
      el("span", { class: "chip" }, `${trace.l} tokens`),
      flags.map((flag) => el("span", { class: "chip flag" }, flag)),
      sets.map((l) =>
        el(
          "button",
          {
            class: "chip",
            type: "button",
            "data-set": l,
            "aria-pressed": "false",
            title: `was shown in set ${l}`,
            onclick: () => markSet(l, whole),
          },
          `in ${l}`,
        ),
      ),
    ),
    el("pre", {}, trace.t || "(empty)"),
  );
  card.addEventListener("dblclick", () => card.classList.toggle("open"));
  return card;
}

function setScore(whole, l) {
  const answers = whole.traces.filter((trace) => trace.s === l);
  return answers.reduce((sum, trace) => sum + trace.r, 0) / Math.max(1, answers.length);
}

function signedChip(value, name) {
  const sign = Math.abs(value) <= 1e-8 ? "" : value > 0 ? "plus" : "minus";
  return el("span", { class: `chip ${sign}` }, `${name} ${value > 1e-8 ? "+" : ""}${formatNumber(value)}`);
}

function rewardChip(reward, name) {
  return el(
    "span",
    { class: `chip ${reward >= 1 ? "plus" : reward > 0 ? "" : "minus"}` },
    `${name} ${formatNumber(reward)}`,
  );
}
