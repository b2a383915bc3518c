// Training curves of all runs on shared plots, and the time of a step by stage.

const SMOOTH_FROM = 60; // steps; a shorter curve is drawn as it is

function trainingTab(runs) {
  const trained = runs.filter((run) => run.steps.length);
  if (!trained.length) return [note("None of the selected runs has metrics.")];
  const charts = report.panels.map((panel) => panelChart(panel, trained)).filter(Boolean);
  return [
    note(
      "One color per run; solid, dashed and dotted lines are the metrics of one plot. " +
        `Curves of more than ${SMOOTH_FROM} steps are running means.`,
    ),
    el("div", { class: "charts" }, charts),
  ];
}

function panelChart(panel, runs) {
  const names = panel.metrics.filter((name) => runs.some((run) => run.metrics[name]));
  if (!names.length) return null;
  const series = runs.flatMap((run) =>
    names.filter((name) => run.metrics[name]).map((name) => metricSeries(panel, run, name, names, runs.length > 1)),
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

// With several runs, color tells the run and dashes the metric; with one run, color tells the metric.
function metricSeries(panel, run, name, names, severalRuns) {
  const number = names.indexOf(name);
  const runName = severalRuns ? run.name : "";
  const metricName = names.length > 1 || !severalRuns ? shortName(name) : "";
  const points = run.steps.map((step, i) => [step, plotted(run.metrics[name][i], panel.style)]);
  return {
    name: [runName, metricName].filter(Boolean).join(" "),
    color: severalRuns ? color(run) : `var(--s${number % 8})`,
    dash: severalRuns ? DASHES[number % DASHES.length] : "",
    points: smooth(points),
  };
}

function shortName(metric) {
  return metric.split("/").slice(1).join("/").replaceAll("_", " ");
}

// A logarithmic panel shows absolute values.
function plotted(value, style) {
  return value === null || style !== "log" ? value : Math.abs(value);
}

function smooth(points) {
  const present = points.filter(([, y]) => y !== null);
  if (present.length <= SMOOTH_FROM) return present;
  const reach = Math.max(2, Math.floor(present.length / 40));
  return present.map(([x], i) => {
    const window = present.slice(Math.max(0, i - reach), i + reach + 1);
    return [x, window.reduce((sum, [, y]) => sum + y, 0) / window.length];
  });
}

function timeTab(runs) {
  const timed = runs.filter((run) => Object.keys(run.metrics).some((name) => name.startsWith("time/")));
  if (!timed.length) return [note("None of the selected runs has times.")];
  const rows = timed.map((run) => ({ name: run.name, parts: stages(run) }));
  const panel = { title: "Step time", unit: "seconds", style: "line", metrics: ["time/step"] };
  return [
    note(
      "Mean seconds of a step by stage, on the slowest rank. Evaluations and checkpoints happen outside of steps and " +
        "are not counted.",
    ),
    el(
      "div",
      { class: "charts" },
      stackedBars({ title: "Time of a step by stage", unit: "seconds", rows }),
      panelChart(panel, timed),
    ),
    el("h2", {}, "Stages"),
    dataTable(["run", "stage", "seconds", "share"], rows.flatMap(stageRows), 2),
  ];
}

// Stages of the mean step, the longest first; what no stage accounts for is called "other".
function stages(run) {
  const outside = new Set(["time/step", "time/eval", "time/checkpoint"]);
  const mean = (name) => {
    const values = run.metrics[name].filter((value) => value !== null);
    return values.reduce((sum, value) => sum + value, 0) / values.length;
  };
  const names = Object.keys(run.metrics).filter((name) => name.startsWith("time/") && !outside.has(name));
  const parts = names.map((name) => ({ name: shortName(name), value: mean(name) })).sort((a, b) => b.value - a.value);
  if (!run.metrics["time/step"]) return parts;
  const other = mean("time/step") - parts.reduce((sum, part) => sum + part.value, 0);
  return other > 0 ? [...parts, { name: "other", value: other }] : parts;
}

// Table rows of one run's stages; the run is named in the first row only.
function stageRows({ name, parts }) {
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  return parts.map((part, i) => [
    i ? "" : name,
    part.name,
    formatNumber(part.value),
    formatPercent(part.value / total),
  ]);
}
