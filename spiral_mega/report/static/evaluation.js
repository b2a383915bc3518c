// Evaluations: the paper's plots of test-time compute, and every measure in a table.

function evaluationTab(runs) {
  const evaluated = runs.flatMap((run) =>
    run.evaluations.map((evaluation) => ({ run, ...evaluation, label: evaluationLabel(run, evaluation) })),
  );
  if (!evaluated.length)
    return [el("p", { class: "note" }, "No run that is shown was evaluated: see spiral-mega eval.")];
  const plots = [
    measureChart(evaluated, {
      title: "Parallel compute: pass@k",
      of: "pass",
      axis: "k",
      xLabel: "k responses",
      logX: true,
    }),
    measureChart(evaluated, {
      title: "Parallel and aggregative: recursive self-aggregation",
      of: "mean",
      axis: "step",
      xLabel: "aggregation step",
    }),
    measureChart(evaluated, {
      title: "Sequential compute",
      of: "mean",
      axis: "budget",
      xLabel: "tokens a response may have",
      logX: true,
    }),
    votingChart(evaluated),
    tokensChart(evaluated, {
      title: "Accuracy against tokens generated",
      xLabel: "tokens generated a problem",
      tokens: (measure) => measure.tokens.generated,
    }),
    tokensChart(evaluated, {
      title: "Accuracy against the token budget",
      xLabel: "token budget of a problem",
      tokens: (measure) => measure.budget,
    }),
  ];
  return [
    el(
      "p",
      { class: "note" },
      "Means over problems; bands and brackets are 95 % bootstrap intervals over problems. pass@k, majority and the oracle's best are exact expectations over subsets of the samples.",
    ),
    el("div", { class: "charts" }, plots.filter(Boolean)),
    el("h2", {}, "Every measure"),
    measureTable(evaluated),
    ...efficiency(evaluated),
    el("h2", {}, "What the traces tell"),
    ...analysisOf(evaluated),
  ];
}

function evaluationLabel(run, evaluation) {
  return evaluation.name ? `${run.name} ${evaluation.name}` : run.name;
}

function curve(measure) {
  return [measure.x, measure.mean, ...measure.interval];
}

function harnessSeries(evaluated, chosen, point) {
  return evaluated.flatMap((evaluation, number) => {
    const found = new Map();
    for (const measure of evaluation.measures.filter(chosen)) {
      if (!found.has(measure.harness)) found.set(measure.harness, []);
      found.get(measure.harness).push(point(measure));
    }
    return [...found].map(([harness, points], i) => ({
      name: found.size > 1 ? `${evaluation.label} ${harness}` : evaluation.label,
      color: color({ index: evaluated.length === runsOf(evaluated) ? evaluation.run.index : number }),
      dash: DASHES[i % DASHES.length],
      points: points.sort((a, b) => a[0] - b[0]),
    }));
  });
}

function runsOf(evaluated) {
  return new Set(evaluated.map((evaluation) => evaluation.run)).size;
}

function measureChart(evaluated, { title, of, axis, xLabel, logX }) {
  const chosen = (measure) =>
    measure.metric === of && measure.axis === axis && !(axis === "step" && lone(evaluated, measure));
  const series = harnessSeries(evaluated, chosen, curve);
  return series.length ? lineChart({ title, xLabel, series, logX, percent: true }) : null;
}

// A declared pipeline gives one measure: a point of the plots over tokens, not a curve over steps.
function lone(evaluated, measure) {
  return evaluated.every(({ measures }) => measures.filter((each) => each.harness === measure.harness).length < 2);
}

function votingChart(evaluated) {
  const votes = harnessSeries(evaluated, (measure) => measure.metric === "majority" && measure.axis === "k", curve);
  const populations = new Map();
  for (const evaluation of evaluated)
    for (const measure of evaluation.measures.filter(
      (each) => each.axis === "step" && each.metric === "mean" && !lone(evaluated, each),
    ))
      populations.set(`${evaluation.label} ${measure.harness}`, {
        evaluation,
        measure: laterStep(populations.get(`${evaluation.label} ${measure.harness}`), measure),
      });
  const aggregated = [...populations].map(([name, { evaluation, measure }]) => ({
    name: `${name}, step ${measure.x}`,
    color: color(evaluation.run),
    dash: "1 4",
    points: [[measure.parallel, measure.mean, ...measure.interval]].filter(([x]) => x),
  }));
  if (!votes.length) return null;
  return lineChart({
    title: "Rule-based against model-based: majority and self-aggregation",
    xLabel: "parallel responses",
    series: [...votes.map((line) => ({ ...line, name: `${line.name} majority` })), ...aggregated],
    logX: true,
    percent: true,
  });
}

function laterStep(earlier, measure) {
  return earlier && earlier.measure.x > measure.x ? earlier.measure : measure;
}

function tokensChart(evaluated, { title, xLabel, tokens }) {
  const kinds = [
    ["sequential", (measure) => measure.axis === "budget"],
    ["majority", (measure) => measure.axis === "k" && measure.metric === "majority"],
    [
      "self-aggregation",
      (measure) => measure.axis === "step" && measure.metric === "mean" && !lone(evaluated, measure),
    ],
    ["pipeline", (measure) => measure.axis === "step" && lone(evaluated, measure)],
  ];
  const series = kinds.flatMap(([kind, chosen], i) =>
    harnessSeries(evaluated, chosen, (measure) => [tokens(measure), measure.mean, ...measure.interval]).map((line) => ({
      ...line,
      name: `${line.name} ${kind}`,
      dash: DASHES[i],
    })),
  );
  return series.length ? lineChart({ title, xLabel, series, logX: true, percent: true }) : null;
}

function measureTable(evaluated) {
  const rows = new Map();
  for (const evaluation of evaluated)
    for (const measure of evaluation.measures) {
      const key = `${measure.harness}|${measure.metric}|${measure.axis}|${measure.x}`;
      if (!rows.has(key)) rows.set(key, { measure, cells: new Map() });
      rows.get(key).cells.set(evaluation, measure);
    }
  const head = [
    "harness",
    "metric",
    "at",
    ...evaluated.map((evaluation) => evaluation.label),
    "prompt",
    "generated",
    "cached",
  ];
  const body = [...rows.values()].map(({ measure, cells }) => {
    const spent = [...cells.values()].map((each) => each.tokens);
    const tokens = ["prompt", "generated", "cached"].map((kind) =>
      spent.map((each) => formatNumber(each[kind])).join(" · "),
    );
    return [
      measure.harness,
      measure.metric,
      `${measure.axis} ${formatNumber(measure.x)}`,
      ...evaluated.map((evaluation) => withInterval(cells.get(evaluation))),
      ...tokens,
    ];
  });
  return dataTable(head, body, 3);
}

function withInterval(measure) {
  if (!measure) return "–";
  return el(
    "span",
    {},
    formatPercent(measure.mean),
    " ",
    el("small", {}, `${(100 * measure.interval[0]).toFixed(1)} to ${(100 * measure.interval[1]).toFixed(1)}`),
  );
}

// How many times fewer responses one model needs for the pass@k of another: interpolated on log k, where both reach it.
function efficiency(evaluated) {
  if (evaluated.length < 2) return [];
  const rows = [];
  for (const ours of evaluated)
    for (const theirs of evaluated) {
      const [a, b] = [ours, theirs].map(({ measures }) =>
        measures.filter((each) => each.metric === "pass" && each.axis === "k"),
      );
      if (ours === theirs || !a.length || !b.length) continue;
      const factors = b
        .map((each) => ({ k: each.x, factor: each.x / reached(a, each.mean) }))
        .filter(({ factor }) => Number.isFinite(factor));
      const largest = factors.reduce((best, each) => (best && best.factor >= each.factor ? best : each), null);
      if (largest && largest.factor > 1)
        rows.push([ours.label, theirs.label, `${largest.factor.toFixed(1)} ×`, `k = ${largest.k}`]);
    }
  if (!rows.length) return [];
  return [
    el("h2", {}, "Scaling efficiency"),
    el(
      "p",
      { class: "note" },
      "The largest factor by which the first model needs fewer responses for the pass@k that the second has at k. Point estimates: see the bands above for how sure they are.",
    ),
    dataTable(["model", "against", "factor", "at"], rows, 2),
  ];
}

function reached(measures, level) {
  const points = [...measures].sort((a, b) => a.x - b.x);
  if (points[0].mean >= level) return points[0].x;
  for (let i = 1; i < points.length; i++) {
    if (points[i].mean < level) continue;
    const share = (level - points[i - 1].mean) / (points[i].mean - points[i - 1].mean);
    return points[i - 1].x * (points[i].x / points[i - 1].x) ** share;
  }
  return NaN;
}
