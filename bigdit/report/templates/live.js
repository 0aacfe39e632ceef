// Asks the server that handed this page out, at each change: first whether it runs, which an emulated card says within a
// second, then what is live at its peak, which is rehearsed. No answer is shown over a newer question.
const PAUSE = 120; // milliseconds without another change
const PATHS = { run: "runs…", rehearse: "is rehearsed…" };
let latest = 0;

async function askLive({ setting, room }) {
  const number = ++latest;
  const paths = given.live.emulated ? ["run", "rehearse"] : ["rehearse"];
  showWaiting(PATHS[paths[0]]);
  let how = "";
  await new Promise((done) => setTimeout(done, PAUSE));
  for (const path of paths) {
    if (number !== latest) return;
    const said = await posted(path);
    if (number !== latest) return;
    if (said.error ?? said.dropped) {
      showNone(path, said);
      return;
    }
    how ||= `${said.ran ? `ran on an emulated ${room.card}` : "rehearsed"}, ${said.seconds.toFixed(1)} s`;
    showLive(setting, room, said, how);
  }
}

async function posted(path) {
  const body = JSON.stringify({
    strategy: asked.strategy,
    card: asked.card,
    micro_batch_size: asked["micro-batch"],
    checkpointed_blocks: asked.blocks,
  });
  try {
    const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body });
    return await answer.json();
  } catch {
    return { error: "the server does not answer; `bigdit whatif` starts it" };
  }
}

// What ran is known by its totals, until its rehearsal says what they are made of.
function showLive(setting, room, said, how) {
  const at_peak = said.at_peak && Object.keys(given.categories).map((name) => said.at_peak[name] ?? 0);
  showFound({
    setting, room, verdict: said.verdict, predicted: false, how,
    point: { ...said, at_peak, at_peak_rehearsed: true },
  });
  wait(false);
  const parts = at_peak ? `as rehearsed, ${said.seconds.toFixed(1)} s` : "is rehearsed…";
  at("how").textContent = said.ran ? `By category, on the host and in time: ${parts}` : "";
}

function showWaiting(text) {
  wait(true);
  at("verdict").className = "verdict";
  at("verdict").querySelector("strong").textContent = text;
  at("verdict").querySelector("span").textContent = "";
  at("how").textContent = "";
}

// Why there is no answer; what ran stays where the rehearsal alone has none.
function showNone(path, { error, dropped }) {
  const why = error ? `no answer: ${error}` : `dropped: ${dropped}`;
  if (path === "run" || !given.live.emulated) at("verdict").querySelector("strong").textContent = "no answer";
  else wait(false);
  at("how").textContent = why;
}

function wait(waiting) {
  document.getElementById("whatif").setAttribute("aria-busy", waiting);
}

function exactly(event) {
  const typed = event.target.value; // empty where it is no number
  const size = Number(typed);
  if (Number.isInteger(size) && size >= 1 && size <= given.live.largest) {
    changed(() => (asked["micro-batch"] = size));
    return;
  }
  const shown = asked["micro-batch"];
  event.target.value = shown;
  refuse(`Micro-batch “${typed.slice(0, 40)}” is no whole number from 1 to ${given.live.largest} (shown: ${shown})`);
}
