// Evaluations: the paper's plots of test-time compute, and every measure in a table.
//
// An evaluation is {run, label, measures, analysis}; a measure {harness, metric, axis, x, mean, interval, tokens, ...}.

const TOKEN_CATEGORIES = ["prompt", "generated", "cached"];

function evaluationTab(runs) {
  const evaluations = runs.flatMap((run) =>
    run.evaluations.map((evaluation) => ({ run, ...evaluation, label: evaluationLabel(run, evaluation) })),
  );
  if (!evaluations.length) return [note("None of the selected runs was evaluated: run spiral-mega eval.")];
  const plots = [
    measureChart(evaluations, {
      title: "Parallel compute: pass@k",
      metric: "pass",
      axis: "k",
      xLabel: "k responses",
      logX: true,
    }),
    measureChart(evaluations, {
      title: "Parallel and aggregative compute: recursive self-aggregation",
      metric: "mean",
      axis: "step",
      xLabel: "aggregation step",
    }),
    measureChart(evaluations, {
      title: "Sequential compute",
      metric: "mean",
      axis: "budget",
      xLabel: "token limit of a response",
      logX: true,
    }),
    votingChart(evaluations),
    tokensChart(evaluations, {
      title: "Accuracy by generated tokens",
      xLabel: "generated tokens per problem",
      tokens: (measure) => measure.tokens.generated,
    }),
    tokensChart(evaluations, {
      title: "Accuracy by token budget",
      xLabel: "token budget per problem",
      tokens: (measure) => measure.budget,
    }),
  ];
  return [
    note(
      "Means over problems; bands and small print are 95 % bootstrap intervals over problems. pass@k, majority and best " +
        "of k (picked by an oracle) are exact expectations over subsets of the samples.",
    ),
    el("div", { class: "charts" }, plots.filter(Boolean)),
    el("h2", {}, "All measures"),
    measureTable(evaluations),
    ...scalingEfficiency(evaluations),
    el("h2", {}, "Analysis of the traces"),
    ...evaluationAnalysis(evaluations),
  ];
}

function evaluationLabel(run, evaluation) {
  return evaluation.name ? `${run.name} ${evaluation.name}` : run.name;
}

function axisPoint(measure) {
  return [measure.x, measure.mean, ...measure.interval];
}

// One line for each harness of each evaluation: `chosen` selects the measures, `point` places them.
function harnessSeries(evaluations, chosen, point) {
  const oneEach = new Set(evaluations.map((evaluation) => evaluation.run)).size === evaluations.length;
  return evaluations.flatMap((evaluation, number) => {
    const byHarness = new Map();
    for (const measure of evaluation.measures.filter(chosen)) {
      if (!byHarness.has(measure.harness)) byHarness.set(measure.harness, []);
      byHarness.get(measure.harness).push(point(measure));
    }
    return [...byHarness].map(([harness, points], i) => ({
      name: byHarness.size > 1 ? `${evaluation.label} ${harness}` : evaluation.label,
      color: color({ index: oneEach ? evaluation.run.index : number }),
      dash: DASHES[i % DASHES.length],
      points: points.sort((a, b) => a[0] - b[0]),
    }));
  });
}

// A declared pipeline gives one measure: a point of the plots by tokens, not a curve over steps.
function isPipeline(evaluations, measure) {
  return evaluations.every(({ measures }) => measures.filter((each) => each.harness === measure.harness).length < 2);
}

function isAggregationMean(evaluations, measure) {
  return measure.axis === "step" && measure.metric === "mean" && !isPipeline(evaluations, measure);
}

function measureChart(evaluations, { title, metric, axis, xLabel, logX }) {
  const chosen = (measure) =>
    measure.metric === metric && measure.axis === axis && !(axis === "step" && isPipeline(evaluations, measure));
  const series = harnessSeries(evaluations, chosen, axisPoint);
  return series.length ? lineChart({ title, xLabel, series, logX, percent: true }) : null;
}

// Majority of k responses, and the last step of self-aggregation at the same number of parallel responses.
function votingChart(evaluations) {
  const isMajority = (measure) => measure.metric === "majority" && measure.axis === "k";
  const votes = harnessSeries(evaluations, isMajority, axisPoint);
  if (!votes.length) return null;
  const series = [...votes.map((line) => ({ ...line, name: `${line.name} majority` })), ...lastSteps(evaluations)];
  return lineChart({
    title: "Rule-based and model-based aggregation: majority and self-aggregation",
    xLabel: "parallel responses",
    series,
    logX: true,
    percent: true,
  });
}

// The last step of each self-aggregation, as lines of one point.
function lastSteps(evaluations) {
  const last = new Map();
  for (const evaluation of evaluations)
    for (const measure of evaluation.measures.filter((each) => isAggregationMean(evaluations, each))) {
      const name = `${evaluation.label} ${measure.harness}`;
      const earlier = last.get(name);
      if (!earlier || earlier.measure.x <= measure.x) last.set(name, { evaluation, measure });
    }
  return [...last].map(([name, { evaluation, measure }]) => ({
    name: `${name}, step ${measure.x}`,
    color: color(evaluation.run),
    dash: "1 4",
    points: measure.parallel ? [[measure.parallel, measure.mean, ...measure.interval]] : [],
  }));
}

function tokensChart(evaluations, { title, xLabel, tokens }) {
  const methods = [
    ["sequential", (measure) => measure.axis === "budget"],
    ["majority", (measure) => measure.axis === "k" && measure.metric === "majority"],
    ["self-aggregation", (measure) => isAggregationMean(evaluations, measure)],
    ["pipeline", (measure) => measure.axis === "step" && isPipeline(evaluations, measure)],
  ];
  const point = (measure) => [tokens(measure), measure.mean, ...measure.interval];
  const series = methods.flatMap(([method, chosen], i) =>
    harnessSeries(evaluations, chosen, point).map((line) => ({
      ...line,
      name: `${line.name} ${method}`,
      dash: DASHES[i],
    })),
  );
  return series.length ? lineChart({ title, xLabel, series, logX: true, percent: true }) : null;
}

// A row for each measure, a column for each evaluation; tokens of several evaluations are separated by dots.
function measureTable(evaluations) {
  const rows = new Map();
  for (const evaluation of evaluations)
    for (const measure of evaluation.measures) {
      const key = `${measure.harness}|${measure.metric}|${measure.axis}|${measure.x}`;
      if (!rows.has(key)) rows.set(key, { measure, byEvaluation: new Map() });
      rows.get(key).byEvaluation.set(evaluation, measure);
    }
  const labels = evaluations.map((evaluation) => evaluation.label);
  const head = ["harness", "metric", "at", ...labels, ...TOKEN_CATEGORIES.map((category) => `${category} tokens`)];
  const body = [...rows.values()].map(({ measure, byEvaluation }) => {
    const spent = [...byEvaluation.values()].map((each) => each.tokens);
    return [
      measure.harness,
      measure.metric,
      `${measure.axis} ${formatNumber(measure.x)}`,
      ...evaluations.map((evaluation) => meanCell(byEvaluation.get(evaluation))),
      ...TOKEN_CATEGORIES.map((category) => spent.map((tokens) => formatNumber(tokens[category])).join(" · ")),
    ];
  });
  return dataTable(head, body, 3);
}

function meanCell(measure) {
  return measure ? withInterval(measure.mean, measure.interval, true) : "–";
}

// How many times fewer responses one model needs for the pass@k of another.
function scalingEfficiency(evaluations) {
  const rows = [];
  for (const ours of evaluations)
    for (const theirs of evaluations) {
      const largest = ours === theirs ? null : largestFactor(passMeasures(ours), passMeasures(theirs));
      if (largest && largest.factor > 1)
        rows.push([ours.label, theirs.label, `${largest.factor.toFixed(1)} ×`, `k = ${largest.k}`]);
    }
  if (!rows.length) return [];
  return [
    el("h2", {}, "Scaling efficiency"),
    note(
      "The largest factor by which the first model needs fewer responses to reach the pass@k that the second has at k. " +
        "Point estimates: the bands above show their uncertainty.",
    ),
    dataTable(["model", "compared with", "factor", "at"], rows, 2),
  ];
}

function passMeasures({ measures }) {
  return measures.filter((measure) => measure.metric === "pass" && measure.axis === "k");
}

function largestFactor(ours, theirs) {
  if (!ours.length || !theirs.length) return null;
  const factors = theirs
    .map((measure) => ({ k: measure.x, factor: measure.x / responsesNeeded(ours, measure.mean) }))
    .filter(({ factor }) => Number.isFinite(factor));
  return factors.reduce((best, each) => (best && best.factor >= each.factor ? best : each), null);
}

// The k at which pass@k reaches `level`, interpolated on log k; NaN where it never does.
function responsesNeeded(measures, level) {
  const points = [...measures].sort((a, b) => a.x - b.x);
  if (points[0].mean >= level) return points[0].x;
  for (let i = 1; i < points.length; i++) {
    if (points[i].mean < level) continue;
    const share = (level - points[i - 1].mean) / (points[i].mean - points[i - 1].mean);
    return points[i - 1].x * (points[i].x / points[i - 1].x) ** share;
  }
  return NaN;
}
