// The episode browser: a list that draws only the rows in view, and one episode with its sets and traces.
//
// An episode of the index is {id, title, origin, search, aggregation, flags, block, position}; a whole one {messages,
// answer, sets, traces}. Members of a set are positions in `traces`; a trace's `set` is the set that it answers.

const ROW_HEIGHT = 46;
const FLAGS = ["effective", "gated", "truncated", "failed verification"]; // bits of `flags`, the lowest first
const view = { rows: [], selected: 0, set: null, filters: { text: "", origin: "", flags: new Set() } };

function episodesTab(runs) {
  const total = runs.reduce((sum, run) => sum + run.episodes.length, 0);
  if (!total) return [note("None of the selected runs has traces.")];
  const list = el("div", { class: "list", tabindex: 0, role: "listbox", "aria-label": "Episodes", id: "episodes" });
  const detail = el("div", { class: "detail", id: "detail", tabindex: 0, "aria-label": "Episode" });
  const refresh = () => {
    view.rows = runs.flatMap((run) => run.episodes.filter(passesFilters).map((episode) => ({ run, episode })));
    view.selected = Math.min(view.selected, Math.max(0, view.rows.length - 1));
    side.querySelector("#count").textContent = `${view.rows.length} of ${total} episodes`;
    drawList(list);
    if (view.rows.length) select(view.selected);
    else detail.replaceChildren(note("No episode passes the filters."));
  };
  const side = el("div", { class: "side" }, filterBar(runs, refresh), list);
  list.addEventListener("scroll", () => drawList(list));
  list.addEventListener("keydown", onListKey);
  list.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) select(Number(row.dataset.row));
  });
  requestAnimationFrame(refresh); // once the list has its height
  return [leftOutNote(runs), el("div", { class: "browser" }, side, detail)];
}

function onListKey(event) {
  const page = Math.max(1, Math.floor(event.currentTarget.clientHeight / ROW_HEIGHT) - 1);
  const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
  if (!(event.key in moves)) return;
  event.preventDefault();
  select(view.selected + moves[event.key]);
}

function leftOutNote(runs) {
  const counts = runs
    .filter((run) => run.left_out)
    .map((run) => `${run.name}: ${run.left_out.toLocaleString("en")} more are in its folder`);
  return note(counts.length ? `Evenly spaced episodes. ${counts.join("; ")}.` : "Every episode of the selected runs.");
}

function filterBar(runs, refresh) {
  const { filters } = view;
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
  return el(
    "div",
    { class: "filters" },
    search,
    originSelect(runs, refresh),
    FLAGS.map((flag) => flagBox(flag, refresh)),
    el("span", { class: "note", id: "count", style: "margin:0", "aria-live": "polite" }),
  );
}

function originSelect(runs, refresh) {
  const { filters } = view;
  const origins = [...new Set(runs.flatMap((run) => run.episodes.map((episode) => episode.origin)))];
  if (!origins.includes(filters.origin)) filters.origin = "";
  const onchange = (event) => {
    filters.origin = event.target.value;
    refresh();
  };
  return el(
    "select",
    { "aria-label": "Step or evaluation", id: "origin", onchange },
    el("option", { value: "" }, "all steps and evaluations"),
    origins.map((name) => el("option", { value: name, selected: name === filters.origin }, name)),
  );
}

function flagBox(flag, refresh) {
  const { flags } = view.filters;
  const onchange = (event) => {
    flags[event.target.checked ? "add" : "delete"](flag);
    refresh();
  };
  return el(
    "label",
    {},
    el("input", { type: "checkbox", checked: flags.has(flag), "data-flag": flag, onchange }),
    flag,
  );
}

function hasFlag(episode, flag) {
  return Boolean(episode.flags & (1 << FLAGS.indexOf(flag)));
}

function passesFilters(episode) {
  const { text, origin, flags } = view.filters;
  if (origin && episode.origin !== origin) return false;
  if ([...flags].some((flag) => !hasFlag(episode, flag))) return false;
  const wanted = text.trim().toLowerCase();
  return !wanted || episode.id.toLowerCase().includes(wanted) || episode.title.toLowerCase().includes(wanted);
}

// Rows in view are elements; a filler gives the list the height of all rows.
function drawList(list) {
  const first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - 4);
  const last = Math.min(view.rows.length, first + Math.ceil(list.clientHeight / ROW_HEIGHT) + 8);
  const filler = el("div", { style: `height:${view.rows.length * ROW_HEIGHT}px` });
  const rows = [];
  for (let number = first; number < last; number++) rows.push(listRow(number));
  list.replaceChildren(filler, ...rows);
  list.setAttribute("aria-activedescendant", `row-${view.selected}`);
}

function listRow(number) {
  const { run, episode } = view.rows[number];
  const selected = number === view.selected;
  const rewards = [`search ${formatPercent(episode.search)}`];
  if (episode.aggregation !== null) rewards.push(`aggregation ${formatPercent(episode.aggregation)}`);
  const problems = FLAGS.slice(1).filter((flag) => hasFlag(episode, flag));
  return el(
    "div",
    {
      class: selected ? "row selected" : "row",
      style: `top:${number * ROW_HEIGHT}px`,
      "data-row": number,
      id: `row-${number}`,
      role: "option",
      "aria-selected": String(selected),
    },
    el("div", {}, el("span", { class: "swatch", style: `background:${color(run)}` }), ` ${episode.title}`),
    el("div", { class: "meta" }, [episode.origin, rewards.join(", "), ...problems].join(" · ")),
  );
}

async function select(number) {
  const list = document.getElementById("episodes");
  view.selected = Math.max(0, Math.min(view.rows.length - 1, number));
  view.set = null;
  const top = view.selected * ROW_HEIGHT;
  if (top < list.scrollTop) list.scrollTop = top;
  if (top + ROW_HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW_HEIGHT - list.clientHeight;
  drawList(list);
  const { run, episode } = view.rows[view.selected];
  const whole = (await block(episode.block))[episode.position];
  if (view.rows[view.selected]?.episode !== episode) return; // another was selected meanwhile
  drawEpisode(run, episode, whole);
}

function drawEpisode(run, episode, whole) {
  const detail = document.getElementById("detail");
  const search = whole.traces.filter((trace) => trace.set === null);
  const sections = [
    el("h2", { style: "margin-top:0" }, `${run.name} · ${episode.origin} · ${episode.id}`),
    el("div", { class: "problem" }, problemText(whole.messages)),
    note(`Answer: ${whole.answer.join(" or ")}`),
    el("h2", {}, `Search traces (${search.length})`),
    traceCards(search, 0, whole),
  ];
  if (whole.sets.length) sections.push(el("h2", {}, `Sets (${whole.sets.length})`));
  detail.replaceChildren(...sections, ...whole.sets.map((members, set) => setBox(members, set, whole)));
  detail.scrollTop = 0;
}

function problemText(messages) {
  if (messages.length === 1) return messages[0].content;
  return messages.map((message) => `${message.role}: ${message.content}`).join("\n\n");
}

// Cards of consecutive traces, the first of which is at position `first`.
function traceCards(traces, first, whole) {
  return el(
    "div",
    { class: "traces" },
    traces.map((trace, i) => traceCard(trace, first + i, whole)),
  );
}

function setBox(members, set, whole) {
  const first = whole.traces.findIndex((trace) => trace.set === set);
  const answers = answersTo(set, whole);
  const head = [
    setButton(set, `set ${set}`, null, whole),
    el("span", {}, `of ${members.map((member) => traceName(member, whole)).join(", ")}`),
    answers.length ? rewardChip(setScore(set, whole), "score") : el("span", { class: "chip" }, "for credit only"),
  ];
  const trained = whole.traces[0].advantage !== null;
  if (answers.length && trained) head.push(signedChip(setAdvantage(set, whole), "set advantage"));
  return el(
    "div",
    { class: "set", id: `set-${set}` },
    el("div", { class: "head" }, head),
    traceCards(answers, first, whole),
  );
}

function answersTo(set, whole) {
  return whole.traces.filter((trace) => trace.set === set);
}

function setScore(set, whole) {
  const answers = answersTo(set, whole);
  return answers.reduce((sum, trace) => sum + trace.reward, 0) / Math.max(1, answers.length);
}

// The set's score less the mean score of all sets.
function setAdvantage(set, whole) {
  const mean = whole.sets.reduce((sum, _, each) => sum + setScore(each, whole), 0) / whole.sets.length;
  return setScore(set, whole) - mean;
}

function setButton(set, text, title, whole) {
  const attributes = { class: "chip", type: "button", "data-set": set, "aria-pressed": "false", title };
  return el("button", { ...attributes, onclick: () => toggleSet(set, whole) }, text);
}

function traceName(position, whole) {
  const trace = whole.traces[position];
  return trace.set === null ? `#${position}` : `answer ${trace.index} to set ${trace.set}`;
}

// Mark the members of a set; the same set again, or Escape, removes the marks.
function toggleSet(set, whole) {
  view.set = view.set === set ? null : set;
  const members = view.set === null ? null : new Set(whole.sets[set]);
  for (const card of document.querySelectorAll("#detail .trace")) {
    const position = Number(card.dataset.position);
    const isMember = Boolean(members?.has(position));
    const isAnswer = whole.traces[position].set === set;
    card.classList.toggle("member", isMember);
    card.classList.toggle("dim", Boolean(members) && !isMember && !isAnswer);
  }
  for (const box of document.querySelectorAll("#detail .set"))
    box.classList.toggle("selected", view.set !== null && box.id === `set-${set}`);
  for (const button of document.querySelectorAll("#detail [data-set]"))
    button.setAttribute("aria-pressed", String(view.set === Number(button.dataset.set)));
}

function traceCard(trace, position, whole) {
  const sets = [...whole.sets.keys()].filter((set) => whole.sets[set].includes(position));
  const outcome = trace.reward >= 1 ? "right" : trace.reward > 0 ? "" : "wrong";
  const head = [
    el("b", {}, trace.set === null ? `#${position}` : `${trace.index}`),
    rewardChip(trace.reward, "reward"),
    trace.advantage === null ? null : signedChip(trace.advantage, "advantage"),
    el("span", { class: "chip" }, `${trace.length} tokens`),
    ...traceFlags(trace).map((flag) => el("span", { class: "chip flag" }, flag)),
    ...sets.map((set) => setButton(set, `in set ${set}`, `member of set ${set}`, whole)),
  ];
  const card = el(
    "div",
    { class: `trace ${outcome}`, "data-position": position },
    el("div", { class: "head" }, head),
    el("pre", {}, trace.text || "(empty)"),
  );
  card.addEventListener("dblclick", () => card.classList.toggle("open"));
  return card;
}

function traceFlags(trace) {
  return [
    trace.finish === "length" ? "truncated" : null,
    trace.gated ? "gated" : null,
    trace.verification === "ok" ? null : `verification: ${trace.verification}`,
  ].filter(Boolean);
}

function signedChip(value, name) {
  const isZero = Math.abs(value) <= 1e-8; // rounding
  const sign = isZero ? "" : value > 0 ? "plus" : "minus";
  return el("span", { class: `chip ${sign}` }, `${name} ${sign === "plus" ? "+" : ""}${formatNumber(value)}`);
}

function rewardChip(reward, name) {
  const sign = reward >= 1 ? "plus" : reward > 0 ? "" : "minus";
  return el("span", { class: `chip ${sign}` }, `${name} ${formatNumber(reward)}`);
}
