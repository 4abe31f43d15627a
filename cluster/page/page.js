// The live page: reads the state of the routers from `ui/state` and draws it.
//
// Ids and names come from clients and may hold anything, so text reaches the page through `textContent` only.

const BASE = location.origin + location.pathname.replace(/\/+$/, "");
const SILENT_MS = 5000; // without a state for this time the connection counts as lost
const RETRY_MS = [300, 5000]; // first and longest time before the next try
const HISTORY = 240; // states in a curve: two minutes

const $ = (id) => document.getElementById(id);
const wait = (ms) => new Promise((done) => setTimeout(done, ms));

function make(tag, { text, title, ...attributes } = {}, ...children) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (title) element.title = title;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Writes only what changed: an unchanged page costs no layout.
function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// ---------------------------------------------------------------------------------------------------
// Numbers as text
// ---------------------------------------------------------------------------------------------------

function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 100) return `${value.toFixed(0)} s`;
  if (size >= 1) return `${value.toFixed(size >= 10 ? 1 : 2)} s`;
  if (size >= 0.01) return `${(value * 1e3).toFixed(0)} ms`;
  if (size >= 1e-5) return `${(value * 1e3).toFixed(size >= 1e-3 ? 1 : 2)} ms`;
  return "0 ms";
}

function count(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(value >= 1e7 ? 0 : 1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(0)}k`;
  return value >= 1000 ? value.toLocaleString("en") : String(value);
}

const rate = (value) => (value === null ? "–" : count(value >= 10 ? Math.round(value) : +value.toFixed(1)));
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "–");
const clock = (epoch) => new Date(epoch * 1000).toLocaleTimeString("en-GB");
const sum = (list, value) => list.reduce((total, one) => total + value(one), 0);

// ---------------------------------------------------------------------------------------------------
// Colours and canvases
// ---------------------------------------------------------------------------------------------------

const scheme = matchMedia("(prefers-color-scheme: dark)");
let colours = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["in-use", "quarantined", "cached", "free", "accent"]) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
}

// Returns a canvas' context, scaled so that one unit is one pixel of the page.
function pen(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  const size = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

const STATES = ["in-use", "quarantined", "cached", "free"]; // the order of a tier's counts
const STATE_NAMES = ["in use", "quarantined", "cached", "free"];

// Divides `cells` among counts. Every count above 0 gets a cell; the rest goes by the largest remainders.
function apportion(counts, cells) {
  const total = sum(counts, (n) => n);
  if (!total) return counts.map(() => 0);
  const exact = counts.map((n) => (n * cells) / total);
  const given = exact.map((n, i) => (counts[i] ? Math.max(1, Math.floor(n)) : 0));
  let left = cells - sum(given, (n) => n);
  while (left !== 0) {
    const step = Math.sign(left);
    let best = -1;
    for (let i = 0; i < counts.length; i++) {
      if (!counts[i] || (step < 0 && given[i] <= 1)) continue;
      if (best < 0 || step * (exact[i] - given[i]) > step * (exact[best] - given[best])) best = i;
    }
    if (best < 0) break;
    given[best] += step;
    left -= step;
  }
  return given;
}

// Draws a tier as cells, column by column, so that it also reads as a bar. Returns the blocks of one cell.
function drawCells(canvas, counts, width, rows, pitch) {
  const total = sum(counts, (n) => n);
  const columns = Math.max(1, Math.min(Math.floor((width + 1) / pitch), Math.ceil(total / rows)));
  const cells = Math.min(total, columns * rows);
  canvas.style.height = `${rows * pitch}px`;
  const context = pen(canvas, width, rows * pitch);
  const step = Math.min((width + 1) / columns, 3 * pitch);
  let at = 0;
  apportion(counts, cells).forEach((number, state) => {
    context.fillStyle = colours[STATES[state]];
    for (const end = at + number; at < end; at++) {
      context.fillRect(Math.floor(at / rows) * step, (at % rows) * pitch, step - 1, pitch - 1);
    }
  });
  return total / Math.max(1, cells);
}

function drawCurve(canvas, values) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const context = pen(canvas, width, height);
  const top = Math.max(1e-9, ...values.filter((v) => v !== null));
  const x = (i) => width - (values.length - 1 - i) * (width / (HISTORY - 1));
  const y = (v) => height - 1 - (v / top) * (height - 3);
  context.beginPath();
  let first = null;
  values.forEach((v, i) => {
    if (v === null) return;
    if (first === null) {
      first = x(i);
      context.moveTo(first, y(v));
    } else context.lineTo(x(i), y(v));
  });
  if (first === null) return;
  context.strokeStyle = colours.accent;
  context.lineWidth = 1.2;
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(first, height);
  context.globalAlpha = 0.13;
  context.fillStyle = colours.accent;
  context.fill();
  context.globalAlpha = 1;
}

// ---------------------------------------------------------------------------------------------------
// Numbers of the whole fleet
// ---------------------------------------------------------------------------------------------------

let previous = null; // the state before, for rates
let decisionRate = null, tokenRate = null;
const past = []; // [time, decisions, deltas] of the last seconds

function updateRates(state) {
  // With another set of routers, or after the restart of one, the sums are of something else.
  if (previous && (previous.routers.join() !== state.routers.join() || previous.num_decisions > state.num_decisions)) {
    past.length = 0;
  }
  past.push([state.now, state.num_decisions, state.num_deltas]);
  while (past.length > 2 && state.now - past[0][0] > 3) past.shift();
  const [first, last] = [past[0], past[past.length - 1]];
  const elapsed = last[0] - first[0];
  decisionRate = elapsed > 0 ? (last[1] - first[1]) / elapsed : null;
  tokenRate = elapsed > 0 ? (last[2] - first[2]) / elapsed : null;
}

// Title, and a function from the state to: value, unit, more text, and what the curve shows.
const NUMBERS = [
  ["Requests", () => [rate(decisionRate), "/s", "decided by routers", decisionRate]],
  ["Tokens", () => [rate(tokenRate), "/s", "in streams", tokenRate]],
  ["Prefix hits", (state) => {
    const [prompt, cached, predicted] = ["prompt_tokens", "cached_tokens", "predicted_tokens"]
      .map((field) => sum(state.replicas, (r) => r[field]));
    return [percent(cached, prompt), "of tokens", `predicted ${percent(predicted, prompt)}`,
      prompt ? cached / prompt : null];
  }],
  ["First token", (state) => [seconds(state.ttft_s[0]), "median", `95% within ${seconds(state.ttft_s[1])}`,
    state.ttft_s[0]]],
  ["Running", (state) => {
    const running = sum(state.replicas, (r) => r.running), waiting = sum(state.replicas, (r) => r.waiting);
    return [count(running), "requests", `${count(waiting)} wait at replicas`, running];
  }],
  ["To prefill", (state) => {
    const tokens = sum(state.replicas, (r) => r.prefill_tokens);
    return [count(tokens), "tokens", "of requests at replicas", tokens];
  }],
  ["Routers' queue", (state) => [count(state.queue.requests), "requests",
    state.queue.requests ? `${seconds(state.queue.expected_wait_s)} to a first token` : "nothing waits",
    state.queue.requests]],
  ["Regret", (state) => {
    // Of the policy that decides now: the one of the newest decision.
    const policy = state.requests.length ? state.requests[0].policy : null;
    const regret = state.regrets.find((one) => one.policy === policy);
    if (!regret) return ["–", "a request", "not yet known", null];
    const interval = regret.half_s === null ? "" : ` ± ${seconds(regret.half_s)}`;
    return [seconds(regret.mean_s), `a request${interval}`,
      `${regret.policy}, against hindsight; ${count(regret.requests)} requests`, regret.mean_s];
  }],
  ["KV in use", (state) => {
    const used = sum(state.replicas, (r) => r.device[0]), total = sum(state.replicas, (r) => sum(r.device, (n) => n));
    const cached = sum(state.replicas, (r) => r.device[2]);
    return [percent(used, total), `of ${count(total)} blocks`, `${percent(cached, total)} cached`, total ? used / total : null];
  }],
];

const numbers = NUMBERS.map(([title, read]) => {
  const value = make("span"), unit = make("small"), more = make("dd", { class: "more" });
  const canvas = make("canvas", { "aria-hidden": "true" });
  $("numbers").append(make("div", {}, make("dt", { text: title }),
    make("dd", { class: "value" }, value, " ", unit), more, make("dd", {}, canvas)));
  return { read, value, unit, more, canvas, history: [] };
});

function showNumbers(state) {
  for (const one of numbers) {
    const [value, unit, more, curve] = one.read(state);
    write(one.value, value);
    write(one.unit, unit);
    write(one.more, more);
    one.history.push(curve);
    if (one.history.length > HISTORY) one.history.shift();
    drawCurve(one.canvas, one.history);
  }
}

// ---------------------------------------------------------------------------------------------------
// Replicas
// ---------------------------------------------------------------------------------------------------

// Replicas up to which tiles have a size, the size, and its cells: rows of the device and of the host, and their pitch.
const SIZES = [[6, "large", 6, 2, 9], [30, "middle", 5, 2, 7], [60, "small", 4, 1, 5], [Infinity, "tiny", 4, 1, 5]];
const tiles = new Map(); // name of a replica -> its tile
const WORST = ["lost", "syncing", "draining", "attached"];
const ORDERS = {
  name: (a, b) => (a.name < b.name ? -1 : 1),
  load: (a, b) => b.running + b.waiting - a.running - a.waiting || b.device[0] - a.device[0] || ORDERS.name(a, b),
  hits: (a, b) => hitShare(a) - hitShare(b) || ORDERS.name(a, b),
  state: (a, b) => WORST.indexOf(a.state) - WORST.indexOf(b.state) || ORDERS.name(a, b),
};
const hitShare = (replica) => (replica.prompt_tokens ? replica.cached_tokens / replica.prompt_tokens : 2);

function newTile(name) {
  const parts = { name: make("span", { class: "name mono", text: name }), state: make("span", { class: "state" }),
    running: make("b"), rest: make("span"), device: make("canvas", { role: "img" }),
    host: make("canvas", { role: "img", class: "hidden" }), text: make("span", { class: "text" }) };
  const load = make("span", { class: "load" }, parts.running, parts.rest);
  const button = make("button", { class: "tile", type: "button", title: name },
    make("span", { class: "head" }, parts.name, parts.state, load), parts.device, parts.host, parts.text);
  button.addEventListener("click", () => openReplica(name));
  return { ...parts, item: make("li", {}, button), button, drawn: "" };
}

function blocksText(counts) {
  return STATE_NAMES.map((name, i) => `${counts[i].toLocaleString("en")} ${name}`).filter((_, i) => counts[i]).join(", ");
}

function showTile(tile, replica, size) {
  tile.button.dataset.state = replica.state;
  write(tile.state, replica.state === "attached" ? "" : replica.state);
  write(tile.running, count(replica.running));
  const waiting = replica.waiting ? ` + ${count(replica.waiting)}` : "";
  const isSmall = size === "small" || size === "tiny";
  write(tile.rest, isSmall ? waiting : `${replica.waiting ? ` running${waiting} waiting` : " running"}`);
  const width = tile.device.clientWidth;
  const drawn = [replica.device, replica.host, width, size, scheme.matches].join();
  if (tile.drawn !== drawn && width) {
    tile.drawn = drawn;
    const [, , rows, hostRows, pitch] = SIZES.find(([, name]) => name === size);
    tile.perCell = drawCells(tile.device, replica.device, width, rows, pitch);
    tile.device.setAttribute("aria-label", `Device: ${blocksText(replica.device) || "no blocks"}`);
    tile.host.classList.toggle("hidden", !replica.host);
    if (replica.host) {
      drawCells(tile.host, replica.host, width, hostRows, pitch);
      tile.host.setAttribute("aria-label", `Host memory: ${blocksText(replica.host)}`);
    }
  }
  const hits = `hits ${percent(replica.cached_tokens, replica.prompt_tokens)}`;
  const step = replica.step_s ? `${seconds(replica.step_s)}/step` : "";
  const queued = replica.prefill_tokens ? `${count(replica.prefill_tokens)} tok. to prefill` : "";
  const stalled = replica.stalled_s > 2 ? `no step for ${seconds(replica.stalled_s)}` : "";
  const total = sum(replica.device, (n) => n);
  const cell = Math.round(tile.perCell || 1);
  const host = replica.host ? ` + ${count(sum(replica.host, (n) => n))} host` : "";
  const blocks = `${count(total)}${host} blocks${cell > 1 ? `, ${count(cell)} a cell` : ""}`;
  const texts = isSmall ? [hits, stalled || step] : [blocks, hits, step, queued, stalled];
  write(tile.text, texts.filter(Boolean).join(" · "));
}

function showReplicas(state) {
  const replicas = [...state.replicas].sort(ORDERS[$("order").value]);
  const size = SIZES.find(([most]) => replicas.length <= most)[1];
  $("tiles").dataset.size = size;
  const names = new Set(replicas.map((replica) => replica.name));
  for (const [name, tile] of tiles) {
    if (names.has(name)) continue;
    tile.item.remove();
    tiles.delete(name);
  }
  replicas.forEach((replica, i) => {
    let tile = tiles.get(replica.name);
    if (!tile) tiles.set(replica.name, (tile = newTile(replica.name)));
    // Moving an element takes the focus from it, so only those at a wrong place move.
    if ($("tiles").children[i] !== tile.item) $("tiles").insertBefore(tile.item, $("tiles").children[i] || null);
    showTile(tile, replica, size);
  });
  const states = WORST.map((name) => [name, replicas.filter((r) => r.state === name).length]).filter(([, n]) => n);
  write($("replicas-note"), states.map(([name, n]) => `${n} ${name}`).reverse().join(", ") || "none is known to this router");
}

function flash(name, kind) {
  const tile = tiles.get(name);
  if (!tile) return;
  tile.button.classList.remove(kind);
  void tile.button.offsetWidth; // restarts the animation
  tile.button.classList.add(kind);
}

// ---------------------------------------------------------------------------------------------------
// Requests and migrations
// ---------------------------------------------------------------------------------------------------

// Terms of the cost -> their colour and words. A further copy's value lowers the cost and has no place in a bar.
const TERMS = [
  ["wait", "wait", ["wait_s"]],
  ["prefill", "prefill", ["prefill_s"]],
  ["copy", "copy", ["host_copy_s", "pull_s", "handover_s", "adapter_s"]],
  ["delay", "delay of others", ["interference_s", "later_s", "decode_s"]],
  ["memory", "memory", ["eviction_s", "memory_s"]],
];
for (const [kind, words] of TERMS) {
  $("terms").append(make("li", {}, make("i", { class: `swatch ${kind}` }), words));
}

// A bar of the terms above 0; `longest` is the cost of a bar that fills its place.
function termBar(score, longest) {
  const bar = make("span", { class: "stack", "aria-hidden": "true" });
  for (const [kind, words, names] of TERMS) {
    const value = sum(names, (name) => Math.max(0, score.terms[name] || 0));
    if (!value || !longest) continue;
    const part = make("i", { class: kind, title: `${words} ${seconds(value)}` });
    part.style.width = `${(100 * value) / longest}%`;
    bar.append(part);
  }
  return bar;
}

function share(part, whole) {
  const inner = make("i");
  inner.style.width = `${whole ? (100 * part) / whole : 0}%`;
  return make("span", { class: "share" }, make("span", { class: "track", "aria-hidden": "true" }, inner), percent(part, whole));
}

const rows = new Map(); // key of a decision -> its row and what it shows
const seen = new Set(); // keys of decisions that were shown before, of the present list

// The same key for the same decision of each state. Choices of one request may share all else, so they are counted.
function keyed(decisions) {
  const times = new Map();
  return decisions.map((decision) => {
    const key = [decision.answer_id, decision.attempt, decision.ranking ? decision.ranking[0].replica : decision.replica].join();
    times.set(key, (times.get(key) || 0) + 1);
    return [`${key},${times.get(key)}`, decision];
  });
}

function requestButton(decision) {
  const button = make("button", { class: "link mono", type: "button", text: decision.request_id, title: decision.request_id });
  button.addEventListener("click", () => openRequest(decision));
  return button;
}

function fillRow(row, decision, longest) {
  const [best, second] = decision.ranking;
  const request = make("td", {}, requestButton(decision));
  if (decision.attempt > 1) request.append(make("span", { class: "tag", text: `attempt ${decision.attempt}` }));
  const cached = decision.outcome ? decision.outcome.cached_tokens : best.cached_tokens + best.host_cached_tokens;
  const gap = second ? `+${seconds(second.cost_s - best.cost_s)} on ` : "no other";
  row.replaceChildren(
    make("td", { text: row.dataset.time, class: "note" }),
    request,
    make("td", { class: "number wide", text: decision.prompt_tokens.toLocaleString("en") }),
    make("td", { class: "wide", title: decision.outcome ? "" : "predicted" }, share(cached, decision.prompt_tokens)),
    make("td", { class: "mono", text: best.replica }),
    make("td", { class: "grow" }, make("span", { class: "cost" },
      make("span", { class: "sum", text: seconds(best.cost_s) }), termBar(best, longest))),
    make("td", { class: "wide note" }, gap, make("span", { class: "mono", text: second ? second.replica : "" })),
    make("td", { class: "number", text: decision.outcome ? seconds(decision.outcome.ttft_s) : "…" }),
  );
}

function showRequests(state) {
  const list = keyed(state.requests);
  const isFirst = !previous || previous.router !== state.router;
  const longest = Math.max(0, ...state.requests.map((d) => sum(Object.values(d.ranking[0].terms), (s) => Math.max(0, s))));
  const keys = new Set(list.map(([key]) => key));
  const focused = document.activeElement?.closest("#requests tr");
  for (const [key, entry] of rows) {
    if (keys.has(key)) continue;
    entry.row.remove();
    rows.delete(key);
  }
  list.forEach(([key, decision], i) => {
    let entry = rows.get(key);
    if (!entry) {
      rows.set(key, (entry = { row: make("tr", { "data-time": clock(decision.decided) }), shown: "" }));
      if (!isFirst) flash(decision.ranking[0].replica, "chosen");
    }
    const shown = JSON.stringify([decision.outcome, longest]);
    if (entry.shown !== shown) {
      const hadFocus = entry.row === focused;
      entry.shown = shown;
      fillRow(entry.row, decision, longest);
      if (hadFocus) entry.row.querySelector("button").focus();
    }
    if ($("requests").children[i] !== entry.row) $("requests").insertBefore(entry.row, $("requests").children[i] || null);
  });
  const policy = state.requests.length ? `policy ${state.requests[0].policy}; ` : "";
  const kept = state.num_kept ? `the newest ${state.requests.length}` : "router.max_explained_decisions is 0: no decision is kept";
  write($("requests-note"), policy + kept);
}

const moves = new Map(); // key of a migration -> its item

function showMoves(state) {
  const list = keyed(state.moves);
  const isFirst = !previous || previous.router !== state.router;
  const keys = new Set(list.map(([key]) => key));
  for (const [key, item] of moves) {
    if (keys.has(key)) continue;
    item.remove();
    moves.delete(key);
  }
  list.forEach(([key, move], i) => {
    let item = moves.get(key);
    if (!item) {
      moves.set(key, (item = make("li", {}, make("span", { class: "note", text: `${clock(move.decided)} ` }), requestButton(move),
        make("span", { class: "way mono", text: `${move.left} → ${move.replica}` }))));
      if (!isFirst) {
        flash(move.left, "left");
        flash(move.replica, "chosen");
      }
    }
    if ($("moves").children[i] !== item) $("moves").insertBefore(item, $("moves").children[i] || null);
  });
  $("moves-note").hidden = list.length > 0;
}

// ---------------------------------------------------------------------------------------------------
// Details of a request or a replica
// ---------------------------------------------------------------------------------------------------

let openName = null; // the replica whose details are open

function openDetail(title, ...content) {
  openName = null;
  $("detail-title").textContent = title;
  $("detail-body").replaceChildren(...content);
  if (!$("detail").open) $("detail").showModal();
}

function facts(pairs) {
  const list = make("dl", { class: "facts" });
  for (const [name, value] of pairs) list.append(make("dt", { text: name }), make("dd", { text: value }));
  return list;
}

async function openRequest({ request_id: requestId, answer_id: answerId }) {
  openDetail(`Request ${requestId}`, make("p", { class: "note", text: "asking all routers…" }));
  const url = BASE.replace(/\/ui$/, "/v1/router/explain") + `?request_id=${encodeURIComponent(answerId)}`;
  try {
    const answer = await fetch(url, { cache: "no-store" });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error.message);
    openDetail(`Request ${requestId}`, ...found.data.flatMap(attempt));
  } catch (error) {
    openDetail(`Request ${requestId}`, make("p", { text: error.message }));
  }
}

// One decision: what was known, each replica's cost by its terms, and what came of it.
function attempt(decision) {
  const names = Object.keys(decision.ranking[0].terms).filter((name) => decision.ranking.some((score) => score.terms[name]));
  const longest = Math.max(...decision.ranking.map((score) => sum(Object.values(score.terms), (s) => Math.max(0, s))));
  const head = make("tr", {}, ...["Replica", "Cached", "Cost", ...names.map((name) => name.replace(/_s$/, "").replaceAll("_", " ")), "By terms"]
    .map((text, i) => make("th", { scope: "col", text, class: i && i <= names.length + 2 ? "number" : "" })));
  const body = decision.ranking.map((score, i) => make("tr", { class: i ? "" : "best" },
    make("td", { class: "mono", text: score.replica }),
    make("td", { class: "number", text: (score.cached_tokens + score.host_cached_tokens).toLocaleString("en") }),
    make("td", { class: "number", text: seconds(score.cost_s) }),
    ...names.map((name) => make("td", { class: "number", text: seconds(score.terms[name]) })),
    make("td", { class: "grow" }, make("span", { class: "cost" }, termBar(score, longest)))));
  const left = decision.left_replica ? `, after it left ${decision.left_replica}` : "";
  const outcome = decision.outcome
    ? `First token after ${seconds(decision.outcome.ttft_s)} from ${decision.outcome.replica}, ${seconds(decision.outcome.queue_s)} of it in the replica's queue; `
      + `${decision.outcome.cached_tokens.toLocaleString("en")} of ${decision.prompt_tokens.toLocaleString("en")} prompt tokens were cached.`
    : "No first token of this attempt yet.";
  return [
    make("h3", { text: `Attempt ${decision.attempt}, ${clock(decision.decided)}${left}` }),
    make("p", { class: "note", text: `${decision.router} chose among ${decision.num_replicas} replicas, policy ${decision.policy}. ${outcome}` }),
    make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)),
  ];
}

function openReplica(name) {
  openDetail(`Replica ${name}`);
  openName = name;
  showOpenReplica(previous);
}

function showOpenReplica(state) {
  const replica = openName !== null && state?.replicas.find((one) => one.name === openName);
  if (!replica) return;
  $("detail-body").replaceChildren(facts([
    ["State", `${replica.state}, last report ${seconds(replica.age_s)} ago`],
    ["Requests", `${replica.running} running, ${replica.waiting} waiting`],
    ["Prefill", `${replica.prefill_tokens.toLocaleString("en")} tokens to compute`],
    ["Decode", `${replica.decode_tokens.toLocaleString("en")} cached tokens read in a step of ${seconds(replica.step_s)}`],
    ["Device", blocksText(replica.device) || "no blocks"],
    ["Host memory", replica.host ? blocksText(replica.host) : "no host tier"],
    ["Routing index", `${replica.indexed.toLocaleString("en")} blocks of 64 tokens known to this router`],
    ["Prefix hits", `${percent(replica.cached_tokens, replica.prompt_tokens)} of the prompt tokens of ${replica.answered} recent requests, predicted ${percent(replica.predicted_tokens, replica.prompt_tokens)}`],
    ["Engine", `${replica.steps.toLocaleString("en")} steps, ${replica.preemptions} preemptions${replica.stalled_s > 0 ? `, no step for ${seconds(replica.stalled_s)}` : ""}`],
  ]));
}

$("close").addEventListener("click", () => $("detail").close());
$("detail").addEventListener("close", () => { openName = null; });

// ---------------------------------------------------------------------------------------------------
// The connection
// ---------------------------------------------------------------------------------------------------

let paused = false;
let heard = 0; // time of the last state, ms
let latest = null;

function routersText({ router, routers, num_routers: number }) {
  if (number === 1) return router;
  if (routers.length >= number) return `${number} routers, this is from ${router}`;
  return `${router}: ${routers.length} of ${number} routers answered, requests of the others are missing`;
}

function show(state) {
  write($("model"), state.model);
  write($("router"), routersText(state));
  document.title = `Quire: ${state.model}`;
  updateRates(state);
  showNumbers(state);
  showReplicas(state);
  showRequests(state);
  showMoves(state);
  previous = state;
  showOpenReplica(state);
}

function tell(state, text) {
  $("connection").dataset.state = state;
  write($("connection"), text);
  document.querySelector("main").classList.toggle("stale", state === "lost");
}

// Turns columns, as they come, into one object for each row.
function rowsOf(columns) {
  const [names, values] = [Object.keys(columns), Object.values(columns)];
  return (values[0] || []).map((_, i) => Object.fromEntries(names.map((name, n) => [name, values[n][i]])));
}

// Yields the data of each event of a response.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      if (text.startsWith("data: ")) yield text.slice(6, end);
    }
  }
}

async function follow() {
  for (let delay = RETRY_MS[0]; ; delay = Math.min(2 * delay, RETRY_MS[1])) {
    let problem = "the router ended the stream";
    const abort = new AbortController();
    const timer = setInterval(() => {
      if (document.hidden || Date.now() - heard > SILENT_MS) abort.abort();
    }, 1000);
    heard = Date.now();
    try {
      const response = await fetch(`${BASE}/state`, { headers: { accept: "text/event-stream" }, cache: "no-store", signal: abort.signal });
      if (!response.ok) throw new Error((await response.json()).error.message);
      for await (const data of events(response)) {
        heard = Date.now();
        delay = RETRY_MS[0];
        latest = JSON.parse(data);
        latest.replicas = rowsOf(latest.replicas);
        if (!paused) show(latest);
        tell("live", paused ? "paused" : "live");
      }
    } catch (error) {
      problem = error.name === "AbortError" ? "no news from the router" : error.message;
    }
    clearInterval(timer);
    abort.abort();
    if (!document.hidden) tell("lost", `connecting again: ${problem}`);
    await wait(delay * (0.75 + Math.random() / 2));
    while (document.hidden) await wait(200);
  }
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  if (latest && !paused) show(latest);
});
$("order").addEventListener("change", () => latest && showReplicas(latest));
addEventListener("resize", () => latest && showReplicas(latest));
scheme.addEventListener("change", () => {
  readColours();
  if (latest) showReplicas(latest);
});

readColours();
follow();
