// Draws the report that the page holds as JSON. Everything in it is data, never markup: only text nodes and attributes are made.
"use strict";

const { report, flips } = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const COLOURS = 8; // p0 to p7 in the style; markers go round by another number, so that no two policies look alike
const FLIPS_AT_ONCE = 20;
const state = {
  group: report.groups[0],
  hidden: { policies: new Set(), tasks: new Set() },
  show: "accuracy",
  axis: "budget",
  sort: { column: null, descending: false },
  flips: FLIPS_AT_ONCE,
};

// Making elements

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}
const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const put = (id, ...children) => at(id).replaceChildren(...children.flat(Infinity));

const th = (text) => el("th", { scope: "col" }, text);
const table = (head, rows, attributes = {}) => el("table", attributes, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows));

// Words for numbers

const known = (value) => value !== null && value !== undefined;
const signed = (text) => text.replace("-", "\u2212");
const percent = (share, digits = 1) => (known(share) ? (100 * share).toFixed(digits) : "\u2013");
const withPercent = (share) => (known(share) ? `${percent(share)}\u00a0%` : "\u2013");
const points = (share) => (known(share) ? signed(`${share > 0 ? "+" : ""}${(100 * share).toFixed(1)}`) : "\u2013");
const range = (low, high, write) => (known(low) && known(high) ? `${write(low)} to ${write(high)}` : "\u2013");
const nats = (value) => (known(value) ? signed(value.toFixed(2)) : "\u2212\u221e");
const decimal = (value) =>
  known(value) ? (value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(1) : value.toFixed(3)) : "\u2013";
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const unique = (values) => [...new Set(values)];

// What the report says

const VERDICTS = { ok: "\u2713", worse: "\u25bc", inconclusive: "?" };
const policies = () => unique(state.group.cells.filter((cell) => !cell.full).map((cell) => cell.policy));
const tasks = () => state.group.tasks.map((task) => task.name);
const shownPolicies = () => policies().filter((name) => !state.hidden.policies.has(name));
const shownTasks = () => tasks().filter((name) => !state.hidden.tasks.has(name));
const shownCells = () => state.group.cells.filter((cell) => cell.full || !state.hidden.policies.has(cell.policy));
const entry = (cell, column) => (column === "mean" ? { ...cell, ...cell.mean } : cell.tasks[column]);
const size = (cell) => cell.share ?? Number(cell.budget); // shares are at most 1, tokens at least 1
const look = (policy) => (policy === "full" ? "pfull" : `p${policies().indexOf(policy) % COLOURS}`);
const hardlyActed = (cell, column) => (column === "mean" ? cell.greyed : cell.tasks[column].acted < 0.5 && cell.share !== 1);
const limits = (cell, column) => {
  const { accuracy, low, high, stderr } = entry(cell, column);
  if (known(low) && known(high)) return [low, high];
  return known(stderr) ? [accuracy - 1.96 * stderr, accuracy + 1.96 * stderr] : [accuracy, accuracy];
};

// Filters

function choice(kind, group, text, checked, change) {
  return el("label", {}, el("input", { type: kind, name: group, value: text.value, checked, change }), text.label);
}

function checks(id, names, hidden) {
  const toggle = (name) => (event) => {
    event.target.checked ? hidden.delete(name) : hidden.add(name);
    draw();
  };
  put(
    id,
    at(id).querySelector("legend"),
    names.map((name) => choice("checkbox", id, { value: name, label: name }, !hidden.has(name), toggle(name))),
  );
}

function radios(id, options, key) {
  const select = (value) => () => {
    state[key] = value;
    draw();
  };
  put(
    id,
    at(id).querySelector("legend"),
    Object.entries(options).map(([value, { label }]) => choice("radio", id, { value, label }, state[key] === value, select(value))),
  );
}

function options(select, values, chosen) {
  select.replaceChildren(...values.map(([value, label]) => el("option", { value, selected: value === chosen }, label)));
}

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
  Object.assign(state, { group, hidden: { policies: new Set(), tasks: new Set() }, flips: FLIPS_AT_ONCE });
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
const mark = (one) => `${VERDICTS[one.verdict] ?? ""}${one.significant ? "*" : ""}`;
const change = (one) => (known(one.difference) ? `${points(one.difference)} ${mark(one)}` : "");

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
    { type: "button", "aria-label": name, click: () => openDetail(cell, column) },
    write(value),
    el("small", {}, SHOWS[state.show].under(one)),
  );
  return el("td", { class: `value ${verdict ?? ""} ${dim ? "greyed" : ""}` }, button);
}

function sorted(cells, column, descending) {
  if (!column) return cells;
  const order = (one, other) => (typeof one === "string" ? one.localeCompare(other) : one - other);
  return [...cells].sort((first, second) => {
    const [one, other] = [column.value(first), column.value(second)];
    if (!known(one) || !known(other)) return known(other) - known(one);
    return descending ? order(other, one) : order(one, other);
  });
}

function heading(column) {
  const active = state.sort.column === column.name;
  const click = () => {
    state.sort = { column: column.name, descending: active && !state.sort.descending };
    drawTable();
    at("cells")
      .querySelector(`[data-column="${CSS.escape(column.name)}"]`)
      .focus();
  };
  const direction = state.sort.descending ? "descending" : "ascending";
  return el(
    "th",
    { scope: "col", "aria-sort": active ? direction : null },
    el("button", { type: "button", "data-column": column.name, click }, column.name),
  );
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

function drawVerdicts() {
  const line = (sign, text, kind) => el("li", {}, el("strong", { class: kind }, sign), text);
  put(
    "verdicts",
    line("\u2713", "ok", "ok"),
    line("\u25bc", "worse: the interval lies below 0", "worse"),
    line("?", "inconclusive", "inconclusive"),
    line("*", "significant: p below 0.05 after Holm's adjustment over the column"),
    line("\u2020", "acted on fewer than half of a task's prompts, which is shown in grey"),
    line("\u2021", "holds more than its budget asks for"),
    el("li", {}, "in percent and percentage points; mean: of all tasks, shown or not; choose a value for all of its numbers"),
  );
}

// One value in full

function numbers(cell, column) {
  const one = entry(cell, column);
  const of = {
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
  return Object.entries(of).filter(([, value]) => known(value) && value !== false && value !== "\u2013");
}

function openDetail(cell, column) {
  put("detail-name", `${cell.label}, ${column}`);
  put(
    "detail-numbers",
    el(
      "dl",
      {},
      numbers(cell, column).map(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]),
    ),
  );
  at("detail-flips").hidden = cell.full || !flips;
  at("detail-flips").onclick = () => {
    at("detail").close();
    chooseFlips({ policy: cell.policy, budget: cell.budget, task: column === "mean" ? "" : column, kind: "" });
  };
  at("detail").showModal();
}

// Drawing: marks, axes and panels in units of a 320 x 220 picture

const BOX = { width: 320, height: 220, left: 34, right: 12, top: 8, bottom: 26 };
// Paths around 0 0, one for each policy: circle, square, triangle, diamond, plus, cross, star, pentagon.
// prettier-ignore
const MARKS = [
  "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0", "M-3.2-3.2h6.4v6.4h-6.4z", "M0-4.2L4 3.2H-4z", "M0-4.5L4.5 0L0 4.5L-4.5 0z", "M0 4.2L4-3.2H-4z",
  "M-1.5-4.2h3v2.7h2.7v3h-2.7v2.7h-3v-2.7h-2.7v-3h2.7z", "M-4-2l2-2l2 2l2-2l2 2l-2 2l2 2l-2 2l-2-2l-2 2l-2-2l2-2z", "M-4.2 0L3.2-4V4z", "M4.2 0L-3.2-4V4z",
  "M0-5l1.3 3.4h3.6l-2.9 2.2l1.1 3.5L0 2l-3.1 2.1l1.1-3.5l-2.9-2.2h3.6z", "M0-4.4l4.2 3l-1.6 4.9h-5.2l-1.6-4.9z",
];
const FULL_MARK = "M0-5.5l1.4 3.7h4l-3.2 2.4l1.2 3.9L0 2.2l-3.4 2.3l1.2-3.9l-3.2-2.4h4z";
const shape = (policy) => (policy === "full" ? FULL_MARK : MARKS[policies().indexOf(policy) % MARKS.length]);
const marker = (policy, x, y, hollow) =>
  svg("path", { class: `mark ${look(policy)}${hollow ? " hollow" : ""}`, d: shape(policy), transform: `translate(${x} ${y})` });
const path = (places) => places.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

function logTicks(low, high) {
  const steps = high / low > 200 ? [1] : high / low > 5 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 7];
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    found.push(...steps.map((step) => Number((step * 10 ** power).toPrecision(3))));
  }
  return found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
}

function evenTicks(low, high) {
  const most = (high - low) / 3;
  const power = 10 ** Math.floor(Math.log10(most));
  const step = [5, 2, 1].map((factor) => factor * power).find((each) => each <= most);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + 1e-9; tick += step) found.push(Number(tick.toPrecision(6)));
  return found;
}

function spread(values, logarithmic) {
  const [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [1, 10];
  if (logarithmic) return low === high ? [low / 2, high * 2] : [low, high];
  const margin = (high - low) * 0.04 || 1;
  return [low - margin, high + margin];
}

function scales(xs, ys) {
  const [left, right] = spread(xs, true);
  const [low, high] = spread(ys, false);
  const x = (value) => BOX.left + 6 + (Math.log(value / left) / Math.log(right / left)) * (BOX.width - BOX.left - BOX.right - 12);
  const y = (value) => BOX.height - BOX.bottom - ((value - low) / (high - low)) * (BOX.height - BOX.top - BOX.bottom);
  return { x, y, xTicks: logTicks(left, right), yTicks: evenTicks(low, high) };
}

function frame({ x, y, xTicks, yTicks }, label) {
  const [right, bottom] = [BOX.width - BOX.right, BOX.height - BOX.bottom];
  return [
    yTicks.map((tick) => [
      svg("line", { class: "grid", x1: BOX.left, x2: right, y1: y(tick), y2: y(tick) }),
      svg("text", { x: BOX.left - 4, y: y(tick) + 3.5, "text-anchor": "end" }, signed(String(tick))),
    ]),
    xTicks.map((tick) => [
      svg("line", { class: "grid", x1: x(tick), x2: x(tick), y1: BOX.top, y2: bottom }),
      svg("text", { x: x(tick), y: bottom + 11, "text-anchor": "middle" }, String(tick)),
    ]),
    svg("path", { class: "edge", d: `M${BOX.left} ${BOX.top}V${bottom}H${right}` }),
    svg("text", { x: right, y: BOX.height - 3, "text-anchor": "end" }, label),
  ];
}

function picture(caption, label, children) {
  const drawing = svg("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", "aria-label": label }, children);
  return el("figure", {}, el("figcaption", {}, caption), drawing);
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

// The more bands lie on each other, the fainter each.
function drawBand(policy, places, bands, { x, y }) {
  if (!places.length) return [];
  const outline = [
    ...places.map((place) => [x(place.x), y(place.high)]),
    ...[...places].reverse().map((place) => [x(place.x), y(place.low)]),
  ];
  return svg("path", { class: `band ${look(policy)}`, d: `${path(outline)}Z`, "fill-opacity": Math.min(0.12, 0.4 / bands) });
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
  const sample = (...children) => svg("svg", { viewBox: "0 0 30 14", "aria-hidden": "true" }, children);
  const line = (kind) => svg("path", { class: kind, d: "M0 7H30" });
  put(
    "lines",
    shownPolicies().map((policy) =>
      el("li", {}, sample(svg("g", { class: look(policy) }, line("line"), marker(policy, 15, 7, false))), policy),
    ),
    el("li", {}, sample(line("full")), "full"),
    el("li", {}, sample(line("chance")), "chance"),
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
  const any = (word, values) => [["", word], ...values.map((value) => [value, value])];
  const budgets = sorted(
    state.group.cells.filter((cell) => !cell.full),
    { value: size },
  ).map((cell) => cell.budget);
  options(policy, any("all", policies()));
  options(budget, any("all", unique(budgets)));
  options(task, any("all", tasks()));
  options(kind, [
    ["", "lost and gained"],
    ["lost", "lost: right under full alone"],
    ["gained", "gained: wrong under full alone"],
  ]);
}

function chooseFlips(wanted) {
  for (const [name, value] of Object.entries(wanted)) at("choose").elements[name].value = value;
  state.flips = FLIPS_AT_ONCE;
  drawFlips();
  at("documents").scrollIntoView();
  at("choose").elements.policy.focus({ preventScroll: true });
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

function drawFlips() {
  if (!flips) {
    at("choose").hidden = at("more").hidden = true;
    put("found", "This page was made without documents.");
    return;
  }
  const { cells, found, leftOut } = chosen();
  const rest = leftOut ? `, and ${leftOut} more that the page leaves out (it holds ${flips.most} of each cell and task)` : "";
  put("found", `${plural(found.length, "flipped answer")}${rest}.`);
  put(
    "flips",
    found.slice(0, state.flips).map((flip) => flipped(flip, cells.get(flip.cell))),
  );
  at("more").hidden = found.length <= state.flips;
}

function flipped(flip, cell) {
  const text = flips.texts[flip.task][flip.document];
  const prompt = text.prompts[0].trim();
  const start = prompt.length > 90 ? prompt.slice(-90).replace(/^\S*\s/, "\u2026 ") : prompt;
  const body = el("div");
  const open = (event) => {
    if (event.target.open && !body.hasChildNodes()) body.append(...comparison(flip, cell, text));
  };
  return el(
    "details",
    { toggle: open },
    el(
      "summary",
      {},
      el("span", { class: `tag ${flip.kind}` }, flip.kind === "lost" ? "\u25bc lost" : "\u25b2 gained"),
      el("span", {}, `${cell.label}, ${flip.task} ${flip.document}`),
      el("span", { class: "quiet" }, start),
    ),
    body,
  );
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

// Where it comes from

function told(value) {
  if (Array.isArray(value))
    return value.every((one) => one === null || typeof one !== "object") ? value.map(String).join(", ") : value.map(told);
  if (value === null || typeof value !== "object") return String(value ?? "\u2013");
  return el(
    "dl",
    {},
    Object.entries(value).map(([name, one]) => [el("dt", {}, name), el("dd", {}, told(one))]),
  );
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
  for (const part of [drawKnees, drawTable, drawLines, drawLimits, drawPublished, drawFlips]) part();
  put("panels", ["mean", ...shownTasks()].map(drawPanel));
  const costs = Object.entries(COSTS).filter(([, cost]) => state.group.cells.some((cell) => cost.of(cell) > 0));
  put("front-panels", costs.map(drawFront));
}

at("choose").addEventListener("change", () => {
  state.flips = FLIPS_AT_ONCE;
  drawFlips();
});
at("more").addEventListener("click", () => {
  state.flips += FLIPS_AT_ONCE;
  drawFlips();
});
at("detail-close").addEventListener("click", () => at("detail").close());
document.addEventListener("submit", (event) => event.preventDefault());
radios("shows", SHOWS, "show");
radios("axes", AXES, "axis");
drawHead();
drawVerdicts();
regroup(state.group);
