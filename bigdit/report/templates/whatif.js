// Shows the point of the plan's grid that sliders and choices ask for. Nothing is computed here but what another card
// leaves of it: all figures are the plan's, as JSON beside this script. The address keeps what is asked.
const given = JSON.parse(document.getElementById("whatif-data").textContent);
const at = (name) => document.getElementById(`whatif-${name}`);
for (const setting of given.settings) setting.points = setting.points.map(named);
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

const sizesOf = (setting) => distinct(setting.points.map((point) => point.micro_batch_size));
const blocksOf = (setting) => distinct(setting.points.map((point) => point.checkpointed_blocks));

// What is asked, or what is nearest to it where that is not in the grid.
function answer() {
  const setting = given.settings.find((each) => each.strategy === asked.strategy) ?? given.settings[0];
  const size = nearest(sizesOf(setting), asked["micro-batch"]);
  const blocks = nearest(blocksOf(setting), asked.blocks);
  const point = setting.points.find((each) => each.micro_batch_size === size && each.checkpointed_blocks === blocks);
  const room = setting.rooms.find((each) => each.card === asked.card) ?? setting.rooms[0];
  asked = { strategy: setting.strategy, "micro-batch": size, blocks, card: room.card };
  return { setting, point, room, ...judged(setting, point, room) };
}

// On the plan's own card as the plan has it; on another one by the same bytes, which nothing has run there.
function judged(setting, point, room) {
  if (room === setting.rooms[0]) return { verdict: point.verdict, found: point.found };
  const { low_bytes: low, high_bytes: high } = point.process;
  const verdict = high <= room.usable_bytes ? "FITS" : low <= room.usable_bytes ? "TIGHT" : "DOES NOT FIT";
  return { verdict: point.host_bytes <= given.hostMemory ? verdict : "DOES NOT FIT", found: "predicted" };
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
  slider.value = sizes.indexOf(size);
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
}

function showVerdict({ point, room, verdict, found }) {
  const { process } = point;
  const left = room.usable_bytes - process.high_bytes;
  const host = point.host_bytes > given.hostMemory;
  const short = `; ${gib(point.host_bytes)} of host memory a machine, of ${gib(given.hostMemory)}`;
  const wants = `${between(process.low_bytes, process.high_bytes)} of ${gib(room.usable_bytes)} usable`;
  const rest = left >= 0 ? `${gib(left)} left` : `${gib(-left)} too much`;
  at("verdict").className = `verdict ${CLASSES[verdict]}`;
  at("verdict").querySelector("strong").textContent = (found === "predicted" ? "~" : "") + verdict;
  at("verdict").querySelector("span").textContent =
    `wants ${wants}, ${rest}${host ? short : ""}; ${given.found[found]}`;
}

// The process at the high end in parts, each with a letter and a colour of its own: what is live by category, idle in the
// allocator, not known, beside torch.
function partsOf(point, beside) {
  const allocated = point.at_peak.reduce((sum, bytes) => sum + bytes, 0);
  const idle = Math.max(point.peak_reserved_bytes - allocated, 0);
  const margin = point.process.high_bytes - beside - point.peak_reserved_bytes;
  const mark = point.at_peak_rehearsed ? "" : "~";
  const colours = Object.entries(given.categories);
  const live = colours.map(([name, colour], number) => [name, colour, point.at_peak[number], mark]);
  const parts = [
    ...live,
    ["idle in the allocator", "--idle", idle, mark],
    ["and at most", "--beside", margin, ""],
    ["CUDA context, NCCL", "--beside", beside, ""],
  ];
  return parts.map((part, number) => [LETTERS[number], ...part]).filter(([, , , bytes]) => bytes > 0);
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

function showFacts({ setting, point, room, found }) {
  const facts = [
    ["reserved by torch", (found === "predicted" ? "~" : "") + gib(point.peak_reserved_bytes), "with expandable segments"],
    ["decides", point.phase, "the highest peak of all phases"],
    ["on the host", gib(point.host_bytes), `of ${gib(given.hostMemory)} a machine`],
  ];
  const speed = point.images_per_second_per_card;
  if (room === setting.rooms[0]) facts.push([`${given.samples}/s a card`, speed, room.card]);
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
}

function changed(change) {
  change();
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
addEventListener("hashchange", recall);
document.getElementById("whatif").hidden = false;
recall();
