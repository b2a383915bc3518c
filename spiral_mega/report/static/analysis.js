// The analysis of traces: over training, and of evaluations.

const AGGREGATION_CASES = [
  "none_right",
  "minority_right",
  "half_right",
  "majority_right",
  "breaks_majority",
  "all_right",
  "plurality_wrong",
];
const VERIFICATION = ["right_choice", "chance", "accepts_right", "rejects_wrong", "novel", "novel_right"];
const DIVERSITY = ["answered", "answers", "answer_entropy", "distinct_ngrams", "ngram_entropy", "distance", "length"];

function analysisTab(runs) {
  const analyzed = runs.filter((run) => run.analysis);
  if (!analyzed.length)
    return [
      note(
        "None of the selected runs was analyzed: run spiral-mega analyze. The analyses of evaluations are under Evaluation.",
      ),
    ];
  const diversity = (level, quantity) => (point) => point.diversity.find((each) => each.level === level)?.[quantity];
  const plots = [
    ["Distinct answers per problem, search", diversity("search", "answers")],
    ["Distinct answers per problem, aggregation", diversity("aggregation 1", "answers")],
    ["Entropy of the answers, search (nats)", diversity("search", "answer_entropy")],
    ["Entropy of the answers, aggregation (nats)", diversity("aggregation 1", "answer_entropy")],
    ["Distance between search traces", diversity("search", "distance")],
    ["Distance between aggregation traces", diversity("aggregation 1", "distance")],
    ["Token entropy, search (nats)", (point) => point.entropy[0]?.entropy],
    ["Token entropy, aggregation (nats)", (point) => point.entropy[1]?.entropy],
    ["Success where a minority of the set is right", (point) => point.aggregation.minority_right, true],
    ["Success where a majority of the set is right", (point) => point.aggregation.majority_right, true],
    ["Success where no member is right", (point) => point.aggregation.none_right, true],
    ["Choices that are right", (point) => point.verification.right_choice, true],
  ];
  return [
    note(
      "Over training, in spans of steps, with 95 % bootstrap intervals over problems. The number of answers and their " +
        "entropy grow with the number of traces per problem; distance and token entropy do not.",
    ),
    el(
      "div",
      { class: "charts" },
      plots.map(([title, quantity, percent]) => trendChart(analyzed, title, quantity, percent)),
    ),
  ];
}

function trendChart(runs, title, quantity, percent = false) {
  const series = runs.map((run) => ({
    name: run.name,
    color: color(run),
    points: run.analysis.points
      .map((point) => ({ step: point.last, estimate: quantity(point) }))
      .filter(({ estimate }) => estimate)
      .map(({ step, estimate }) => [step, estimate.value, ...estimate.interval]),
  }));
  return lineChart({ title, xLabel: "step", series, percent });
}

// The analyses of evaluations, each by sampling: the samples that one or more harnesses share.
function evaluationAnalysis(evaluations) {
  const all = evaluations.flatMap((evaluation) =>
    Object.entries(evaluation.analysis).map(([sampling, analysis]) => ({
      label: evaluation.label,
      run: evaluation.run,
      sampling,
      analysis,
    })),
  );
  if (!all.length) return [note("There is no analysis.json next to the results.")];
  const aggregated = all.filter(({ analysis }) => analysis.aggregation.by_right.length);
  return [
    ...(aggregated.length ? aggregationSections(aggregated) : []),
    collapsed("Diversity by sampling and level", diversityTable(all)),
    collapsed("Tokens by difficulty: the share of a problem's search traces that are right", tokensTable(all)),
  ];
}

function aggregationSections(aggregated) {
  return [
    el("div", { class: "charts" }, successChart(aggregated), difficultyChart(aggregated)),
    el("h2", {}, "Success of aggregation by the members of the set"),
    dataTable(
      ["model", "samples", ...AGGREGATION_CASES.map(asWords)],
      aggregated.map(({ label, sampling, analysis }) => [
        label,
        sampling,
        ...AGGREGATION_CASES.map((name) => estimateCell(analysis.aggregation[name], true)),
      ]),
      2,
    ),
    el("h2", {}, "Verification: how well choices tell right members from wrong ones"),
    dataTable(
      ["model", "samples", "balanced accuracy", "of a random choice", ...VERIFICATION.map(asWords)],
      aggregated.map(({ label, sampling, analysis }) => [
        label,
        sampling,
        formatPercent(analysis.verification.balanced_accuracy),
        formatPercent(analysis.verification.chance_balanced_accuracy),
        ...VERIFICATION.map((name) => estimateCell(analysis.verification[name], true)),
      ]),
      2,
    ),
  ];
}

function successChart(aggregated) {
  const series = aggregated.map(({ label, run, sampling, analysis }, i) => ({
    name: aggregated.length > 1 ? `${label} ${sampling}` : label,
    color: color(run),
    dash: DASHES[i % DASHES.length],
    points: analysis.aggregation.by_right
      .filter((each) => each.interval)
      .map((each) => [each.right, each.value, ...each.interval]),
  }));
  return lineChart({ title: "Success of aggregation", xLabel: "right members of the set", series, percent: true });
}

// Mean tokens by solve rate: solid for search, dashed for the first aggregation.
function difficultyChart(aggregated) {
  const series = aggregated.flatMap(({ label, run, analysis }) =>
    [0, 1].map((level) => ({
      name: `${label} ${level ? "aggregation" : "search"}`,
      color: color(run),
      dash: DASHES[level],
      points: analysis.tokens
        .filter((bin) => bin.levels[level]?.tokens)
        .map((bin) => [bin.solve_rate.value, bin.levels[level].tokens.value, ...bin.levels[level].tokens.interval]),
    })),
  );
  return lineChart({
    title: "Tokens by difficulty",
    unit: "tokens per trace",
    xLabel: "share of search traces that are right",
    series,
  });
}

function diversityTable(all) {
  const rows = all.flatMap(({ label, sampling, analysis }) =>
    analysis.diversity.map((level, i) => [
      label,
      sampling,
      level.level,
      ...DIVERSITY.map((name) => estimateCell(level[name])),
      estimateCell(analysis.entropy[i]?.entropy),
    ]),
  );
  return dataTable(["model", "samples", "level", ...DIVERSITY.map(asWords), "token entropy"], rows, 3);
}

function tokensTable(all) {
  const rows = all.flatMap(({ label, sampling, analysis }) =>
    analysis.tokens.flatMap((bin) =>
      bin.levels.map((level) => [
        label,
        sampling,
        bin.solved,
        String(bin.problems),
        level.level,
        estimateCell(level.tokens),
        estimateCell(level.right),
        estimateCell(level.wrong),
        estimateCell(level.truncated, true),
      ]),
    ),
  );
  const head = ["model", "samples", "share right", "problems", "level"];
  return dataTable([...head, "tokens", "tokens if right", "tokens if wrong", "truncated"], rows, 3);
}

function collapsed(title, table) {
  return el("details", {}, el("summary", {}, title), table);
}

function asWords(name) {
  return name.replaceAll("_", " ");
}

function estimateCell(estimate, percent = false) {
  return estimate ? withInterval(estimate.value, estimate.interval, percent) : "–";
}
