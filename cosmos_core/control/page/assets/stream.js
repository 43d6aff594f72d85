// Server-sent events over fetch: unlike EventSource it can send the token in a header.

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 10000;
const SILENCE_MS = 15000;

export async function follow(url, { headers, onEvent, onState }) {
  let wait = FIRST_WAIT_MS;
  for (;;) {
    const abort = new AbortController();
    let timer = setTimeout(() => abort.abort(), SILENCE_MS);
    let reason = "the controller does not answer";
    try {
      const response = await fetch(url, { headers: headers(), cache: "no-store", signal: abort.signal });
      if (response.status === 401) {
        onState("token needed", true);
        return;
      }
      if (!response.ok) {
        reason = (await response.json()).refused;
        throw new Error(reason);
      }
      onState("live", false);
      wait = FIRST_WAIT_MS;
      const heard = () => {
        clearTimeout(timer);
        timer = setTimeout(() => abort.abort(), SILENCE_MS);
      };
      if (await readAll(response.body, onEvent, heard)) {
        onState("the run has ended", false);
        return;
      }
      reason = "the connection ended";
    } catch {
      // What follows is the same whatever it was: try again, later and later.
    } finally {
      clearTimeout(timer);
      abort.abort();
    }
    onState(`${reason}; trying again`, true);
    await new Promise((done) => setTimeout(done, wait));
    wait = Math.min(LONGEST_WAIT_MS, wait * 2);
  }
}

async function readAll(body, onEvent, heard) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return false;
    heard();
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const fields = new Map(block.split("\n").map((line) => [line.slice(0, line.indexOf(": ")), line.slice(line.indexOf(": ") + 2)]));
      if (!fields.has("event")) continue;
      if (fields.get("event") === "end") return true;
      onEvent(fields.get("event"), JSON.parse(fields.get("data")));
    }
  }
}
