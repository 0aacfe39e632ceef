// Shows what sliders and choices ask for: a point of the plan's grid, or what live.js is answered. Nothing is computed here
// but what another card leaves of a point. The address keeps what is asked.
const given = JSON.parse(document.getElementById("whatif-data").textContent);
const at = (name) => document.getElementById(`whatif-${name}`);
for (const setting of given.settings) setting.points = setting.points?.map(named);
const keys = Object.keys(given.choices);
const distinct = (values) => [...new Set(values)];
const CLASSES = { FITS: "fits", TIGHT: "tight", "DOES NOT FIT": "no" };
const WIDE = 5; // percent of the bar: room for a letter, on a narrow screen too
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
let asked = { ...given.start };

function named(values) {
  const point = Object.fromEntries(given.fields.map((name, number) => [name, values[number]]));
  const [low_bytes, high_bytes] = point.process;
  return { ...point, process: { low_bytes, high_bytes } };
}

// Bytes in the unit that suits them, or those of the same line.
function gib(bytes, like = bytes) {
  const units = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  const [unit, name] = units.find(([unit]) => Math.abs(like) >= Math.max(unit * 0.1, 1024)) ?? [1, "B"];
  return `${(bytes / unit).toFixed(unit === 1 ? 0 : 2)} ${name}`;
}

function between(low, high) {
  const [first, last] = [gib(low, high), gib(high)];
  return first === last ? last : `${first.split(" ")[0]}–${last}`;
}

function nearest(sizes, wanted) {
  return sizes.reduce((best, size) => (Math.abs(size - wanted) < Math.abs(best - wanted) ? size : best));
}

const sizesOf = (setting) => setting.sizes ?? distinct(setting.points.map((point) => point.micro_batch_size));
const blocksOf = (setting) => setting.blocks ?? distinct(setting.points.map((point) => point.checkpointed_blocks));

// What is asked, or what is nearest to it where that is not in the grid.
function answer() {
  const setting = given.settings.find((each) => each.strategy === asked.strategy) ?? given.settings[0];
  const wanted = asked["micro-batch"];
  const size = setting.any ? Math.min(Math.max(wanted, 1), given.live.largest) : nearest(sizesOf(setting), wanted);
  const blocks = nearest(blocksOf(setting), asked.blocks);
  const room = setting.rooms.find((each) => each.card === asked.card) ?? setting.rooms[0];
  asked = { strategy: setting.strategy, "micro-batch": size, blocks, card: room.card };
  return { setting, room };
}

function ofGrid({ setting, room }) {
  const { "micro-batch": size, blocks } = asked;
  const point = setting.points.find((each) => each.micro_batch_size === size && each.checkpointed_blocks === blocks);
  const { verdict, found } = judged(setting, point, room);
  return { setting, room, point, verdict, predicted: found === "predicted", how: given.found[found] };
}

// Host memory that is only assumed is no verdict.
function shortOfHost(setting, point) {
  return !setting.hostAssumed && point.host_bytes > setting.hostMemory;
}

// On the plan's own card as the plan has it; on another one by the same bytes, which nothing has run there.
function judged(setting, point, room) {
  if (room === setting.rooms[0]) return { verdict: point.verdict, found: point.found };
  const { low_bytes: low, high_bytes: high } = point.process;
  const verdict = high <= room.usable_bytes ? "FITS" : low <= room.usable_bytes ? "TIGHT" : "DOES NOT FIT";
  return { verdict: shortOfHost(setting, point) ? "DOES NOT FIT" : verdict, found: "predicted" };
}

// The setting that has this choice and those before it, and of the others as many as there can be.
function choose(key, value) {
  const now = given.settings.find((each) => each.strategy === asked.strategy).words;
  const wanted = { ...now, [key]: value };
  const fixed = keys.slice(0, keys.indexOf(key) + 1);
  const possible = given.settings.filter((each) => fixed.every((name) => each.words[name] === wanted[name]));
  const kept = (each) => keys.filter((name) => each.words[name] === wanted[name]).length;
  asked.strategy = possible.reduce((best, each) => (kept(each) > kept(best) ? each : best)).strategy;
}

function fill(select, values, value) {
  select.replaceChildren(...values.map((each) => new Option(each, each, false, each === value)));
  select.disabled = values.length < 2;
}

function slide(slider, sizes, size, text) {
  slider.max = sizes.length - 1;
  slider.value = sizes.indexOf(nearest(sizes, size));
  slider.disabled = sizes.length < 2;
  slider.setAttribute("aria-valuetext", text);
  document.getElementById(`${slider.id}-said`).textContent = text;
}

function showAsked({ setting, room }) {
  keys.forEach((key, number) => {
    const before = keys.slice(0, number);
    const alike = given.settings.filter((each) => before.every((name) => each.words[name] === setting.words[name]));
    fill(at(key), distinct(alike.map((each) => each.words[key])), setting.words[key]);
  });
  fill(at("card"), setting.rooms.map((each) => each.card), room.card);
  const blocks = blocksOf(setting);
  slide(at("micro-batch"), sizesOf(setting), asked["micro-batch"], `${asked["micro-batch"]}`);
  slide(at("blocks"), blocks, asked.blocks, `${asked.blocks}`);
  if (at("exactly")) at("exactly").value = asked["micro-batch"];
}

function showVerdict({ setting, point, room, verdict, predicted, how }) {
  const { process } = point;
  const left = room.usable_bytes - process.high_bytes;
  const host = shortOfHost(setting, point);
  const short = `; ${gib(point.host_bytes)} of host memory a machine, of ${gib(setting.hostMemory)}`;
  const wants = `${between(process.low_bytes, process.high_bytes)} of ${gib(room.usable_bytes)} usable`;
  const more = point.ran_out && !point.at_peak; // where it ran out of memory, and no rehearsal says of how much
  const rest = left >= 0 ? `${gib(left)} left` : `${gib(-left)} too much`;
  at("verdict").className = `verdict ${CLASSES[verdict]}`;
  at("verdict").querySelector("strong").textContent = (predicted ? "~" : "") + verdict;
  at("verdict").querySelector("span").textContent =
    more ? `wants more than there is; ${how}` : `wants ${wants}, ${rest}${host ? short : ""}; ${how}`;
}

// The process at the high end in parts, each with a letter and a colour of its own: what is live by category if that is
// known, idle in the allocator, not known, beside torch.
function partsOf(point, beside) {
  const allocated = point.at_peak?.reduce((sum, bytes) => sum + bytes, 0) ?? point.peak_allocated_bytes;
  const idle = Math.max(point.peak_reserved_bytes - allocated, 0);
  const margin = point.process.high_bytes - beside - point.peak_reserved_bytes;
  const mark = point.at_peak_rehearsed ? "" : "~";
  const colours = Object.entries(given.categories);
  const live = point.at_peak
    ? colours.map(([name, colour], number) => [name, colour, point.at_peak[number], mark])
    : [["allocated", "--accent", allocated, ""]];
  const parts = [
    ...live,
    ["idle in the allocator", "--idle", idle, mark],
    ["and at most", "--beside", margin, ""],
    ["CUDA context, NCCL", "--beside", beside, ""],
  ];
  return parts.filter(([, , bytes]) => bytes > 0).map((part, number) => [LETTERS[number], ...part]);
}

function made(tag, text) {
  return Object.assign(document.createElement(tag), { textContent: text });
}

function showBytes({ setting, point, room }) {
  const longest = Math.max(room.usable_bytes, point.process.high_bytes);
  const percent = (bytes) => (100 * bytes) / longest;
  const spans = [];
  const rows = [];
  for (const [letter, name, colour, bytes, mark] of partsOf(point, setting.beside)) {
    const span = made("span", "");
    span.style.cssText = `width: ${percent(bytes)}%; background: var(${colour})`;
    if (percent(bytes) >= WIDE) span.append(made("i", letter));
    const row = made("li", `${letter} ${name} ${mark}${gib(bytes)}`);
    row.style.setProperty("--colour", `var(${colour})`);
    spans.push(span);
    rows.push(row);
  }
  at("bar").replaceChildren(...spans);
  at("parts").replaceChildren(...rows);
  at("line").style.left = `${percent(room.usable_bytes)}%`;
  const mark = at("line").firstElementChild;
  mark.className = percent(room.usable_bytes) < 45 ? "after" : "";
  mark.textContent = `usable ${gib(room.usable_bytes)}`;
}

function showFacts({ setting, point, room, predicted }) {
  const facts = [
    ["reserved by torch", (predicted ? "~" : "") + gib(point.peak_reserved_bytes), "with expandable segments"],
  ];
  if (point.phase) {
    facts.push(["decides", point.phase, "the highest peak of all phases"]);
    const machine = setting.hostAssumed ? "assumed" : "a machine";
    facts.push(["on the host", gib(point.host_bytes), `of ${gib(setting.hostMemory)} ${machine}`]);
  }
  const speed = point.samples_per_second_per_card;
  if (speed && (given.live || room === setting.rooms[0])) facts.push([`${given.samples}/s a card`, speed, room.card]);
  if (point.seconds_per_step) facts.push(["a step", point.seconds_per_step, "of all its micro-batches"]);
  const pairs = facts.map(([name, value, more]) => {
    const pair = document.createElement("div");
    pair.append(made("dt", name), made("dd", value), made("dd", more));
    return pair;
  });
  at("facts").replaceChildren(...pairs);
}

function show() {
  const found = answer();
  showAsked(found);
  if (given.live) askLive(found);
  else showFound(ofGrid(found));
}

function showFound(found) {
  showVerdict(found);
  showBytes(found);
  showFacts(found);
}

// A notebook's frame has no address of its own.
function remember() {
  const url = new URL(location.href);
  if (url.protocol === "about:") return;
  url.hash = new URLSearchParams(asked);
  history.replaceState(null, "", url);
}

function recall() {
  const said = new URLSearchParams(location.hash.slice(1));
  asked = { ...given.start };
  for (const key of Object.keys(asked)) {
    const value = typeof asked[key] === "number" ? parseInt(said.get(key), 10) : said.get(key);
    asked[key] = value || value === 0 ? value : asked[key];
  }
  show();
  sayRefused(said);
}

// What of the address could not be taken, and what is shown instead.
function sayRefused(said) {
  const quoted = (key) => `${key} “${said.get(key).slice(0, 40)}”`;
  const differs = [...new Set(said.keys())].filter((key) => said.get(key) !== `${asked[key]}`);
  const lines = differs.map((key) => `${quoted(key)} (${key in asked ? `shown: ${asked[key]}` : "no such choice"})`);
  refuse(lines.length ? `The address asks for what is not here: ${lines.join("; ")}` : "");
}

function refuse(text) {
  at("refused").hidden = !text;
  at("refused").textContent = text;
}

function changed(change) {
  change();
  sayRefused(new URLSearchParams());
  show();
  remember();
}

for (const key of keys) at(key).addEventListener("change", (event) => changed(() => choose(key, event.target.value)));
at("card").addEventListener("change", (event) => changed(() => (asked.card = event.target.value)));
for (const [key, sizes] of [["micro-batch", sizesOf], ["blocks", blocksOf]]) {
  at(key).addEventListener("input", (event) => changed(() => {
    const setting = given.settings.find((each) => each.strategy === asked.strategy);
    asked[key] = sizes(setting)[event.target.value];
  }));
}
at("exactly")?.addEventListener("change", exactly);
document.querySelector("#whatif form").addEventListener("submit", (event) => event.preventDefault()); // by Enter
addEventListener("hashchange", recall);
document.getElementById("whatif").hidden = false;
recall();
