// Draws the report of a sweep: smallest budgets, accuracy, curves, Pareto fronts, and documents whose answer a policy flipped.

const { report, flips } = data;
const state = {
  group: report.groups[0],
  hidden: { policies: new Set(), tasks: new Set() },
  show: "accuracy",
  axis: "budget",
  sort: { column: null, descending: false },
  listed: AT_ONCE,
};

// What the report says

const policies = () => unique(state.group.cells.filter((cell) => !cell.full).map((cell) => cell.policy));
const tasks = () => state.group.tasks.map((task) => task.name);
const shownPolicies = () => policies().filter((name) => !state.hidden.policies.has(name));
const shownTasks = () => tasks().filter((name) => !state.hidden.tasks.has(name));
const shownCells = () => state.group.cells.filter((cell) => cell.full || !state.hidden.policies.has(cell.policy));
const entry = (cell, column) => (column === "mean" ? { ...cell, ...cell.mean } : cell.tasks[column]);
const size = (cell) => cell.share ?? Number(cell.budget); // shares are at most 1, tokens at least 1
const hardlyActed = (cell, column) => (column === "mean" ? cell.greyed : cell.tasks[column].acted < 0.5 && cell.share !== 1);
const limits = (cell, column) => {
  const { accuracy, low, high, stderr } = entry(cell, column);
  if (known(low) && known(high)) return [low, high];
  return known(stderr) ? [accuracy - 1.96 * stderr, accuracy + 1.96 * stderr] : [accuracy, accuracy];
};

// Models and protocols

function drawGroups() {
  const models = unique(report.groups.map((group) => group.model));
  const protocols = unique(report.groups.map((group) => group.protocol));
  const { model, protocol } = at("filters").elements;
  options(
    model,
    models.map((name) => [name, name]),
    state.group.model,
  );
  options(
    protocol,
    protocols.map((name) => [name, name]),
    state.group.protocol,
  );
  const pick = (changed) => () => {
    const exact = report.groups.find((group) => group.model === model.value && group.protocol === protocol.value);
    regroup(exact ?? report.groups.find((group) => group[changed] === at("filters").elements[changed].value));
  };
  model.onchange = pick("model");
  protocol.onchange = pick("protocol");
  at("models").hidden = models.length < 2;
  at("protocols").hidden = protocols.length < 2;
}

function regroup(group) {
  Object.assign(state, { group, hidden: { policies: new Set(), tasks: new Set() }, listed: AT_ONCE });
  state.sort = { column: null, descending: false };
  drawGroups();
  checks("policies", policies(), state.hidden.policies);
  checks("tasks", tasks(), state.hidden.tasks);
  drawChooser();
  draw();
}

// The smallest budgets

function drawKnees() {
  const columns = ["mean", ...shownTasks()];
  const found = (policy, task) => state.group.knees.find((knee) => knee.policy === policy && knee.task === task);
  put(
    "meaning",
    `A cell is ok when the 95 % interval of its difference to the full cache lies above \u2212${(100 * report.margin).toFixed(1)} points.`,
  );
  const rows = shownPolicies().map((policy) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, policy),
      columns.map((task) => kneeCell(found(policy, task))),
    ),
  );
  put("knees-table", table(["Policy", ...columns].map(th), rows));
}

function kneeCell(knee) {
  const [first, ...notes] = (knee?.note ?? "").split("; ");
  if (!knee?.budget) return el("td", { class: "none" }, "none measured", el("small", {}, notes.join("; ")));
  return el("td", { class: "ok" }, el("strong", {}, knee.budget), el("small", {}, [first, ...notes].join("; ")));
}

// The table of cells

const SHOWS = {
  accuracy: { label: "accuracy", main: (one) => [one.accuracy, percent], under: (one) => change(one) },
  acc_norm: {
    label: "acc_norm",
    main: (one) => [one.acc_norm, percent],
    under: (one) => (known(one.acc_norm_stderr) ? `\u00b1${percent(one.acc_norm_stderr)}` : ""),
  },
  difference: {
    label: "difference to full",
    main: (one) => [one.difference, points],
    under: (one) => (known(one.difference) ? `${range(one.difference_low, one.difference_high, points)} ${mark(one)}` : ""),
  },
  held: {
    label: "entries held",
    main: (one) => [one.held, percent],
    under: (one) => (known(one.held_bytes) ? `bytes ${percent(one.held_bytes)}` : ""),
  },
  read: { label: "entries read", main: (one) => [one.read, percent], under: () => "" },
};

function columns() {
  const value = (name) => (cell) => SHOWS[state.show].main(entry(cell, name))[0];
  return [
    { name: "Policy", value: (cell) => cell.policy, cell: policyCell },
    { name: "Budget", value: size, cell: budgetCell },
    ...["mean", ...shownTasks()].map((name) => ({ name, value: value(name), cell: (cell) => valueCell(cell, name) })),
  ];
}

const policyCell = (cell) => el("th", { scope: "row" }, cell.policy, `${cell.greyed ? "\u2020" : ""}${cell.floor ? "\u2021" : ""}`);

const budgetCell = (cell) => el("td", {}, cell.budget, el("small", {}, `held ${percent(cell.held)}, read ${percent(cell.read)}`));

function valueCell(cell, column) {
  const one = entry(cell, column);
  const [value, write] = SHOWS[state.show].main(one);
  const dim = !cell.full && hardlyActed(cell, column);
  const verdict = ["accuracy", "difference"].includes(state.show) ? one.verdict : "";
  const judged = known(one.difference)
    ? [`difference ${points(one.difference)} points`, one.verdict, one.significant ? "significant" : null]
    : [];
  const name = [`${cell.label}, ${column}: ${write(value)}`, ...judged.filter(Boolean), "details"].join(", ");
  const button = el(
    "button",
    { type: "button", "aria-label": name, click: () => openCell(cell, column) },
    write(value),
    el("small", {}, SHOWS[state.show].under(one)),
  );
  return el("td", { class: `value ${verdict ?? ""} ${dim ? "greyed" : ""}` }, button);
}

function drawTable() {
  const all = columns();
  const rows = sorted(
    shownCells(),
    all.find((column) => column.name === state.sort.column),
    state.sort.descending,
  );
  const row = (cell) =>
    el(
      "tr",
      { class: cell.full ? "full" : null, "data-cell": cell.label },
      all.map((column) => column.cell(cell)),
    );
  put("cells", table(all.map(heading), rows.map(row)));
}

// One value in full

function openCell(cell, column) {
  const one = entry(cell, column);
  const numbers = {
    documents: one.n,
    accuracy: withPercent(one.accuracy),
    "95 % interval": range(...limits(cell, column), withPercent),
    acc_norm: withPercent(one.acc_norm),
    "difference to full": known(one.difference) && `${points(one.difference)} points`,
    "its 95 % interval": known(one.difference) && range(one.difference_low, one.difference_high, points),
    verdict: one.verdict,
    p: known(one.p) && decimal(one.p),
    "p after Holm": known(one.p_holm) && decimal(one.p_holm),
    "answers lost": one.lost,
    "answers gained": one.gained,
    "same pick as full": known(one.agreement) && withPercent(one.agreement),
    "Cohen's kappa": known(one.kappa) && decimal(one.kappa),
    "mean divergence (nats)": known(one.kl) && decimal(one.kl),
    "smallest detectable difference": known(one.detectable) && `${percent(one.detectable)} points`,
    "entries held": withPercent(one.held),
    "bytes held": withPercent(one.held_bytes),
    "entries read": withPercent(one.read),
    "prompts acted on": withPercent(one.acted),
    published: withPercent(one.reference),
  };
  const wanted = { policy: cell.policy, budget: cell.budget, task: column === "mean" ? "" : column, kind: "" };
  const lead = { text: "Show its flipped documents", click: () => choose(wanted) };
  openDetail(`${cell.label}, ${column}`, numbers, cell.full || !flips ? null : lead);
}

// Curves

const AXES = {
  budget: {
    label: "budget",
    unit: () => `budget, ${onShares() ? "% of the full cache" : "tokens"}`,
    of: (cell, column) => (onShares() ? 100 * (cell.share ?? entry(cell, column).held) : Number(cell.budget)),
  },
  held: {
    label: "bytes held",
    unit: () => "bytes held, % of the full cache",
    of: (cell, column) => 100 * entry(cell, column).held_bytes,
  },
  read: {
    label: "entries read",
    unit: () => "entries read, % of the full cache",
    of: (cell, column) => 100 * entry(cell, column).read,
  },
};
// A budget in tokens stands among shares where it holds as much.
const onShares = () => state.group.cells.some((cell) => !cell.full && known(cell.share));

function curve(policy, column) {
  const cells = shownCells().filter((cell) => cell.policy === policy && !cell.full && AXES[state.axis].of(cell, column) > 0);
  return cells
    .map((cell) => {
      const [low, high] = limits(cell, column);
      return {
        cell,
        x: AXES[state.axis].of(cell, column),
        y: 100 * entry(cell, column).accuracy,
        low: 100 * low,
        high: 100 * high,
      };
    })
    .sort((one, other) => one.x - other.x);
}

function drawPanel(column) {
  const curves = shownPolicies().map((policy) => [policy, curve(policy, column)]);
  const full = state.group.cells.find((cell) => cell.full);
  const [low, high] = limits(full, column).map((limit) => 100 * limit);
  const chances = state.group.tasks.filter((task) => column === "mean" || task.name === column).map((task) => 100 * task.chance);
  const chance = chances.reduce((sum, one) => sum + one, 0) / chances.length;
  const all = curves.flatMap(([, places]) => places);
  const scale = scales(
    all.map((place) => place.x),
    [low, high, chance, ...all.flatMap((place) => [place.low, place.high])],
  );
  const [left, right] = [BOX.left, BOX.width - BOX.right];
  const level = (kind, value) => svg("path", { class: kind, d: `M${left} ${scale.y(value)}H${right}` });
  return picture(column, `${column}: accuracy in percent against ${AXES[state.axis].unit()}; the numbers are in the table above`, [
    frame(scale, AXES[state.axis].unit()),
    svg("rect", { class: "fullband", x: left, width: right - left, y: scale.y(high), height: scale.y(low) - scale.y(high) }),
    level("full", 100 * entry(full, column).accuracy),
    level("chance", chance),
    curves.map(([policy, places]) => drawBand(policy, places, curves.length, scale)),
    curves.map(([policy, places]) => drawCurve(policy, places, column, scale)),
  ]);
}

function drawCurve(policy, places, column, { x, y }) {
  if (!places.length) return [];
  const knee = state.group.knees.find((one) => one.policy === policy && one.task === column)?.budget;
  return svg(
    "g",
    { class: look(policy) },
    svg("path", { class: "line", d: path(places.map((place) => [x(place.x), y(place.y)])) }),
    places.map((place) =>
      svg(
        "g",
        {},
        svg("title", {}, `${place.cell.label}: ${place.y.toFixed(1)} % (${place.low.toFixed(1)} to ${place.high.toFixed(1)})`),
        marker(policy, x(place.x), y(place.y), hardlyActed(place.cell, column)),
        place.cell.budget === knee ? svg("circle", { class: "ring", cx: x(place.x), cy: y(place.y), r: 7.5 }) : null,
      ),
    ),
  );
}

function drawLines() {
  put(
    "lines",
    shownPolicies().map(policyKey),
    el("li", {}, sample(stroke("full")), "full"),
    el("li", {}, sample(stroke("chance")), "chance"),
    el("li", {}, sample(svg("circle", { class: "ring", cx: 15, cy: 7, r: 6 })), "smallest budget that is ok"),
    el("li", {}, sample(svg("path", { class: "mark hollow", d: MARKS[0], transform: "translate(15 7)" })), "hollow: hardly acted"),
    el("li", {}, "bands: 95 % intervals"),
  );
}

// Pareto fronts

const COSTS = {
  bytes: { caption: "Bytes held", unit: "bytes held, % of the full cache", of: (cell) => 100 * cell.held_bytes },
  read: { caption: "Entries read", unit: "entries read, % of the full cache", of: (cell) => 100 * cell.read },
  seconds: { caption: "Seconds", unit: "seconds", of: (cell) => cell.seconds },
};

function drawFront([name, cost]) {
  const cells = shownCells().filter((cell) => cost.of(cell) > 0);
  const height = (cell) => 100 * cell.mean.accuracy;
  const scale = scales(cells.map(cost.of), cells.map(height));
  const place = (cell) => [scale.x(cost.of(cell)), scale.y(height(cell))];
  const front = sorted(
    cells.filter((cell) => state.group.pareto[name].includes(cell.key)),
    { value: cost.of },
  );
  const drawn = [...cells.filter((cell) => !cell.full), ...cells.filter((cell) => cell.full)];
  const steps = front
    .map((cell, index) => `${index ? `H${place(cell)[0]}V${place(cell)[1]}` : `M${place(cell).join(" ")}`}`)
    .join("");
  return picture(
    cost.caption,
    `Mean accuracy in percent against ${cost.unit}; the front: ${front.map((cell) => cell.label).join(", ")}`,
    [
      frame(scale, cost.unit),
      svg("path", { class: "front", d: steps || null }),
      drawn.map((cell) =>
        svg(
          "g",
          {},
          svg("title", {}, `${cell.label}: ${height(cell).toFixed(1)} % at ${Number(cost.of(cell).toPrecision(3))}`),
          marker(cell.policy, ...place(cell), cell.greyed && !cell.full),
        ),
      ),
      labels(front, place),
    ],
  );
}

// Names beside the front's cells, those that would lie on another left out: their tooltips and the table have them.
function labels(front, place) {
  const taken = [];
  return front.map((cell) => {
    const [x, y] = place(cell);
    const width = 5.6 * cell.label.length;
    const end = x + 6 + width > BOX.width;
    const box = { left: end ? x - width - 6 : x + 6, top: y + 4, width };
    if (
      taken.some(
        (other) => Math.abs(other.top - box.top) < 12 && box.left < other.left + other.width && other.left < box.left + box.width,
      )
    )
      return null;
    taken.push(box);
    return svg("text", { class: "name", x: end ? x - 6 : x + 6, y: y + 11, "text-anchor": end ? "end" : "start" }, cell.label);
  });
}

// Memory: the full cache in blocks, beside what the cells hold

function drawMemory() {
  const counted = state.group.tasks.filter((task) => task.paged && !state.hidden.tasks.has(task.name));
  at("memory-table").hidden = !counted.length;
  if (!counted.length) {
    put("blocks", "Not counted in this run.");
    return;
  }
  const { block } = counted[0].paged;
  put(
    "blocks",
    "Percent of the full cache in one piece. The last block of each prompt stands empty in part; ",
    "full blocks of prompts that begin alike are shared.",
  );
  const line = (name, words) => el("tr", {}, el("th", { scope: "row" }, name), words.map((word) => el("td", {}, word)));
  const whole = ({ stored_bytes }, size) => percent(stored_bytes && known(size) ? size / stored_bytes : null);
  const share = (of) => counted.map(({ paged }) => whole(paged, of(paged)));
  const mebi = ({ paged }) => `${(paged.stored_bytes / 2 ** 20).toFixed(1)}\u00a0MiB`;
  const rows = [
    line("full, in one piece", counted.map(mebi)),
    line(`full, in blocks of ${block}`, share((paged) => paged.paged_bytes)),
    line(`full, in shared blocks of ${block}`, share((paged) => paged.shared_bytes)),
    ...shownCells()
      .filter((cell) => !cell.full)
      .map((cell) => line(cell.label, share((paged) => paged.held[cell.label]))),
  ];
  put("memory-table", table(["Cache", ...counted.map((task) => task.name)].map(th), rows));
}

// Limits: subsets, chance, what could be seen at all

function drawLimits() {
  const { noise } = state.group;
  const moved =
    noise && `flips ${noise.flips} of ${noise.n} answers; no log-likelihood moves by more than ${decimal(noise.furthest)} nats`;
  put(
    "noise",
    noise
      ? `Noise floor: the full cache in other batches ${moved}.`
      : "The run has no noise floor: the full cache was measured once.",
  );
  const head = ["Task", "Documents", "Chance", "Full", "95 % interval", "Smallest detectable difference"];
  put("limits-table", table(head.map(th), state.group.tasks.filter((task) => !state.hidden.tasks.has(task.name)).map(limitsRow)));
}

function limitsRow(task) {
  const full = state.group.cells.find((cell) => cell.full);
  const seen = shownCells()
    .map((cell) => cell.tasks[task.name].detectable)
    .filter((value) => known(value));
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, task.name),
    el("td", {}, task.subset ? `a seeded random ${task.n} of ${task.total}` : `all ${task.n}`),
    el("td", {}, withPercent(task.chance)),
    el("td", {}, withPercent(full.tasks[task.name].accuracy)),
    el("td", {}, range(...limits(full, task.name), percent)),
    el("td", {}, seen.length ? `${percent(Math.min(...seen))} to ${percent(Math.max(...seen))} points` : "\u2013"),
  );
}

function drawPublished() {
  const { reference } = report;
  at("published").hidden = !reference;
  if (reference)
    put(
      "published",
      el(
        "p",
        {},
        `Published values come from ${reference.source}. `,
        reference.note ?? "",
        " They stand among the numbers of each value.",
      ),
    );
}

// Flipped documents

function drawChooser() {
  const { policy, budget, task, kind } = at("choose").elements;
  const budgets = sorted(
    state.group.cells.filter((cell) => !cell.full),
    { value: size },
  ).map((cell) => cell.budget);
  options(policy, anyOf(policies()));
  options(budget, anyOf(unique(budgets)));
  options(task, anyOf(tasks()));
  options(kind, [
    ["", "lost and gained"],
    ["lost", "lost: right under full alone"],
    ["gained", "gained: wrong under full alone"],
  ]);
}

function chosen() {
  const wanted = Object.fromEntries(new FormData(at("choose")));
  const cells = new Map(state.group.cells.map((cell) => [cell.key, cell]));
  const fits = (cell, task) =>
    cell &&
    (!wanted.policy || wanted.policy === cell.policy) &&
    (!wanted.budget || wanted.budget === cell.budget) &&
    (!wanted.task || wanted.task === task);
  return {
    cells,
    found: flips.flips.filter((flip) => fits(cells.get(flip.cell), flip.task) && (!wanted.kind || wanted.kind === flip.kind)),
    leftOut: flips.left_out
      .filter((one) => fits(cells.get(one.cell), one.task))
      .reduce((sum, one) => sum + (wanted.kind ? one[wanted.kind] : one.lost + one.gained), 0),
  };
}

function drawFound() {
  if (!flips) {
    at("choose").hidden = at("more").hidden = true;
    put("found", "This page was made without documents.");
    return;
  }
  const { cells, found, leftOut } = chosen();
  const rest = leftOut ? `, and ${leftOut} more that the page leaves out (it holds ${flips.most} of each cell and task)` : "";
  put("found", `${plural(found.length, "flipped answer")}${rest}.`);
  listed(found, (flip) => flipped(flip, cells.get(flip.cell)));
}

function flipped(flip, cell) {
  const text = flips.texts[flip.task][flip.document];
  const prompt = text.prompts[0].trim();
  const start = prompt.length > 90 ? prompt.slice(-90).replace(/^\S*\s/, "\u2026 ") : prompt;
  const summary = [
    el("span", { class: `tag ${flip.kind}` }, flip.kind === "lost" ? "\u25bc lost" : "\u25b2 gained"),
    el("span", {}, `${cell.label}, ${flip.task} ${flip.document}`),
    el("span", { class: "quiet" }, start),
  ];
  return opening(summary, () => comparison(flip, cell, text));
}

function comparison(flip, cell, text) {
  const own = text.prompts.length > 1;
  const best = (values) =>
    values.reduce((top, value, index) => ((value ?? -Infinity) > (values[top] ?? -Infinity) ? index : top), 0);
  const [full, other] = [best(flip.full), best(flip.other)];
  const value = (logprob, pick) =>
    el("td", { class: pick ? "pick" : null }, nats(logprob), pick ? el("small", {}, "picked") : null);
  const rows = text.choices.map((words, index) =>
    el(
      "tr",
      {},
      el(
        "td",
        {},
        own ? el("span", { class: "quiet" }, `${text.prompts[index].trim()} `) : null,
        words.trim(),
        index === text.gold ? el("small", {}, "\u2713 right answer") : null,
      ),
      value(flip.full[index], index === full),
      value(flip.other[index], index === other),
    ),
  );
  const head = [own ? "Prompt and choice" : "Choice", "full (nats)", `${cell.label} (nats)`].map(th);
  const prompt = el("pre", { tabindex: 0, role: "region", "aria-label": "Prompt" }, text.prompts[0]);
  const box = el(
    "div",
    { class: "wide", tabindex: 0, role: "region", "aria-label": "Log-likelihoods" },
    table(head, rows, { class: "choices" }),
  );
  return own ? [box] : [prompt, box];
}

function drawHead() {
  const first = report.groups[0];
  const models = unique(report.groups.map((group) => group.model)).join(", ");
  const protocols = unique(report.groups.map((group) => `protocol ${group.protocol}`)).join(", ");
  const documents = first.tasks.reduce((sum, task) => sum + task.n, 0);
  put("about", [models, protocols, `${plural(documents, "document")} of ${plural(first.tasks.length, "task")}`].join(" \u00b7 "));
  at("unfinished").hidden = !report.incomplete.length;
  put(
    "unfinished",
    `The run is not finished: ${plural(report.incomplete.length, "pack")} missing. Only tasks that are whole are shown.`,
  );
  put("origin", told({ ...report.provenance, ...report.aside }));
}

function draw() {
  for (const part of [drawKnees, drawTable, drawLines, drawMemory, drawLimits, drawPublished, drawFound]) part();
  put("panels", ["mean", ...shownTasks()].map(drawPanel));
  const costs = Object.entries(COSTS).filter(([, cost]) => state.group.cells.some((cell) => cost.of(cell) > 0));
  put("front-panels", costs.map(drawFront));
}

radios("shows", SHOWS, "show");
radios("axes", AXES, "axis");
drawHead();
drawVerdicts(
  "the column",
  [
    ["\u2020", "acted on fewer than half of a task's prompts, which is shown in grey"],
    ["\u2021", "holds more than its budget asks for"],
  ],
  "in percent and percentage points; mean: of all tasks, shown or not; choose a value for all of its numbers",
);
regroup(state.group);
