// The browser of samples, of the report and of the live page. Whatever a dataset or a model says is set as text, never as markup.
// `browseSamples(place, source)`: a source has `groups(query)`, `group(lease)`, `tokens(lease, index)`, and `media(where)`: the URL of a
// file that can be shown and whether it is a video, or null. The report's own source is the JSON inside the page.

globalThis.browseSamples = (() => {
  const STATUSES = ["ok", "truncated", "reward_failed", "reward_timeout", "environment_failed", "environment_timeout", "environment_lost"];
  const PROBABILITIES = [0.9, 0.5, 0.2, 0.05, 0.01];
  const RATIOS = [0.02, 0.1, 0.25, 0.5, 1];
  const VIDEO = /\.(mp4|webm|mov|m4v)$|^data:video/i;

  const TINY = 160; // pixels: enlarged, to be seen

  function tag(name, text, className) {
    const found = document.createElement(name);
    if (text !== undefined) found.textContent = text;
    if (className) found.className = className;
    return found;
  }

  function short(value) {
    if (value === null || value === undefined) return "none";
    return typeof value === "number" && !Number.isInteger(value) ? String(Number(Math.abs(value) < 1e-4 ? value.toPrecision(2) : value.toPrecision(4))) : String(value);
  }

  // While a run goes on, a prompt that waits may be trained on yet.
  const fated = (source, fate) => (source.isLive && fate === "unused" ? "not trained so far" : fate);
  const counted = (counts) => Object.entries(counts).map(([name, count]) => `${count} ${name}`).join(", ");

  // -- tokens -------------------------------------------------------------------------------------------------------

  const probability = (logprob) => PROBABILITIES.filter((least) => Math.exp(logprob) < least).length;
  const ratioClass = (ratio) => `t h${RATIOS.filter((least) => Math.abs(Math.log(ratio)) > least).length}${ratio < 1 ? " low" : ""}`;

  function coloured(chip, tokens, at, kind) {
    const value = tokens[kind]?.[at] ?? null;
    if (tokens.logprobs[at] === null) chip.className = "t other";
    else if (value === null) chip.className = "t";
    else if (typeof value !== "number") chip.className = "t h5"; // inf or nan
    else chip.className = kind === "ratios" ? ratioClass(value) : `t h${probability(value)}`;
  }

  function told(tokens, at) {
    const logprob = tokens.logprobs[at];
    const words = [`token ${at} · id ${tokens.ids[at]}`];
    if (tokens.pieces) words.push(JSON.stringify(tokens.pieces[at]));
    if (logprob === null) words.push("not the model's: given by the environment, not trained on");
    else words.push(`log-prob ${typeof logprob === "number" ? `${logprob.toFixed(4)} (probability ${Math.exp(logprob).toPrecision(3)})` : logprob}`);
    if ((tokens.ratios?.[at] ?? null) !== null) words.push(`ratio ${short(tokens.ratios[at])}`);
    return words.join(" · ");
  }

  function legend(kind, hasOthers) {
    const found = tag("div", undefined, "legend");
    if (kind === "ratios") {
      found.append("ratio of the policy's to the engine's probability:");
      for (const ratio of [0.5, 0.8, 0.95, 1, 1.05, 1.25, 2]) found.append(tag("span", String(ratio), ratioClass(ratio)));
    } else {
      found.append("probability of the token:");
      [...PROBABILITIES.map((least) => `≥ ${least}`), "less"].forEach((text, at) => found.append(tag("span", text, `t h${at}`)));
    }
    if (hasOthers) found.append(tag("span", "environment, masked", "t other"));
    return found;
  }

  function tokenView(tokens) {
    const view = tag("div");
    if (!tokens.ids.length) {
      view.append(tag("p", "This sample has no tokens.", "note"));
      return view;
    }
    const text = tag("pre", undefined, tokens.pieces ? "" : "ids");
    const readout = tag("output", "Point at a token for its values.");
    const chips = tokens.ids.map((id, at) => {
      const piece = tokens.pieces ? tokens.pieces[at].replaceAll("\n", "↵\n") || "·" : String(id);
      const chip = tag("span", piece);
      chip.dataset.at = String(at);
      return chip;
    });
    let kind = "logprobs";
    const keys = tag("div");
    const paint = () => {
      chips.forEach((chip, at) => coloured(chip, tokens, at, kind));
      keys.replaceChildren(legend(kind, tokens.logprobs.includes(null)));
      if (!tokens.ratios) return;
      for (const [name, label] of [["logprobs", "log-prob"], ["ratios", "ratio"]]) {
        const choice = tag("button", label);
        choice.type = "button";
        choice.setAttribute("aria-pressed", String(kind === name));
        choice.addEventListener("click", () => { kind = name; paint(); });
        keys.firstChild.append(choice);
      }
    };
    const point = (event) => {
      const at = event.target.dataset?.at;
      if (at === undefined) return;
      text.querySelector(".at")?.classList.remove("at");
      event.target.classList.add("at");
      readout.textContent = told(tokens, Number(at));
    };
    text.addEventListener("pointerover", point);
    text.addEventListener("click", point);
    text.append(...chips);
    paint();
    view.append(keys, readout, text);
    if (tokens.total > tokens.ids.length) view.append(tag("p", `The first ${tokens.ids.length} of ${tokens.total} tokens.`, "note"));
    if (!tokens.pieces) view.append(tag("p", "The run's tokenizer is not at hand here: these are ids.", "note"));
    return view;
  }

  // -- a group ------------------------------------------------------------------------------------------------------

  async function showMedia(place, source, where, name) {
    const file = await source.media(where);
    if (!file) {
      place.append(tag("p", where.name || "an image or video, which is not kept with the page", "facts"));
      return;
    }
    const found = tag(file.isVideo ? "video" : "img");
    if (found.localName === "video") Object.assign(found, { controls: true, loop: true, muted: true, preload: "metadata" });
    else found.alt = name;
    found.setAttribute("aria-label", name);
    const measure = () => found.classList.toggle("tiny", (found.videoWidth ?? found.naturalWidth) < TINY);
    for (const event of ["load", "loadedmetadata"]) found.addEventListener(event, measure);
    found.src = file.url;
    place.append(found);
  }

  function sampleView(source, group, sample) {
    const view = tag("article");
    const head = tag("button");
    head.type = "button";
    const parts = Object.entries(sample.rewards).map(([name, value]) => `${name} ${short(value)}`).join(", ");
    head.append(`#${sample.index} `, tag("b", sample.reward === null ? "no reward" : `reward ${short(sample.reward)}`));
    const versions = sample.oldest_version === sample.newest_version ? `weights ${sample.newest_version}` : `weights ${sample.oldest_version} to ${sample.newest_version}`;
    const facts = [
      parts && `(${parts})`,
      sample.advantage !== null && `advantage ${short(sample.advantage)}`,
      sample.status, fated(source, sample.fate), sample.drop, versions,
      sample.num_units > 0 && `${sample.num_units} units after a prompt of ${sample.num_prompt_units}`, sample.replica,
    ];
    head.append(` ${facts.filter((fact) => fact).join(" · ")}`);
    view.append(head);
    const text = tag("pre", sample.completion);
    if (sample.completion) view.append(text);
    if (sample.detail) view.append(tag("p", sample.detail, "facts"));
    if (sample.media) showMedia(view, source, { name: sample.media }, `sample ${sample.index}`);
    head.setAttribute("aria-expanded", "false");
    let tokens = null;
    head.addEventListener("click", async () => {
      const isOpen = head.getAttribute("aria-expanded") === "false";
      head.setAttribute("aria-expanded", String(isOpen));
      try {
        tokens ??= tokenView(await source.tokens(group.lease, sample.index));
      } catch (error) {
        tokens = tag("p", error.message, "note");
      }
      if (head.getAttribute("aria-expanded") === "true") head.after(tokens);
      else tokens.remove();
      text.hidden = head.getAttribute("aria-expanded") === "true" && tokens.querySelector("pre") !== null;
    });
    return view;
  }

  function groupView(source, group) {
    const view = tag("div");
    const facts = [group.step !== null && `step ${group.step}`, group.purpose, `prompt ${group.position}`, `row ${group.row}`, `lease ${group.lease}`, group.attempt > 1 && `attempt ${group.attempt}`];
    view.append(tag("p", facts.filter((fact) => fact).join(" · "), "facts"), tag("pre", group.prompt, "prompt"));
    const given = tag("div", undefined, "given");
    group.prompt_media.forEach((name, number) => showMedia(given, source, { name, lease: group.lease, number }, `of the prompt, ${number + 1}`));
    view.append(given);
    for (const name of ["reference", "metadata"]) {
      const value = group[name];
      if (value !== null && JSON.stringify(value) !== "{}") view.append(tag("p", `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`, "facts"));
    }
    if (group.total > group.samples.length) view.append(tag("p", `The first ${group.samples.length} of ${group.total} samples.`, "note"));
    view.append(...group.samples.map((sample) => sampleView(source, group, sample)));
    return view;
  }

  // -- the list -----------------------------------------------------------------------------------------------------

  function field(label, control, className) {
    const found = tag("label", label, className);
    found.append(control);
    return found;
  }

  function choice(name, options) {
    const found = tag("select");
    found.name = name;
    found.append(...options.map(([value, label]) => new Option(label, value)));
    return found;
  }

  function input(name, type) {
    return Object.assign(tag("input"), { name, type, min: 0, maxLength: 200 });
  }

  function controls() {
    const form = tag("form");
    form.autocomplete = "off";
    const any = [["", "any"]];
    const show = tag("button", "Show");
    form.append(
      field("order", choice("order", [["newest", "newest first"], ["worst", "worst first"], ["best", "best first"]])),
      field("step", input("step", "number")),
      field("purpose", choice("purpose", [...any, ["train", "train"], ["evaluation", "evaluation"]])),
      field("status", choice("status", [...any, ...STATUSES.map((name) => [name, name.replace("_", " ")])])),
      field("text in prompt or completion", input("text", "search"), "grow"),
      show,
    );
    return form;
  }

  function browse(place, source) {
    const [form, note, panes, list, detail] = [controls(), tag("p", "", "note"), tag("div", undefined, "panes"), tag("div", undefined, "list"), tag("div", undefined, "detail")];
    note.setAttribute("role", "status");
    panes.append(list, detail);
    place.replaceChildren(form, note, panes);
    let asked = 0;
    const listed = new Set(); // leases: while a run goes on, the next page of the newest begins with some of the last one

    function entry(group) {
      const found = tag("button");
      found.type = "button";
      found.setAttribute("aria-pressed", "false");
      const reward = group.reward === null ? "no reward" : `reward ${short(group.reward)}`;
      const fates = Object.fromEntries(Object.entries(group.fates).map(([fate, count]) => [fated(source, fate), count]));
      const facts = [group.purpose, counted(group.statuses), counted(fates)].filter((fact, at) => at !== 2 || fact !== `${group.num_samples} evaluated`);
      found.append(tag("b", `${group.step === null ? "" : `step ${group.step} · `}${reward}`), tag("span", ` ${facts.join(" · ")}${group.shows_media ? " · ▶" : ""}`), tag("div", group.prompt || "(no text)"));
      found.addEventListener("click", (event) => open(group, found, event.isTrusted));
      return found;
    }

    async function open(group, button, isAsked) {
      list.querySelector("[aria-pressed=true]")?.setAttribute("aria-pressed", "false");
      button.setAttribute("aria-pressed", "true");
      const isLookedAt = () => button.isConnected && button.getAttribute("aria-pressed") === "true";
      try {
        const found = await source.group(group.lease);
        if (!isLookedAt()) return;
        source.forget?.();
        detail.replaceChildren(groupView(source, found));
      } catch (error) {
        if (!isLookedAt()) return;
        detail.replaceChildren(tag("p", error.message, "note"));
      }
      if (isAsked && matchMedia("(max-width: 48rem)").matches) detail.scrollIntoView({ block: "start" });
    }

    async function load(first) {
      const query = Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
      const own = (asked += 1);
      note.textContent = "Reading…";
      try {
        const found = await source.groups({ ...query, first });
        if (own !== asked) return;
        if (!first) {
          list.replaceChildren();
          detail.replaceChildren();
          listed.clear();
        }
        list.querySelector(".more")?.remove();
        const known = list.childElementCount;
        list.append(...found.groups.filter((group) => !listed.has(group.lease)).map(entry));
        found.groups.forEach((group) => listed.add(group.lease));
        const [shown, next] = [listed.size, first + found.groups.length];
        note.textContent = found.groups.length || !found.note ? [`${shown} of ${found.total} prompts`, found.note].filter((words) => words).join(", ") : found.note;
        list.hidden = !shown;
        if (next < found.total && found.groups.length && !found.isAll) {
          const more = tag("button", "More", "more");
          more.type = "button";
          more.addEventListener("click", () => load(next));
          list.append(more);
        }
        if (!known && shown) list.firstChild.click();
      } catch (error) {
        if (own === asked) note.textContent = error.message;
      }
    }

    form.addEventListener("submit", (event) => {
      event.preventDefault();
      load(0);
    });
    for (const control of form.querySelectorAll("select, [name=step]")) control.addEventListener("change", () => load(0));
    load(0);
  }

  // -- the report's own ---------------------------------------------------------------------------------------------

  function inside(data) {
    const known = new Map(data.groups.map((group) => [group.lease, group.detail]));
    const mean = (group, otherwise) => group.reward ?? otherwise;
    const orders = {
      newest: (a, b) => b.time - a.time,
      worst: (a, b) => mean(a, Infinity) - mean(b, Infinity),
      best: (a, b) => mean(b, -Infinity) - mean(a, -Infinity),
    };
    return {
      async groups({ order, step, purpose, status, text }) {
        const words = (text ?? "").toLowerCase();
        const found = data.groups.filter((group) => (step === undefined || group.step === Number(step))
          && (purpose === undefined || group.purpose === purpose) && (status === undefined || group.statuses[status])
          && (!words || [group.detail.prompt, ...group.detail.samples.map((sample) => sample.completion)].some((each) => each.toLowerCase().includes(words))));
        const isFiltered = step !== undefined || purpose !== undefined || status !== undefined || words;
        const note = isFiltered ? `of the ${data.groups.length} that this page has` : data.note;
        return { groups: found.sort(orders[order]), total: isFiltered ? found.length : data.total, note: data.groups.length ? note : data.note, isAll: true };
      },
      group: async (lease) => known.get(lease),
      tokens: async (lease, index) => known.get(lease).samples.find((sample) => sample.index === index).tokens,
      // Media of a run lie beside its report.
      media: async ({ name }) => (/^(media\/step-\d+\/row-\d+\.(png|mp4|webp)|data:(image|video)\/[a-z0-9.+-]+;base64,.*)$/.test(name) ? { url: name, isVideo: VIDEO.test(name) } : null),
    };
  }

  document.addEventListener("DOMContentLoaded", () => {
    const data = document.getElementById("samples-data");
    if (data) browse(document.getElementById("samples"), inside(JSON.parse(data.textContent)));
  });
  return browse;
})();
