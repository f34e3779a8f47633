// The page: asks the router each second, draws what it says, and chats.
"use strict";

(() => {
  const EVERY_MS = 1000;
  const PATIENCE_MS = 5000;
  const REASONS = 8;
  const BOX = { left: 52, right: 592, top: 8, bottom: 138 };
  const at = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";

  function element(name, attributes = {}, text = "") {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return made;
  }

  function shape(name, attributes = {}, text = "") {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    return made;
  }

  function write(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }

  // Rows by key, in order; those that are there stay, so that nothing flickers.
  function rows(body, items, key, make, fill) {
    const there = new Map([...body.children].map((row) => [row.dataset.key, row]));
    items.forEach((item, place) => {
      const name = key(item);
      let row = there.get(name);
      if (!row) {
        row = make(item);
        row.dataset.key = name;
      }
      there.delete(name);
      if (body.children[place] !== row) body.insertBefore(row, body.children[place] || null);
      fill(row, item);
    });
    for (const row of there.values()) row.remove();
  }

  // ---- workers -----------------------------------------------------------------------

  function workerRow() {
    const row = element("tr");
    row.append(element("td"), element("th", { scope: "row" }), element("td"));
    for (let i = 0; i < 4; i += 1) row.append(element("td", { class: "number" }));
    const kv = element("td");
    const bar = shape("svg", { class: "kv", "aria-hidden": "true" });
    bar.append(shape("rect", { class: "ground", width: "100%", height: "100%" }));
    bar.append(shape("rect", { class: "fill", width: "0%", height: "100%" }));
    kv.append(bar, element("span"));
    row.append(kv, element("td", { class: "number" }));
    return row;
  }

  function fillWorker(row, one) {
    const cells = row.children;
    const texts = [one.role, one.worker, one.state];
    const counts = [one.queued, one.running, one.waiting_grants, one.pending_tokens];
    [...texts, ...counts].forEach((text, i) => write(cells[i], String(text)));
    cells[2].className = one.usable ? "good" : "bad";
    cells[7].querySelector(".fill").setAttribute("width", `${one.kv_share * 100}%`);
    write(cells[7].querySelector("span"), Logic.percent(one.kv_share));
    write(cells[8], one.step_s > 0 ? Logic.seconds(one.step_s) : "-");
  }

  // ---- sizes -------------------------------------------------------------------------

  function decision(one) {
    const item = element("li");
    const time = element("time", { datetime: one.time }, Logic.clock(one.time));
    item.append(time, ` ${one.text}`);
    if (one.details.length) {
      const details = element("ul", { class: "details" });
      details.append(...one.details.map((text) => element("li", {}, text)));
      item.append(details);
    }
    return item;
  }

  let told = "";
  function showSizes(sizes) {
    const { standing = [], changes = [] } = sizes || {};
    const now = JSON.stringify([standing, changes]);
    if (now === told) return;
    told = now;
    at("sizes-none").hidden = standing.length + changes.length > 0;
    at("changes-title").hidden = !changes.length;
    at("sizes").replaceChildren(...Logic.ordered(standing).map(decision));
    at("changes").replaceChildren(...changes.map(decision));
  }

  // ---- requests ----------------------------------------------------------------------

  function requestRow(one, longest_s) {
    const row = element("tr");
    const ended = new Date(one.ended_at * 1000).toLocaleTimeString();
    const answer = one.failure ? `${one.status} ${one.failure}` : String(one.status);
    const prompt = one.cached_tokens ? `${one.prompt_tokens} (${one.cached_tokens} cached)` : one.prompt_tokens;
    row.append(element("th", { scope: "row" }, ended));
    row.append(element("td", { class: one.status < 400 && !one.failure ? "good" : "bad" }, answer));
    const numbers = [
      prompt, one.completion_tokens,
      Logic.seconds(one.ttft_s), Logic.seconds(one.tpot_s), Logic.seconds(one.total_s),
    ];
    for (const text of numbers) row.append(element("td", { class: "number" }, String(text)));
    const cell = element("td", { class: "bars" });
    const svg = shape("svg", { class: "bar", "aria-hidden": "true" });
    const bars = Logic.bars(one, longest_s);
    for (const bar of bars) {
      const rect = shape("rect", {
        class: bar.kind, x: `${bar.x}%`, width: `${bar.width}%`,
        y: bar.kind === "transfer" ? "55%" : "10%", height: bar.kind === "transfer" ? "45%" : "80%",
      });
      rect.append(shape("title", {}, bar.text));
      svg.append(rect);
    }
    cell.append(svg, element("span", { class: "hidden" }, bars.map((bar) => bar.text).join(", ")));
    row.append(cell);
    const way = [one.prefill, one.decode].filter((name, i, all) => name && all.indexOf(name) === i);
    row.append(element("td", {}, way.join(" → ") + (one.attempts > 1 ? `, attempt ${one.attempts}` : "")));
    return row;
  }

  let shown = "";
  function showRequests(requests) {
    const newest = requests.map((one) => one.id).join();
    if (newest === shown) return;
    shown = newest;
    const longest_s = Math.max(...requests.map((one) => one.total_s), 0);
    at("requests").replaceChildren(...requests.map((one) => requestRow(one, longest_s)));
    const known = requests.filter((one) => one.reason).slice(0, REASONS);
    at("reasons").replaceChildren(...known.map((one) => element("li", {}, one.reason)));
  }

  for (const kind of ["queue", "prefill", "transfer", "decode"]) {
    at("keys").append(element("span", { class: `key ${kind}` }), kind === "queue" ? "waiting" : kind);
  }

  // ---- plots -------------------------------------------------------------------------

  const plots = { ttft: new Logic.Latency(), itl: new Logic.Latency() };

  function draw(name) {
    const points = plots[name].points.items;
    const values = points.flatMap((one) => [one.p50, one.p99]).filter((one) => one !== null);
    const highest = Logic.top(values);
    const svg = at(name);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const y = BOX.bottom - (BOX.bottom - BOX.top) * share;
      parts.push(shape("line", { class: "grid", x1: BOX.left, x2: BOX.right, y1: y, y2: y }));
      const label = Logic.seconds(highest * share);
      parts.push(shape("text", { x: BOX.left - 6, y: y + 4, "text-anchor": "end" }, label));
    }
    parts.push(shape("text", { x: BOX.left, y: 155 }, "3 min ago"));
    parts.push(shape("text", { x: BOX.right, y: 155, "text-anchor": "end" }, "now"));
    for (const key of ["p50", "p99"]) {
      parts.push(shape("path", { class: key, d: Logic.path(points, key, BOX, highest) }));
    }
    svg.replaceChildren(...parts);
    const last = [...points].reverse().find((one) => one.p50 !== null);
    const words = last
      ? `p50 ${Logic.seconds(last.p50)} (line), p99 ${Logic.seconds(last.p99)} (dashed), of the last requests`
      : "nothing in the last three minutes";
    write(at(`${name}-text`), words);
  }

  // ---- looking -----------------------------------------------------------------------

  let model = "";

  function show(state) {
    model = state.model;
    write(at("model"), state.model);
    write(at("router"), `router ${state.router}`);
    health(state.ready ? "ready" : "no usable pair of workers", state.ready);
    write(at("pools-summary"), Logic.summary(state));
    rows(at("workers"), Logic.ordered(state.workers), (one) => one.worker, workerRow, fillWorker);
    showSizes(state.sizes);
    showRequests(state.requests);
    for (const name of Object.keys(plots)) {
      plots[name].look(state.now, state.distributions[name]);
      draw(name);
    }
  }

  function health(text, good) {
    write(at("health"), text);
    at("health").className = `state ${good ? "good" : "bad"}`;
  }

  async function look() {
    try {
      const answer = await fetch("/debug/state", { signal: AbortSignal.timeout(PATIENCE_MS) });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      show(await answer.json());
    } catch {
      health("the router doesn't answer", false);
    }
    setTimeout(look, EVERY_MS);
  }

  // ---- chat --------------------------------------------------------------------------

  let messages = [];
  let running = null;

  function bubble(who, text, kind = "") {
    const made = element("p", kind ? { class: kind } : {});
    const body = element("span", {}, text);
    made.append(element("span", { class: "who" }, who), body);
    const log = at("log");
    log.append(made);
    while (log.children.length > Logic.MESSAGES) log.firstChild.remove();
    log.scrollTop = log.scrollHeight;
    return body;
  }

  // Asked for when the router wants one; kept nowhere.
  function authorization() {
    const key = at("key").value.trim();
    return key ? { authorization: `Bearer ${key}` } : {};
  }

  async function answerTo(signal, body) {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...authorization() },
      signal,
      body: JSON.stringify({
        model,
        messages: messages,
        max_tokens: Number(at("max-tokens").value),
        stream: true,
      }),
    });
    if (response.status === 401) at("key-field").hidden = false;
    if (!response.ok) throw new Error((Logic.said(await response.text())).error || response.statusText);
    const events = new Logic.Events();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("The answer broke off.");
      for (const data of events.take(value)) {
        const said = Logic.said(data);
        if (said.error) throw new Error(said.error);
        if (said.done) return;
        body.textContent += said.text;
      }
      at("log").scrollTop = at("log").scrollHeight;
    }
  }

  async function ask(text) {
    messages.push({ role: "user", content: text });
    messages = Logic.kept(messages);
    bubble("You", text);
    const log = at("log");
    log.setAttribute("aria-busy", "true"); // read out whole, not token by token
    const body = bubble(model || "Model", "");
    running = new AbortController();
    at("send").disabled = true;
    at("stop").disabled = false;
    write(at("chat-status"), "answering");
    try {
      await answerTo(running.signal, body);
      write(at("chat-status"), "");
    } catch (error) {
      const stopped = running.signal.aborted;
      write(at("chat-status"), stopped ? "stopped" : "failed");
      if (!stopped) bubble("Router", error.message, "error");
    }
    if (body.textContent) messages.push({ role: "assistant", content: body.textContent });
    else messages.pop();
    running = null;
    at("send").disabled = false;
    at("stop").disabled = true;
    log.removeAttribute("aria-busy");
  }

  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = at("prompt").value.trim();
    if (!text || running) return;
    at("prompt").value = "";
    ask(text);
  });
  at("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      at("ask").requestSubmit();
    }
  });
  at("stop").addEventListener("click", () => running && running.abort());
  at("clear").addEventListener("click", () => {
    if (running) running.abort();
    messages = [];
    at("log").replaceChildren();
    at("prompt").focus();
  });

  // ---- theme -------------------------------------------------------------------------

  at("theme").addEventListener("change", () => {
    document.documentElement.dataset.theme = at("theme").value;
  });

  look();
})();
