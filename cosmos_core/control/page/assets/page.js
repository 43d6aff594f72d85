// The live page. Whatever comes from a run is set as text: models write HTML, too.

import { bars, lineChart, short } from "/charts.js";
import { follow } from "/stream.js";

const KEY = "cosmos-token";
const TITLES = { reward: "Reward", "held-out accuracy": "Held-out accuracy", "held-out reward": "Held-out reward", loss: "Loss", "held-out loss": "Held-out loss", mismatch: "Train-inference mismatch (KL)", behaviour: "Off-policy KL", staleness: "Mean staleness (steps)", entropy: "Entropy" };
for (const [name, title] of Object.entries(TITLES)) TITLES[`warm-up ${name}`] = `${title} of the warm-up`;
const PLACES = [["queued", "queued"], ["in_flight", "in flight"], ["finished", "finished"], ["batched", "batched"]];

let unit = "token"; // what samples are made of

const at = (id) => document.getElementById(id);
const token = () => sessionStorage.getItem(KEY) ?? "";
const authorization = () => (token() ? { Authorization: `Bearer ${token()}` } : {});

function tag(name, text, className) {
  const found = document.createElement(name);
  if (text !== undefined) found.textContent = text;
  if (className) found.className = className;
  return found;
}

function clock(seconds) {
  const whole = Math.round(Math.max(0, seconds));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const padded = (number) => String(number).padStart(2, "0");
  return hours ? `${hours}:${padded(minutes)}:${padded(rest)}` : `${minutes}:${padded(rest)}`;
}

function heldout(run) {
  const score = run.accuracy ?? run.heldout_reward;
  const found = score === null && run.evaluated_step !== null ? "not measured" : short(score);
  return run.unscored ? `${found} (${run.unscored})` : found;
}

function figures(run) {
  const queue = run.queue;
  const dropped = Object.entries(queue.dropped).map(([reason, count]) => `${count} ${reason}`).join(", ");
  const weights = Object.entries(run.versions).map(([version, count]) => `${count} at ${version < 0 ? "none" : version}`).join(", ");
  const found = [
    ["Stage", run.stage],
    ["Weights", run.version < 0 ? "none yet" : String(run.version)],
    ["Rollouts' weights", weights],
    ["Gradient group", `number ${run.generation} (${run.members.length} member${run.members.length === 1 ? "" : "s"})`],
    ["Reward", short(run.reward)],
    ["Loss", short(run.loss)],
    ["Mismatch (KL)", short(run.mismatch)],
    [run.unit === "token" && run.heldout_reward === null ? "Held-out accuracy" : "Held-out reward", heldout(run)],
    [`Policy ${run.unit}s/s`, run.policy_units_per_s === null ? "" : short(Math.round(run.policy_units_per_s))],
    [`Rollout ${run.unit}s/s`, run.rollout_units_per_s === null ? "" : short(Math.round(run.rollout_units_per_s))],
    ["Dropped", dropped],
    [`Wasted ${run.unit}s`, queue.wasted ? `${(100 * queue.wasted).toFixed(1)} %` : ""],
    ["Held back", queue.held_back || ""],
    ["Refused", run.refused ? String(run.refused) : ""],
    ["Controller started", `${run.term} time${run.term === 1 ? "" : "s"}`],
    ...Object.entries(run.settings),
  ];
  at("figures").replaceChildren(...found.filter((pair) => pair[1] !== "").map(([label, value]) => {
    const pair = tag("div");
    pair.append(tag("dt", label), tag("dd", value));
    return pair;
  }));
}

function replicas(run) {
  at("pools").textContent = Object.entries(run.statuses)
    .map(([role, counts]) => `${role}: ${Object.entries(counts).map(([status, count]) => `${count} ${status}`).join(", ")}`)
    .join(" · ");
  at("replicas").replaceChildren(...run.replicas.map((replica) => {
    const row = tag("tr");
    row.append(
      tag("td", replica.name),
      tag("td", replica.status, replica.status),
      tag("td", replica.step < 0 ? "" : String(replica.step), "number"),
      tag("td", replica.role === "rollout" ? String(replica.in_flight) : "", "number"),
      tag("td", "units_per_s" in replica.gauges ? short(Math.round(replica.gauges.units_per_s)) : "", "number"),
      tag("td", replica.detail || replica.place),
    );
    return row;
  }));
  const names = run.replicas.filter((replica) => replica.status !== "lost").map((replica) => replica.name);
  const select = at("drain");
  if (names.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
  }
}

const prompts = new Map(); // those that somebody asked for: the same rows are evaluated again

// A completion, and a button for its prompt, which is read of what is kept: `lease` finds it.
function article(facts, text, key, lease) {
  const found = tag("article");
  const hint = tag("div", facts.filter((fact) => fact).join(" · "), "hint");
  found.append(hint, tag("pre", text));
  if (prompts.has(key)) {
    hint.after(tag("pre", prompts.get(key), "prompt"));
    return found;
  }
  const [button, told] = [Object.assign(tag("button", "Show its prompt"), { type: "button" }), tag("pre", "", "prompt")];
  button.addEventListener("click", async () => {
    let words;
    try {
      const group = await kept.group(await lease());
      words = group.prompt.trimEnd();
      if (group.reference !== null) words += `\nreference: ${typeof group.reference === "string" ? group.reference : JSON.stringify(group.reference)}`;
      prompts.set(key, words);
      button.remove();
    } catch (error) {
      words = error.message;
    }
    told.textContent = words;
    hint.after(told);
  });
  hint.append(" ", button);
  return found;
}

async function leaseOf(row, version) {
  const found = (await kept.groups({ purpose: "evaluation", step: version, row })).groups[0];
  if (!found) throw new Error("its samples are not kept, or not written yet");
  return found.lease;
}

// Fetched, because the address of an image could not carry the token. Frames that are out of reach are left out.
async function showFrames(told, sample) {
  const response = await fetch(`/${sample.media.replace(/\.\w+$/, ".strip.webp")}`, { headers: authorization() }).catch(() => null);
  if (!response?.ok) return;
  const image = tag("img");
  image.alt = `frames of row ${sample.row}`;
  image.src = URL.createObjectURL(await response.blob());
  image.onload = () => URL.revokeObjectURL(image.src);
  told.append(image);
}

const show = {
  run(run) {
    document.title = `${run.name}: ${run.phase}`;
    at("name").textContent = run.name;
    at("phase").textContent = run.phase;
    at("phase").className = run.outcome === "failed" ? "pill bad" : "pill";
    at("progress").max = Math.max(1, run.num_steps);
    at("progress").value = run.step;
    at("steps").textContent = `step ${run.step} of ${run.num_steps}, ${clock(run.elapsed_s)}${run.eta_s === null ? "" : `, ETA ${clock(run.eta_s)}`}`;
    at("reason").textContent = run.reason;
    at("reason").hidden = !run.reason;
    at("findings-section").hidden = !run.findings.length;
    at("findings").replaceChildren(...run.findings.map((finding) => {
      const told = tag("p");
      told.append(tag("b", finding.code), `: ${finding.text}; ${finding.advice}`);
      return told;
    }));
    unit = run.unit;
    at("rate").textContent = `${unit[0].toUpperCase()}${unit.slice(1)}s/s`;
    figures(run);
    replicas(run);
    at("staleness").replaceChildren(bars("Staleness", Object.entries(run.staleness).map(([age, count]) => [age === "1" ? "1 step" : `${age} steps`, count])));
    at("consumed").textContent = `Of this stage; each is in one place. ${short(run.queue.consumed)} were consumed by training.`;
    at("queue").replaceChildren(bars("Prompts", PLACES.map(([place, label]) => [label, run.queue[place]])));
  },
  curves(curves) {
    const known = new Map(curves.map((curve) => [curve.name, curve.points]));
    at("curves").replaceChildren(...Object.keys(TITLES).filter((name) => known.has(name)).map((name) => {
      const points = known.get(name);
      const caption = tag("figcaption", TITLES[name]);
      caption.append(tag("span", short(points[points.length - 1][1])));
      const figure = tag("figure");
      figure.dataset.curve = name;
      figure.dataset.points = String(points.length);
      figure.append(caption, lineChart(TITLES[name], points));
      return figure;
    }));
  },
  heldout(evaluation) {
    at("heldout-section").hidden = evaluation === null;
    if (evaluation === null) return;
    at("heldout").replaceChildren(...evaluation.completions.map((sample) => {
      const reward = sample.reward === null ? "no reward" : `reward ${short(sample.reward)}`;
      const told = article([`row ${sample.row}`, `weights ${evaluation.version}`, reward, sample.detail], sample.text, `row ${sample.row}`, () => leaseOf(sample.row, evaluation.version));
      if (sample.media) showFrames(told, sample);
      return told;
    }));
  },
  samples(samples) {
    // Those that are shown stay as they are: somebody may be about to press a button of theirs.
    const known = new Map([...at("samples").children].map((each) => [each.dataset.lease, each]));
    for (const sample of samples) {
      if (known.delete(String(sample.lease))) continue;
      const reward = sample.reward === null ? sample.status : `reward ${short(sample.reward)}`;
      const told = article([sample.replica, `weights ${sample.version}`, reward, `${sample.units} ${unit}s`], sample.text, `lease ${sample.lease}`, () => sample.lease);
      told.dataset.lease = String(sample.lease);
      at("samples").prepend(told);
    }
    for (const gone of known.values()) gone.remove();
  },
  news(news) {
    at("news").replaceChildren(...news.reverse().map((item) => {
      const entry = tag("li");
      entry.append(tag("time", new Date(item.time * 1000).toLocaleTimeString("en-GB")), tag("b", item.kind), tag("span", item.text));
      return entry;
    }));
  },
};

function connect() {
  follow("/api/events", {
    headers: authorization,
    onEvent: (name, data) => show[name]?.(data),
    onState: (text, isBad) => {
      at("connection").textContent = text;
      at("connection").className = isBad ? "pill bad" : "pill quiet";
    },
  });
}

async function ask(what) {
  const answer = at("answer");
  answer.className = "hint";
  answer.textContent = "asking…";
  try {
    const response = await fetch("/api/requests", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...authorization() },
      body: JSON.stringify(what),
    });
    const found = await response.json();
    answer.className = response.ok ? "good" : "bad";
    answer.textContent = response.ok ? `${what.do}: taken in` : `${what.do}: refused: ${found.refused}`;
  } catch (error) {
    answer.className = "bad";
    answer.textContent = `${what.do}: ${error.message}`;
  }
}

function onSubmit(id, act) {
  at(id).addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
}

// Nothing is read of the run's files before somebody opens the browser of samples, or asks for a prompt.
const urls = [];
async function answerOf(path) {
  const response = await fetch(path, { headers: authorization() }).catch(() => null);
  if (response?.ok) return response;
  const told = await response?.json().catch(() => ({}));
  throw new Error(told?.refused ?? `the controller ${response ? `answered ${response.status}` : "does not answer"}; report.html has samples of a run that has ended`);
}
const kept = {
  isLive: true,
  groups: async (query) => (await answerOf(`/api/samples?${new URLSearchParams(query)}`)).json(),
  group: async (lease) => (await answerOf(`/api/samples/${lease}`)).json(),
  tokens: async (lease, index) => (await answerOf(`/api/samples/${lease}/tokens/${index}`)).json(),
  media: async ({ name, lease, number }) => {
    const response = await answerOf(lease === undefined ? `/${name}` : `/api/samples/${lease}/given/${number}`).catch(() => null);
    const blob = await response?.blob().catch(() => null);
    if (!blob) return null;
    urls.push(URL.createObjectURL(blob));
    return { url: urls.at(-1), isVideo: blob.type.startsWith("video/") };
  },
  forget: () => urls.splice(0).forEach((url) => URL.revokeObjectURL(url)),
};
at("browser").addEventListener("toggle", () => {
  if (at("browser").open && !at("browsed").childElementCount) browseSamples(at("browsed"), kept);
});

onSubmit("token-form", () => {
  sessionStorage.setItem(KEY, at("token").value.trim());
  at("token").value = "";
  at("answer").className = "hint";
  at("answer").textContent = token() ? "The token is used from now on." : "The token is forgotten.";
  if (at("connection").textContent === "token needed") connect();
});
onSubmit("set-form", () => ask({ do: "set", overrides: at("overrides").value.trim().split(/\s+/) }));
onSubmit("drain-form", () => ask({ do: "drain", name: at("drain").value }));
onSubmit("stop-form", () => {
  if (confirm("Stop the run at the next step boundary?")) ask({ do: "stop" });
});
connect();
