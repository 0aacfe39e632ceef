// Shows the chosen point, or the nearest one that ran. Only the headroom on another GPU is computed here. The address
// keeps the choices.
const given = JSON.parse(document.getElementById("whatif-data").textContent);
const at = (name) => document.getElementById(`whatif-${name}`);
for (const setting of given.settings) setting.points = setting.points.map(named);
const keys = Object.keys(given.choices);
const distinct = (values) => [...new Set(values)];
const CLASSES = { FITS: "fits", TIGHT: "tight", "DOES NOT FIT": "no" };
const WIDE = 5; // percent of the bar: enough for a letter, also on a narrow screen
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
const FIELDS = { "micro-batch": "micro_batch_size", blocks: "checkpointed_blocks" };
let moved = "micro-batch"; // the slider that was moved last keeps its place
let asked = { ...given.start };

function named(values) {
  const point = Object.fromEntries(given.fields.map((name, number) => [name, values[number]]));
  const [low_bytes, high_bytes] = point.process;
  return { ...point, process: { low_bytes, high_bytes } };
}

// Bytes in a unit that suits them or `like`.
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

// All sizes of a slider that ran in the setting.
const sizesOf = (setting, key) => distinct(setting.points.map((point) => point[FIELDS[key]])).sort((a, b) => a - b);

// The chosen point, or the nearest one that ran: the slider that was not moved gives way.
function answer() {
  const setting = given.settings.find((each) => each.strategy === asked.strategy) ?? given.settings[0];
  const room = setting.rooms.find((each) => each.gpu === asked.gpu) ?? setting.rooms[0];
  let points = setting.points;
  for (const key of Object.keys(FIELDS).sort((a, b) => (b === moved) - (a === moved))) {
    const size = nearest(points.map((point) => point[FIELDS[key]]), asked[key]);
    points = points.filter((point) => point[FIELDS[key]] === size);
  }
  const [point] = points;
  const sizes = { "micro-batch": point.micro_batch_size, blocks: point.checkpointed_blocks };
  asked = { strategy: setting.strategy, ...sizes, gpu: room.gpu };
  return { setting, room, point };
}

// CPU memory that is only assumed decides no verdict.
function shortOfHost(setting, point) {
  return !setting.hostAssumed && point.host_bytes > setting.hostMemory;
}

// The plan's verdict on its own GPU; on another GPU the verdict for the same bytes.
function judged(setting, point, room) {
  if (room === setting.rooms[0]) return point.verdict;
  const { low_bytes: low, high_bytes: high } = point.process;
  const verdict = high <= room.usable_bytes ? "FITS" : low <= room.usable_bytes ? "TIGHT" : "DOES NOT FIT";
  return shortOfHost(setting, point) ? "DOES NOT FIT" : verdict;
}

// The setting with this choice and those before it, and as many of the others as possible.
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

function slide(slider, sizes, size) {
  slider.max = sizes.length - 1;
  slider.value = sizes.indexOf(size);
  slider.disabled = sizes.length < 2;
  slider.setAttribute("aria-valuetext", size);
  document.getElementById(`${slider.id}-value`).textContent = size;
}

function showAsked({ setting, room }) {
  keys.forEach((key, number) => {
    const before = keys.slice(0, number);
    const alike = given.settings.filter((each) => before.every((name) => each.words[name] === setting.words[name]));
    fill(at(key), distinct(alike.map((each) => each.words[key])), setting.words[key]);
  });
  fill(at("gpu"), setting.rooms.map((each) => each.gpu), room.gpu);
  for (const key of Object.keys(FIELDS)) slide(at(key), sizesOf(setting, key), asked[key]);
}

function showVerdict({ setting, point, room }) {
  const { process } = point;
  const [own] = setting.rooms;
  const verdict = judged(setting, point, room);
  const left = room.usable_bytes - process.high_bytes;
  const needs = `needs ${between(process.low_bytes, process.high_bytes)} of ${gib(room.usable_bytes)} usable`;
  const rest = left >= 0 ? `${gib(left)} left` : `${gib(-left)} too much`;
  const cpu = `; ${gib(point.host_bytes)} of CPU memory per machine, of ${gib(setting.hostMemory)}`;
  const how = `${room === own ? "ran" : "by the bytes that it took"} on an emulated ${own.gpu}`;
  at("verdict").className = `verdict ${CLASSES[verdict]}`;
  at("verdict").querySelector("strong").textContent = verdict;
  at("verdict").querySelector("span").textContent =
    `${needs}, ${rest}${shortOfHost(setting, point) ? cpu : ""}; ${how}`;
}

// Parts of the process at the high end, each with a letter and a colour: allocated memory (by category, if recorded),
// idle in the allocator, safety margin, and non-torch memory.
function partsOf(point, nonTorch) {
  const allocated = point.peak_allocated_bytes;
  const idle = Math.max(point.peak_reserved_bytes - allocated, 0);
  const margin = point.process.high_bytes - nonTorch - point.peak_reserved_bytes;
  const colours = Object.entries(given.categories);
  const live = point.at_peak.some((bytes) => bytes > 0)
    ? colours.map(([name, colour], number) => [name, colour, point.at_peak[number]])
    : [["allocated", "--accent", allocated]];
  const parts = [
    ...live,
    ["idle in the allocator", "--idle", idle],
    ["safety margin", "--non-torch", margin],
    ["CUDA context, NCCL", "--non-torch", nonTorch],
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
  for (const [letter, name, colour, bytes] of partsOf(point, setting.nonTorch)) {
    const span = made("span", "");
    span.style.cssText = `width: ${percent(bytes)}%; background: var(${colour})`;
    if (percent(bytes) >= WIDE) span.append(made("i", letter));
    const row = made("li", `${letter} ${name} ${gib(bytes)}`);
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

function showFacts({ setting, point, room }) {
  const machine = setting.hostAssumed ? "assumed" : "per machine";
  const facts = [
    ["reserved by torch", gib(point.peak_reserved_bytes), "with expandable segments"],
    ["peak phase", point.phase, "the highest peak of all phases"],
    ["CPU memory", gib(point.host_bytes), `of ${gib(setting.hostMemory)} ${machine}`],
  ];
  const speed = point.samples_per_second_per_gpu;
  if (room === setting.rooms[0]) facts.push([`${given.samples}/s per GPU`, speed, room.gpu]);
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
  showVerdict(found);
  showBytes(found);
  showFacts(found);
}

// A frame in a notebook has no address.
function remember() {
  const url = new URL(location.href);
  if (url.protocol === "about:") return;
  url.hash = new URLSearchParams(asked);
  history.replaceState(null, "", url);
}

function recall() {
  const stored = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  asked = { ...given.start };
  for (const key of Object.keys(asked)) {
    const value = typeof asked[key] === "number" ? parseInt(stored[key], 10) : stored[key];
    asked[key] = value || value === 0 ? value : asked[key];
  }
  show();
  showMissing(stored);
}

// The choices that did not run, and what is shown instead.
function showMissing(wanted) {
  const differs = Object.keys(wanted).filter((key) => `${wanted[key]}` !== `${asked[key]}`);
  const lines = differs.map((key) => {
    const shown = key in asked ? `shown: ${asked[key]}` : "no such choice";
    return `${key} “${`${wanted[key]}`.slice(0, 40)}” (${shown})`;
  });
  at("instead").hidden = !lines.length;
  at("instead").textContent = `These did not run: ${lines.join("; ")}`;
}

function changed(change) {
  change();
  const wanted = { ...asked };
  show();
  showMissing(wanted);
  remember();
}

for (const key of keys) at(key).addEventListener("change", (event) => changed(() => choose(key, event.target.value)));
at("gpu").addEventListener("change", (event) => changed(() => (asked.gpu = event.target.value)));
for (const key of Object.keys(FIELDS)) {
  at(key).addEventListener("input", (event) => changed(() => {
    const setting = given.settings.find((each) => each.strategy === asked.strategy);
    asked[key] = sizesOf(setting, key)[event.target.value];
    moved = key;
  }));
}
document.querySelector("#whatif form").addEventListener("submit", (event) => event.preventDefault()); // by Enter
addEventListener("hashchange", recall);
document.getElementById("whatif").hidden = false;
recall();
