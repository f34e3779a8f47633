// What the page knows without a document: no DOM here, so that tests run it by itself.
"use strict";

const Logic = (() => {
  const HISTORY = 180; // looks: three minutes at one a second
  const WINDOW = 5; // looks that one point of a plot sums up
  const MESSAGES = 40; // of the conversation, kept and sent
  const QUEUED = ["tokenize", "queue", "reserve", "wait"];

  // A list that forgets its oldest.
  class Ring {
    constructor(most) {
      this.most = most;
      this.items = [];
    }
    push(item) {
      this.items.push(item);
      if (this.items.length > this.most) this.items.shift();
    }
    get last() {
      return this.items[this.items.length - 1];
    }
  }

  // What lay between two looks at a histogram whose counts only grow: the q-quantile, in
  // seconds, by straight lines within buckets. null: nothing happened, or it began anew.
  function quantile(bounds, before, after, q) {
    const delta = after.map((count, i) => count - before[i]);
    const total = delta[delta.length - 1];
    if (!(total > 0) || delta.some((count) => count < 0)) return null;
    const rank = q * total;
    const at = delta.findIndex((count) => count >= rank);
    if (at >= bounds.length) return bounds[bounds.length - 1];
    const low = at ? bounds[at - 1] : 0;
    const below = at ? delta[at - 1] : 0;
    const inside = delta[at] - below;
    return inside > 0 ? low + ((bounds[at] - low) * (rank - below)) / inside : bounds[at];
  }

  // The points of one plot over time; `look` takes one document's distribution.
  class Latency {
    constructor() {
      this.looks = new Ring(WINDOW + 1);
      this.points = new Ring(HISTORY);
    }
    look(now, distribution) {
      this.looks.push(distribution.counts);
      const before = this.looks.items[0];
      const of = (q) => quantile(distribution.bounds, before, distribution.counts, q);
      this.points.push({ now, p50: of(0.5), p99: of(0.99) });
    }
  }

  // A round number that all of them are below.
  function top(values) {
    const most = Math.max(...values, 0.001);
    const unit = 10 ** Math.floor(Math.log10(most));
    return [1, 2, 5, 10].map((step) => step * unit).find((round) => round >= most * 0.999999);
  }

  // An SVG path through what is known, with gaps where nothing happened.
  function path(points, key, box, highest) {
    const parts = [];
    let pen = "M";
    points.forEach((point, i) => {
      const value = point[key];
      if (value === null) {
        pen = "M";
        return;
      }
      const x = box.left + ((box.right - box.left) * (HISTORY - points.length + i)) / (HISTORY - 1);
      const y = box.bottom - ((box.bottom - box.top) * value) / highest;
      parts.push(`${pen}${x.toFixed(1)} ${y.toFixed(1)}`);
      if (pen === "M") parts.push(`L${(x + 0.1).toFixed(1)} ${y.toFixed(1)}`);
      pen = "L";
    });
    return parts.join("");
  }

  function seconds(value) {
    if (value === null || value === undefined) return "-";
    if (value >= 1) return `${value.toFixed(2)} s`;
    return value >= 0.1 ? `${Math.round(value * 1000)} ms` : `${(value * 1000).toFixed(1)} ms`;
  }

  function percent(share) {
    return `${Math.round(share * 100)}%`;
  }

  function kind(name) {
    return QUEUED.includes(name) ? "queue" : name;
  }

  // Bars in percent of the longest request, and the same in words.
  function bars(request, longest_s) {
    const scale = longest_s > 0 ? 100 / longest_s : 0;
    return request.stretches
      .filter((one) => one.seconds > 0)
      .map((one) => ({
        kind: kind(one.name),
        x: Math.min(one.start_s * scale, 99.6),
        width: Math.max(one.seconds * scale, 0.4),
        text: `${one.name} ${seconds(one.seconds)} at ${one.where}`,
      }));
  }

  // Workers, or what is told of pools, in the order of a request's way.
  function ordered(items) {
    const order = ["prefill", "decode", "both", "colocated"];
    const place = (one) => order.indexOf(one.role || one.pool);
    const name = (one) => one.worker || "";
    return [...items].sort(
      (a, b) => place(a) - place(b) || name(a).localeCompare(name(b), "en", { numeric: true }),
    );
  }

  // A time of day; of another day with its date.
  function clock(time, today = new Date()) {
    const at = new Date(time);
    if (Number.isNaN(at.getTime())) return time;
    return at.toDateString() === today.toDateString() ? at.toLocaleTimeString() : at.toLocaleString();
  }

  function summary(state) {
    const pools = new Map();
    for (const one of ordered(state.workers)) {
      const [usable, all] = pools.get(one.role) || [0, 0];
      pools.set(one.role, [usable + (one.usable ? 1 : 0), all + 1]);
    }
    const parts = [...pools].map(([role, [usable, all]]) => `${role} ${usable} of ${all} ready`);
    const waiting = `${state.queued.requests} waiting in the router`;
    return parts.length ? `${parts.join(", ")}; ${waiting}` : `no worker has announced itself; ${waiting}`;
  }

  // Server-sent events out of text that comes in pieces.
  class Events {
    constructor() {
      this.rest = "";
    }
    take(piece) {
      const blocks = (this.rest + piece).split(/\r?\n\r?\n/);
      this.rest = blocks.pop();
      return blocks
        .flatMap((block) => block.split(/\r?\n/))
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trim());
    }
  }

  // What one event of a chat says: {text}, {done} or {error}.
  function said(data) {
    if (data === "[DONE]") return { done: true };
    try {
      const event = JSON.parse(data);
      if (event.error) return { error: String(event.error.message || event.error) };
      const choice = (event.choices || [])[0];
      return { text: (choice && choice.delta && choice.delta.content) || "" };
    } catch {
      return { error: "The router said something that isn't its API." };
    }
  }

  // The conversation as it is sent: bounded, and beginning with a user's message.
  function kept(messages) {
    const last = messages.slice(-MESSAGES);
    while (last.length && last[0].role !== "user") last.shift();
    return last;
  }

  return {
    HISTORY, MESSAGES, WINDOW, Events, Latency, Ring,
    bars, clock, kept, kind, ordered, path, percent, quantile, said, seconds, summary, top,
  };
})();
