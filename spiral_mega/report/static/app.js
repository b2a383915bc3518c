// Tabs, selection of runs, theme and keyboard.

const TABS = [
  ["training", "Training", trainingTab],
  ["evaluation", "Evaluation", evaluationTab],
  ["analysis", "Analysis", analysisTab],
  ["time", "Time", timeTab],
  ["episodes", "Episodes", episodesTab],
];
const KEYS = [
  ["1 … 5, or ← → on the tabs", "switch between the tabs"],
  ["t", "switch between light and dark"],
  ["/", "search for a problem (Episodes)"],
  ["j k, or ↓ ↑ PgDn PgUp in the list", "next and previous episode"],
  ["s S", "mark the members of the next or previous set"],
  ["x", "expand or collapse long traces"],
  ["← → on a plot", "read its values"],
  ["Esc", "leave a field, unmark a set, close this list"],
];
let report = null;
let tab = "training";

function selectedRuns() {
  return report.runs.filter((run) => !run.hidden);
}

function draw() {
  const [, , render] = TABS.find(([id]) => id === tab);
  document.getElementById("main").replaceChildren(...render(selectedRuns()));
}

function showTab(id, focus = false) {
  tab = id;
  for (const button of document.querySelectorAll("#tabs button")) {
    const selected = button.dataset.tab === id;
    button.setAttribute("aria-selected", String(selected));
    button.tabIndex = selected ? 0 : -1;
    if (selected && focus) button.focus();
  }
  history.replaceState(null, "", `#${id}`);
  draw();
}

function drawTabs() {
  const bar = document.getElementById("tabs");
  bar.append(
    ...TABS.map(([id, name]) =>
      el("button", { type: "button", role: "tab", "data-tab": id, onclick: () => showTab(id) }, name),
    ),
  );
  bar.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const current = TABS.findIndex(([id]) => id === tab);
    showTab(TABS[(current + move + TABS.length) % TABS.length][0], true);
  });
}

function drawLegend() {
  const boxes = report.runs.map((run) =>
    el(
      "label",
      {},
      el("input", {
        type: "checkbox",
        checked: true,
        onchange: (event) => {
          run.hidden = !event.target.checked;
          draw();
        },
      }),
      el("span", { class: "swatch", style: `background:${color(run)}` }),
      run.name,
    ),
  );
  document.getElementById("legend").append(...boxes);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // a page opened from a file may have no storage: the choice then lasts as long as the page
  }
}

function startTheme() {
  let stored = null;
  try {
    stored = localStorage.getItem("theme");
  } catch {
    // as above
  }
  setTheme(stored ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
}

function toggleTheme() {
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
}

function showKeys() {
  const dialog = document.getElementById("keys");
  const rows = KEYS.map(([keys, effect]) =>
    el("tr", {}, el("td", {}, el("kbd", {}, keys)), el("td", { class: "text" }, effect)),
  );
  dialog.replaceChildren(
    el("table", {}, el("tbody", {}, rows)),
    el("form", { method: "dialog" }, el("button", {}, "Close")),
  );
  dialog.showModal();
}

// Mark the members of the next or previous set.
function stepSet(move) {
  const buttons = [...document.querySelectorAll("#detail .set > .head [data-set]")];
  if (!buttons.length) return;
  const count = buttons.length;
  const next = view.set === null ? (move > 0 ? 0 : count - 1) : (view.set + move + count) % count;
  buttons[next].click();
  document.getElementById(`set-${next}`).scrollIntoView({ block: "nearest" });
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("keys").open) return;
  const typing = event.target.matches("input[type=search], select");
  if (event.key === "Escape" && typing) return event.target.blur();
  if (typing) return;
  const actions = {
    t: toggleTheme,
    "?": showKeys,
    "/": () => {
      showTab("episodes");
      document.getElementById("search")?.focus();
    },
  };
  if (tab === "episodes" && view.rows.length) {
    actions.j = () => select(view.selected + 1);
    actions.k = () => select(view.selected - 1);
    actions.s = () => stepSet(1);
    actions.S = () => stepSet(-1);
    actions.x = () => document.querySelectorAll("#detail .trace").forEach((card) => card.classList.toggle("open"));
    if (view.set !== null)
      actions.Escape = () => document.querySelector(`#set-${view.set} [data-set="${view.set}"]`).click();
  }
  const number = Number(event.key);
  if (number >= 1 && number <= TABS.length) actions[event.key] = () => showTab(TABS[number - 1][0], true);
  if (!(event.key in actions)) return;
  event.preventDefault();
  actions[event.key]();
}

async function start() {
  startTheme();
  report = await unpack(document.getElementById("data").textContent);
  drawTabs();
  drawLegend();
  document.getElementById("theme").addEventListener("click", toggleTheme);
  document.getElementById("help").addEventListener("click", showKeys);
  document.addEventListener("keydown", onKey);
  const wanted = location.hash.slice(1);
  const first = report.runs.some((run) => run.steps.length) ? "training" : "evaluation";
  showTab(TABS.some(([id]) => id === wanted) ? wanted : first);
  document.documentElement.dataset.ready = "true";
}

start();
