// Draws the report of a retention run: what is recalled by context length and turn, what of the fact is held, and lost answers.

const { report, lost } = data;
const ALL = "all"; // turns
const state = {
  hidden: { policies: new Set(), buckets: new Set() },
  show: "accuracy",
  turn: ALL,
  line: "accuracy",
  sort: { column: null, descending: false },
  listed: AT_ONCE,
};

// What the report says

const place = (policy, budget, bucket, turn) => JSON.stringify([policy, budget, bucket, String(turn)]);
const places = new Map(report.rows.map((row) => [place(row.policy, row.budget, row.bucket, row.turn), row]));
const rowOf = (cell, bucket, turn) => places.get(place(cell.policy, cell.budget, bucket, turn));
const measured = report.cells.filter((cell) => !cell.full && !cell.control);
const policies = () => measured.map((cell) => cell.label);
const buckets = report.buckets.map((bucket) => bucket.name);
const shownBuckets = () => buckets.filter((name) => !state.hidden.buckets.has(name));
const shownCells = () => report.cells.filter((cell) => cell.full || !state.hidden.policies.has(cell.label));
const size = (cell) => (cell.budget?.endsWith("%") ? parseFloat(cell.budget) / 100 : known(cell.budget) ? Number(cell.budget) : null);
const some = (name) => report.rows.some((row) => known(row[name]));
const offered = (all) => Object.fromEntries(Object.entries(all).filter(([name, { needs }]) => some(needs ?? name)));

// The table of cells

const interval = (one) => (known(one.low) ? range(one.low, one.high, percent) : "");
const SHOWS = {
  accuracy: {
    label: "accuracy",
    main: (one) => [one.accuracy, percent],
    under: (one) => (known(one.verdict) ? change(one) : interval(one)),
  },
  difference: {
    label: "difference to full",
    main: (one) => [one.difference, points],
    under: (one) => (known(one.difference) ? `${range(one.difference_low, one.difference_high, points)} ${mark(one)}` : ""),
  },
  survival: {
    label: "fact held",
    main: (one) => [one.survival, percent],
    under: (one) => (known(one.survival_told) ? `the answer in it ${percent(one.survival_told)}` : ""),
  },
  held: {
    label: "cache held",
    main: (one) => [one.held, percent],
    under: (one) => (known(one.read) ? `read ${percent(one.read)}` : ""),
  },
  scorers: {
    label: "other scorers",
    needs: "accuracy_fuzzy",
    main: (one) => [one.accuracy_fuzzy, percent],
    under: (one) => (known(one.accuracy_rank) ? `by rank ${percent(one.accuracy_rank)}` : ""),
  },
};

function columns() {
  const value = (bucket) => (cell) => {
    const one = rowOf(cell, bucket, state.turn);
    return one && SHOWS[state.show].main(one)[0];
  };
  return [
    { name: "Policy", value: (cell) => cell.policy, cell: (cell) => el("th", { scope: "row" }, cell.policy) },
    { name: "Budget", value: size, cell: (cell) => el("td", {}, (!cell.control && cell.budget) || "\u2013") },
    ...shownBuckets().map((name) => ({ name, value: value(name), cell: (cell) => valueCell(cell, name) })),
  ];
}

function valueCell(cell, bucket) {
  const one = rowOf(cell, bucket, state.turn);
  if (!one) return el("td", { class: "none" }, "\u2013");
  const { main, under } = SHOWS[state.show];
  const [value, write] = main(one);
  const judged = known(one.verdict)
    ? [`difference ${points(one.difference)} points`, one.verdict, one.significant ? "significant" : null]
    : [];
  const name = [`${cell.label}, ${bucket}: ${write(value)}`, ...judged.filter(Boolean), "details"].join(", ");
  const click = () => openRow(cell, one);
  const button = el("button", { type: "button", "aria-label": name, click }, write(value), el("small", {}, under(one)));
  const verdict = ["accuracy", "difference"].includes(state.show) ? one.verdict : "";
  return el("td", { class: `value ${verdict ?? ""}` }, button);
}

function drawTable() {
  const all = columns();
  const column = all.find(({ name }) => name === state.sort.column);
  const row = (cell) =>
    el(
      "tr",
      { class: cell.full ? "full" : null, "data-cell": cell.label },
      all.map((each) => each.cell(cell)),
    );
  put("cells", table(all.map(heading), sorted(shownCells(), column, state.sort.descending).map(row)));
}

const tokens = (count) => known(count) && count.toFixed(0);
const when = (turn) => (String(turn) === ALL ? "all turns" : `turn ${turn}`);

function openRow(cell, one) {
  const numbers = {
    queries: one.n,
    correct: one.correct,
    accuracy: withPercent(one.accuracy),
    "95 % interval": range(one.low, one.high, withPercent),
    "difference to full": known(one.difference) && `${points(one.difference)} points`,
    "difference's 95 % interval": range(one.difference_low, one.difference_high, points),
    verdict: one.verdict,
    p: known(one.p) && decimal(one.p),
    "p after Holm": known(one.p_holm) && decimal(one.p_holm),
    "answers lost": one.lost,
    "answers gained": one.gained,
    "accuracy, fuzzy": withPercent(one.accuracy_fuzzy),
    "accuracy, by rank": withPercent(one.accuracy_rank),
    "mean rank of the right answer": known(one.rank) && one.rank.toFixed(1),
    "of the fact held": withPercent(one.survival),
    "of the answer in it held": withPercent(one.survival_told),
    "cache held": withPercent(one.held),
    "cache read": withPercent(one.read),
    "tokens of context, mean": tokens(one.context_tokens),
    "tokens since the fact, mean": tokens(one.distance_tokens),
  };
  const wanted = { policy: cell.label, bucket: one.bucket, turn: String(one.turn) === ALL ? "" : one.turn };
  const lead = { text: "Show what it lost", click: () => choose(wanted) };
  openDetail(`${cell.label}, ${one.bucket}, ${when(one.turn)}`, numbers, one.lost && !cell.control ? lead : null);
}

// Panels: by context length, and for each of these by turn

const LINES = {
  accuracy: { label: "accuracy", of: (row) => [row.accuracy, row.low, row.high] },
  survival: { label: "fact held", of: (row) => [row.survival] },
  survival_told: { label: "answer in it held", of: (row) => [row.survival_told] },
};

// What a cell has at each of some rows, in percent; without an interval, limits that meet.
function curve(rows) {
  return rows
    .filter(([, row]) => row && known(LINES[state.line].of(row)[0]))
    .map(([x, row]) => {
      const [value, low, high] = LINES[state.line].of(row);
      return { x, y: 100 * value, low: 100 * (low ?? value), high: 100 * (high ?? value) };
    });
}

function lengthPanel() {
  const cells = shownCells();
  const names = shownBuckets();
  const shift = (number) => (0.5 * (number + 0.5)) / cells.length - 0.25; // side by side, so that no interval hides another
  const curves = cells.map((cell, number) => [cell, curve(names.map((name, index) => [index + shift(number), rowOf(cell, name, ALL)]))]);
  const scale = { ...scales([-0.3, names.length - 0.7], [0, 100], false), xTicks: [...names.keys()] };
  return picture("by context length", `${LINES[state.line].label} in percent by context length; the numbers are in the table above`, [
    frame(scale, "conversations by length, in tokens", (index) => names[index]),
    curves.map(([cell, spots]) => spots.map((spot) => bar(cell, spot, scale))),
    curves.map(([cell, spots]) => drawCurve(cell, spots, scale)),
  ]);
}

const bar = (cell, { x, low, high }, scale) =>
  svg("path", { class: `bar ${colour(cell)}`, d: `M${scale.x(x)} ${scale.y(low)}V${scale.y(high)}` });

function turnPanel(bucket) {
  const curves = shownCells().map((cell) => [cell, curve(report.turns.map((turn) => [turn, rowOf(cell, bucket, turn)]))]);
  const scale = scales(report.turns, [0, 100], false);
  return picture(bucket, `${bucket}: ${LINES[state.line].label} in percent by turn; the numbers are in the table above`, [
    frame(scale, "turn"),
    curves.map(([cell, spots]) => (cell.control ? [] : drawBand(named(cell), spots, curves.length, scale))),
    curves.map(([cell, spots]) => drawCurve(cell, spots, scale)),
  ]);
}

const named = (cell) => (cell.full ? "full" : cell.label);
const colour = (cell) => (cell.control ? "pfloor" : look(named(cell)));

function drawCurve(cell, spots, { x, y }) {
  if (!spots.length) return [];
  const kind = cell.full ? "full" : cell.control ? "chance" : "line";
  const said = ({ y: value, low, high }) => `${cell.label}: ${value.toFixed(1)} % (${low.toFixed(1)} to ${high.toFixed(1)})`;
  return svg(
    "g",
    { class: colour(cell) },
    svg("path", { class: kind, d: path(spots.map((spot) => [x(spot.x), y(spot.y)])) }),
    spots.map((spot) =>
      svg(
        "g",
        {},
        svg("title", {}, said(spot)),
        cell.control
          ? svg("circle", { class: "mark", cx: x(spot.x), cy: y(spot.y), r: 1.5 })
          : marker(named(cell), x(spot.x), y(spot.y), false),
      ),
    ),
  );
}

function drawLines() {
  const [full] = report.cells;
  const control = shownCells().find((cell) => cell.control);
  put(
    "lines",
    shownCells().filter((cell) => !cell.full && !cell.control).map((cell) => policyKey(cell.label)),
    el("li", {}, sample(stroke("full")), full.label),
    control ? el("li", {}, sample(stroke("chance")), "control: never told, the floor") : [],
    el("li", {}, "bands and bars: 95 % intervals"),
  );
}

// Conversations and scorers

function drawConversations() {
  const kinds = ["whole", "merged", "joined"];
  const row = ({ name, conversations, wanted, making, context }) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, name),
      el("td", {}, conversations < wanted ? `${conversations} of ${wanted}` : conversations),
      kinds.map((kind) => el("td", {}, making[kind] ?? 0)),
      el("td", {}, known(context) ? Math.round(context) : "-"),
    );
  put("making", table(["Context length", "Conversations", "Whole", "Merged", "Joined", "Tokens before a query, mean"].map(th), report.buckets.map(row)));
  const agreement = Object.entries(report.agreement).map(([pair, kappa]) => `Cohen's kappa of ${pair}, over all rows: ${decimal(kappa)}.`);
  const notes = report.buckets.map((bucket) => bucket.note).filter(known);
  put(
    "notes",
    [...notes, ...agreement].map((line) => el("li", {}, line)),
  );
}

// Lost answers

function drawFound() {
  const wanted = Object.fromEntries(new FormData(at("choose")));
  const fits = (one) =>
    (!wanted.policy || wanted.policy === one.label) &&
    (!wanted.bucket || wanted.bucket === one.bucket) &&
    (!wanted.turn || wanted.turn === String(one.turn));
  const found = lost.queries.filter(fits);
  const left = lost.left_out.filter(fits).reduce((sum, one) => sum + one.count, 0);
  const rest = left ? `, and ${left} more that the page leaves out (it holds ${lost.most} of each policy, context length and turn)` : "";
  put("found", `${plural(found.length, "lost answer")}${rest}.`);
  listed(found, lostAnswer);
}

function lostAnswer(one) {
  const summary = [
    el("span", { class: "tag lost" }, "\u25bc lost"),
    el("span", {}, `${one.label}, ${one.bucket}, turn ${one.turn}`),
    el("span", { class: "quiet" }, `${one.kind}; ${known(one.survival) ? `${percent(one.survival, 0)} % of the fact held` : "not known what is held"}`),
  ];
  const rank = (place) => (known(place) ? ` (right answer ranked ${place})` : "");
  const text = lost.texts
    ? [
        ["question", one.question],
        [`${report.cells[0].label}${rank(one.full_rank)}`, one.full],
        [`${one.label}${rank(one.rank)}`, one.answer],
      ]
    : [];
  const pairs = [
    ...text,
    ["accepted", one.accepted ? one.accepted.join(" \u00b7 ") : "\u2013"],
    ["of the fact held", withPercent(one.survival)],
    ["of the answer in it held", withPercent(one.survival_told)],
    ["tokens of context", tokens(one.context_tokens) || "\u2013"],
    ["tokens since the fact", tokens(one.distance_tokens) || "\u2013"],
    ["conversation", `${one.conversation} (${one.making})`],
  ];
  return opening(summary, () => [list(pairs)]);
}

// Where it comes from

function drawHead() {
  const { model, protocol } = report.provenance;
  const asked = `${plural(report.cells.length, "cell")}, asked after turns ${report.turns.join(", ")}`;
  put("about", [`model ${model.name}`, `replies: ${protocol.replies}`, `conversations: ${protocol.source}`, asked].join(" \u00b7 "));
  const missing = report.missing_packs ? [`The run is not finished: ${plural(report.missing_packs, "pack")} missing.`] : [];
  at("unfinished").hidden = !missing.length && !report.notes.length;
  put("unfinished", [...missing, ...report.notes].join(" "));
  put(
    "meaning",
    `Share of queries whose answer contains what was asked for. A policy is ok when the 95 % interval of its difference to ${report.cells[0].label} lies above \u2212${(100 * report.margin).toFixed(1)} points. The control was never told the fact: its rate is the floor.`,
  );
  put("origin", told({ ...report.provenance, ...report.aside }));
}

function draw() {
  drawTable();
  drawLines();
  put("panels", lengthPanel(), shownBuckets().map(turnPanel));
}

function drawOnce() {
  const turns = report.turns.map((turn) => [String(turn), String(turn)]);
  const { turn } = at("view").elements;
  options(turn, [[ALL, "any"], ...turns], ALL);
  turn.onchange = () => {
    state.turn = turn.value;
    draw();
  };
  checks(
    "policies",
    report.cells.filter((cell) => !cell.full).map((cell) => cell.label),
    state.hidden.policies,
  );
  checks("buckets", buckets, state.hidden.buckets);
  radios("shows", offered(SHOWS), "show");
  radios("axes", offered(LINES), "line");
  const asked = at("choose").elements;
  options(asked.policy, anyOf(policies()));
  options(asked.bucket, anyOf(buckets));
  options(asked.turn, anyOf(report.turns));
  at("hidden").hidden = lost.texts;
}

drawHead();
drawVerdicts(
  "all policies and context lengths (of single turns: over all of those)",
  [],
  "in percent and percentage points; choose a value for all of its numbers",
);
drawOnce();
drawConversations();
draw();
drawFound();
