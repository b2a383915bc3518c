// Training curves of all runs over each other, and where the time of a step goes.

function trainingTab(runs) {
  const trained = runs.filter((run) => run.steps.length);
  if (!trained.length) return [el("p", { class: "note" }, "No run that is shown has metrics.")];
  const charts = report.panels.map((panel) => panelChart(panel, trained)).filter(Boolean);
  return [
    el(
      "p",
      { class: "note" },
      "One colour a run; solid, dashed and dotted lines are the metrics of one plot. Curves of more than 60 steps are running means.",
    ),
    el("div", { class: "charts" }, charts),
  ];
}

function panelChart(panel, runs) {
  const names = panel.metrics.filter((name) => runs.some((run) => run.metrics[name]));
  if (!names.length) return null;
  const series = runs.flatMap((run) =>
    names
      .filter((name) => run.metrics[name])
      .map((name) => ({
        name: [runs.length > 1 ? run.name : "", names.length > 1 || runs.length === 1 ? short(name) : ""]
          .filter(Boolean)
          .join(" "),
        color: runs.length > 1 ? color(run) : `var(--s${names.indexOf(name) % 8})`,
        dash: runs.length > 1 ? DASHES[names.indexOf(name) % DASHES.length] : "",
        points: smooth(run.steps.map((step, i) => [step, absolute(run.metrics[name][i], panel.style)])),
      })),
  );
  return lineChart({
    title: panel.title,
    unit: panel.unit,
    xLabel: "step",
    series,
    percent: panel.style === "percent",
    logY: panel.style === "log",
  });
}

function short(name) {
  return name.split("/").slice(1).join("/").replaceAll("_", " ");
}

function absolute(value, style) {
  return value === null || style !== "log" ? value : Math.abs(value);
}

function smooth(points) {
  const present = points.filter(([, y]) => y !== null);
  if (present.length <= 60) return present;
  const reach = Math.max(2, Math.floor(present.length / 40));
  return present.map(([x], i) => {
    const near = present.slice(Math.max(0, i - reach), i + reach + 1);
    return [x, near.reduce((sum, [, y]) => sum + y, 0) / near.length];
  });
}

function timeTab(runs) {
  const timed = runs.filter((run) => Object.keys(run.metrics).some((name) => name.startsWith("time/")));
  if (!timed.length) return [el("p", { class: "note" }, "No run that is shown has times.")];
  const rows = timed.map((run) => ({ name: run.name, parts: stages(run) }));
  const table = rows.map(({ name, parts }) => {
    const whole = parts.reduce((sum, part) => sum + part.value, 0);
    return parts.map((part, i) => [
      i ? "" : name,
      part.name,
      formatNumber(part.value),
      formatPercent(part.value / whole),
    ]);
  });
  const panel = { title: "Time of a step", unit: "seconds", style: "line", metrics: ["time/step"] };
  return [
    el(
      "p",
      { class: "note" },
      "Mean seconds of a step by stage, the slowest rank's; evaluations and checkpoints lie outside of steps and are left out.",
    ),
    el(
      "div",
      { class: "charts" },
      stackedBars({ title: "Where a step's time goes", unit: "seconds", rows }),
      panelChart(panel, timed),
    ),
    el("h2", {}, "Stages"),
    dataTable(["run", "stage", "seconds", "share"], table.flat(), 2),
  ];
}

// Stages of the mean step; what no stage accounts for is called "other".
function stages(run) {
  const outside = new Set(["time/step", "time/eval", "time/checkpoint"]);
  const mean = (name) => {
    const values = run.metrics[name].filter((value) => value !== null);
    return values.reduce((sum, value) => sum + value, 0) / values.length;
  };
  const parts = Object.keys(run.metrics).filter((name) => name.startsWith("time/") && !outside.has(name));
  const found = parts.map((name) => ({ name: short(name), value: mean(name) })).sort((a, b) => b.value - a.value);
  if (!run.metrics["time/step"]) return found;
  const other = mean("time/step") - found.reduce((sum, part) => sum + part.value, 0);
  return other > 0 ? [...found, { name: "other", value: other }] : found;
}

// The first `texts` columns are text.
function dataTable(head, rows, texts = 1) {
  const cell = (tag) => (value, i) => el(tag, { class: i < texts ? "text" : null }, value);
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      {},
      el("thead", {}, el("tr", {}, head.map(cell("th")))),
      el(
        "tbody",
        {},
        rows.map((row) => el("tr", {}, row.map(cell("td")))),
      ),
    ),
  );
}
