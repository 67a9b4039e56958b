// What the pages' scripts share: elements, words for numbers, filters, a table that sorts, drawings. A page's own script follows it
// and defines `state`, `policies()` (the names that colours and marks go by), `draw()`, `drawTable()` and `drawFound()`.
// Everything in the page's data is data, never markup: only text nodes and attributes are made.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const COLOURS = 8; // p0 to p7 in the style; markers go round by another number, so that no two policies look alike
const AT_ONCE = 20; // single answers listed before more are asked for

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

// Verdicts

const VERDICTS = { ok: "\u2713", worse: "\u25bc", inconclusive: "?" };
const mark = (one) => `${VERDICTS[one.verdict] ?? ""}${one.significant ? "*" : ""}`;
const change = (one) => (known(one.difference) ? `${points(one.difference)} ${mark(one)}` : "");

// The signs of a table: `family` says what Holm's adjustment went over, `more` has other signs with their meaning.
function drawVerdicts(family, more, last) {
  const line = (sign, text, kind) => el("li", {}, el("strong", { class: kind }, sign), text);
  put(
    "verdicts",
    line("\u2713", "ok", "ok"),
    line("\u25bc", "worse: the interval lies below 0", "worse"),
    line("?", "inconclusive", "inconclusive"),
    line("*", `significant: p below 0.05 after Holm's adjustment over ${family}`),
    more.map(([sign, text]) => line(sign, text)),
    el("li", {}, last),
  );
}

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

// A table that sorts

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

// One value in full

const list = (pairs) =>
  el(
    "dl",
    {},
    pairs.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
  );

// Open the dialog with those numbers that are known, and with a button that leads on: its text and what it does, or null for none.
function openDetail(name, numbers, lead) {
  const told = Object.entries(numbers).filter(([, value]) => known(value) && value !== false && value !== "\u2013");
  put("detail-name", name);
  put("detail-numbers", list(told.map(([of, value]) => [of, String(value)])));
  at("detail-lead").hidden = !lead;
  if (lead) put("detail-lead", lead.text);
  at("detail-lead").onclick = () => {
    at("detail").close();
    lead.click();
  };
  at("detail").showModal();
}

at("detail-close").addEventListener("click", () => at("detail").close());
document.addEventListener("submit", (event) => event.preventDefault());

// Drawing: marks, axes and panels in units of a 320 x 220 picture

const BOX = { width: 320, height: 220, left: 34, right: 12, top: 8, bottom: 26 };
// Paths around 0 0, one for each policy: circle, square, triangles, diamond, plus, cross, star, pentagon.
// prettier-ignore
const MARKS = [
  "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0", "M-3.2-3.2h6.4v6.4h-6.4z", "M0-4.2L4 3.2H-4z", "M0-4.5L4.5 0L0 4.5L-4.5 0z", "M0 4.2L4-3.2H-4z",
  "M-1.5-4.2h3v2.7h2.7v3h-2.7v2.7h-3v-2.7h-2.7v-3h2.7z", "M-4-2l2-2l2 2l2-2l2 2l-2 2l2 2l-2 2l-2-2l-2 2l-2-2l2-2z", "M-4.2 0L3.2-4V4z", "M4.2 0L-3.2-4V4z",
  "M0-5l1.3 3.4h3.6l-2.9 2.2l1.1 3.5L0 2l-3.1 2.1l1.1-3.5l-2.9-2.2h3.6z", "M0-4.4l4.2 3l-1.6 4.9h-5.2l-1.6-4.9z",
];
const FULL_MARK = "M0-5.5l1.4 3.7h4l-3.2 2.4l1.2 3.9L0 2.2l-3.4 2.3l1.2-3.9l-3.2-2.4h4z";
const look = (policy) => (policy === "full" ? "pfull" : `p${policies().indexOf(policy) % COLOURS}`);
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

// `logarithmic` is about the horizontal axis.
function scales(xs, ys, logarithmic = true) {
  const [left, right] = spread(xs, logarithmic);
  const [low, high] = spread(ys, false);
  const way = logarithmic ? Math.log : (value) => value;
  const across = (value) => (way(value) - way(left)) / (way(right) - way(left));
  const x = (value) => BOX.left + 6 + across(value) * (BOX.width - BOX.left - BOX.right - 12);
  const y = (value) => BOX.height - BOX.bottom - ((value - low) / (high - low)) * (BOX.height - BOX.top - BOX.bottom);
  return { x, y, xTicks: logarithmic ? logTicks(left, right) : unique(xs), yTicks: evenTicks(low, high) };
}

function frame({ x, y, xTicks, yTicks }, label, named = String) {
  const [right, bottom] = [BOX.width - BOX.right, BOX.height - BOX.bottom];
  return [
    yTicks.map((tick) => [
      svg("line", { class: "grid", x1: BOX.left, x2: right, y1: y(tick), y2: y(tick) }),
      svg("text", { x: BOX.left - 4, y: y(tick) + 3.5, "text-anchor": "end" }, signed(String(tick))),
    ]),
    xTicks.map((tick) => [
      svg("line", { class: "grid", x1: x(tick), x2: x(tick), y1: BOX.top, y2: bottom }),
      svg("text", { x: x(tick), y: bottom + 11, "text-anchor": "middle" }, named(tick)),
    ]),
    svg("path", { class: "edge", d: `M${BOX.left} ${BOX.top}V${bottom}H${right}` }),
    svg("text", { x: right, y: BOX.height - 3, "text-anchor": "end" }, label),
  ];
}

function picture(caption, label, children) {
  const drawing = svg("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", "aria-label": label }, children);
  return el("figure", {}, el("figcaption", {}, caption), drawing);
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

// Samples of lines and marks, for what explains them.
const sample = (...children) => svg("svg", { viewBox: "0 0 30 14", "aria-hidden": "true" }, children);
const stroke = (kind) => svg("path", { class: kind, d: "M0 7H30" });
const policyKey = (policy) =>
  el("li", {}, sample(svg("g", { class: look(policy) }, stroke("line"), marker(policy, 15, 7, false))), policy);

// Single answers

function choose(wanted) {
  for (const [name, value] of Object.entries(wanted)) at("choose").elements[name].value = value;
  state.listed = AT_ONCE;
  drawFound();
  at("documents").scrollIntoView();
  at("choose").elements.policy.focus({ preventScroll: true });
}

const anyOf = (values) => [["", "all"], ...values.map((value) => [value, value])];

// List the first of what was found, each made by `one`, and offer the rest.
function listed(found, one) {
  put("answers", found.slice(0, state.listed).map(one));
  at("more").hidden = found.length <= state.listed;
}

// What opens: a line, and what is made of `contents` when it is first opened.
function opening(summary, contents) {
  const body = el("div");
  const open = (event) => {
    if (event.target.open && !body.hasChildNodes()) body.append(...contents());
  };
  return el("details", { toggle: open }, el("summary", {}, summary), body);
}

at("choose").addEventListener("change", () => {
  state.listed = AT_ONCE;
  drawFound();
});
at("more").addEventListener("click", () => {
  state.listed += AT_ONCE;
  drawFound();
});

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

