// What the analysis found: over training, and in evaluations.

function analysisTab(runs) {
  const analysed = runs.filter((run) => run.analysis);
  if (!analysed.length)
    return [
      el(
        "p",
        { class: "note" },
        "No run that is shown was analysed: see spiral-mega analyze. Evaluations' analyses are under Evaluation.",
      ),
    ];
  const level = (name, figure) => (point) => point.diversity.find((each) => each.level === name)?.[figure];
  const plots = [
    ["Answers a problem gets, search", level("search", "answers")],
    ["Answers a problem gets, aggregation", level("aggregation 1", "answers")],
    ["Entropy of the answers, search (nats)", level("search", "answer_entropy")],
    ["Entropy of the answers, aggregation (nats)", level("aggregation 1", "answer_entropy")],
    ["Distance between search traces", level("search", "distance")],
    ["Distance between aggregation traces", level("aggregation 1", "distance")],
    ["Token entropy, search (nats)", (point) => point.entropy[0]?.entropy],
    ["Token entropy, aggregation (nats)", (point) => point.entropy[1]?.entropy],
    ["Recovers a right minority", (point) => point.aggregation.minority_right, true],
    ["Keeps a right majority", (point) => point.aggregation.majority_right, true],
    ["Succeeds where none is right", (point) => point.aggregation.none_right, true],
    ["Chooses a right member", (point) => point.verification.right_choice, true],
  ];
  return [
    el(
      "p",
      { class: "note" },
      "Over training, in spans of steps, with 95 % bootstrap intervals over problems. Numbers of answers and their entropy grow with the traces that a problem gets; distance and token entropy do not.",
    ),
    el(
      "div",
      { class: "charts" },
      plots.map(([title, figure, percent]) => trendChart(analysed, title, figure, percent)),
    ),
  ];
}

function trendChart(runs, title, figure, percent = false) {
  const series = runs.map((run) => ({
    name: run.name,
    color: color(run),
    points: run.analysis.points
      .map((point) => [point.last, figure(point)])
      .filter(([, found]) => found)
      .map(([step, found]) => [step, found.value, ...found.interval]),
  }));
  return lineChart({ title, xLabel: "step", series, percent });
}

function analysisOf(evaluated) {
  const all = evaluated.flatMap((evaluation) =>
    Object.entries(evaluation.analysis).map(([sampling, found]) => ({
      label: evaluation.label,
      run: evaluation.run,
      sampling,
      found,
    })),
  );
  if (!all.length) return [el("p", { class: "note" }, "There is no analysis beside the results.")];
  const aggregated = all.filter(({ found }) => found.aggregation.by_right.length);
  const cases = [
    "none_right",
    "minority_right",
    "half_right",
    "majority_right",
    "breaks_majority",
    "all_right",
    "plurality_wrong",
  ];
  const skills = ["right_choice", "chance", "accepts_right", "rejects_wrong", "novel", "novel_right"];
  const figures = ["answered", "answers", "answer_entropy", "distinct_ngrams", "ngram_entropy", "distance", "length"];
  const sections = [
    folded(
      "Diversity, by sampling and level",
      dataTable(
        ["model", "samples", "level", ...figures.map(words), "token entropy"],
        all.flatMap(({ label, sampling, found }) =>
          found.diversity.map((level, i) => [
            label,
            sampling,
            level.level,
            ...figures.map((name) => ranged(level[name])),
            ranged(found.entropy[i]?.entropy),
          ]),
        ),
        3,
      ),
    ),
    folded(
      "Where tokens go, by the share of a problem's search traces that are right",
      dataTable(
        ["model", "samples", "solved by", "problems", "level", "tokens", "of right", "of wrong", "truncated"],
        all.flatMap(({ label, sampling, found }) =>
          found.tokens.flatMap((bin) =>
            bin.levels.map((level) => [
              label,
              sampling,
              bin.solved,
              String(bin.problems),
              level.level,
              ranged(level.tokens),
              ranged(level.right),
              ranged(level.wrong),
              ranged(level.truncated, true),
            ]),
          ),
        ),
        3,
      ),
    ),
  ];
  if (!aggregated.length) return sections;
  const series = aggregated.map(({ label, run, sampling, found }, i) => ({
    name: `${label} ${aggregated.length > 1 ? sampling : ""}`.trim(),
    color: color(run),
    dash: DASHES[i % DASHES.length],
    points: found.aggregation.by_right
      .filter((each) => each.interval)
      .map((each) => [each.right, each.value, ...each.interval]),
  }));
  return [
    el(
      "div",
      { class: "charts" },
      lineChart({ title: "Success of aggregation", xLabel: "right members of the set", series, percent: true }),
      difficultyChart(aggregated),
    ),
    el("h2", {}, "What aggregation makes of a set"),
    dataTable(
      ["model", "samples", ...cases.map(words)],
      aggregated.map(({ label, sampling, found }) => [
        label,
        sampling,
        ...cases.map((name) => ranged(found.aggregation[name], true)),
      ]),
      2,
    ),
    el("h2", {}, "Verification skill, from its choices"),
    dataTable(
      ["model", "samples", "balanced accuracy", "by chance", ...skills.map(words)],
      aggregated.map(({ label, sampling, found }) => [
        label,
        sampling,
        formatPercent(found.verification.balanced_accuracy),
        formatPercent(found.verification.chance_balanced_accuracy),
        ...skills.map((name) => ranged(found.verification[name], true)),
      ]),
      2,
    ),
    ...sections,
  ];
}

// Mean tokens by solve rate: solid for search, dashed for what aggregation adds at its first level.
function difficultyChart(aggregated) {
  const series = aggregated.flatMap(({ label, run, found }) =>
    [0, 1].map((level) => ({
      name: `${label} ${level ? "aggregation" : "search"}`,
      color: color(run),
      dash: DASHES[level],
      points: found.tokens
        .filter((bin) => bin.levels[level]?.tokens)
        .map((bin) => [bin.solve_rate.value, bin.levels[level].tokens.value, ...bin.levels[level].tokens.interval]),
    })),
  );
  return lineChart({
    title: "Tokens by difficulty",
    unit: "tokens of a trace",
    xLabel: "share of search traces that are right",
    series,
  });
}

function folded(title, table) {
  return el("details", {}, el("summary", {}, title), table);
}

function words(name) {
  return name.replaceAll("_", " ");
}

function ranged(found, percent = false) {
  if (!found) return "–";
  const [low, high] = found.interval.map((value) => (percent ? (100 * value).toFixed(1) : formatNumber(value)));
  return el(
    "span",
    {},
    percent ? formatPercent(found.value) : formatNumber(found.value),
    " ",
    el("small", {}, `${low} to ${high}`),
  );
}
