// Reads a results.json that a reader drops on the page. await Dropped.read(file) returns the sets that figures.py makes
// of ours, by the same rules, or throws Dropped.Unreadable with a line on what is wrong. The file is not trusted: lists
// and texts are cut, types and numbers are checked. Nothing leaves the page.
"use strict";
const Dropped = (() => {
  const MOST = { bytes: 16e6, rows: 200, rounds: 1000, text: 300, seconds: 1e6, memory: 1e16 };

  const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
  const rounded = (number) => Number(number.toPrecision(6));

  function median(numbers) {
    const sorted = [...numbers].sort((a, b) => a - b);
    const half = sorted.length >> 1;
    return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  }

  // -- parts of the file, checked

  class Unreadable extends Error {}

  function own(object, key, type, where) {
    const value = object && typeof object === "object" && Object.hasOwn(object, key) ? object[key] : undefined;
    const found = Array.isArray(value) ? "array" : value === null ? "null" : typeof value;
    if (found !== type) throw new Unreadable(`${where}.${key} should be ${type}, not ${found}`);
    return type === "string" ? value.slice(0, MOST.text) : value;
  }

  function number(object, key, where, least = -Infinity, most = MOST.memory) {
    const value = own(object, key, "number", where);
    if (value >= least && value <= most) return value;
    throw new Unreadable(`${where}.${key} is ${value}; expected ${least} to ${most}`);
  }

  const entries = (object, key, where) => Object.entries(own(object, key, "object", where)).slice(0, MOST.rows);
  const list = (object, key, where) => (object?.[key] ? own(object, key, "array", where).slice(0, MOST.rounds) : []);
  const optional = (object, key) => (typeof object?.[key] === "string" ? object[key].slice(0, MOST.text) : null);

  // -- the file, and the functions of figures.py, tables.py and summary.py

  async function read(file) {
    if (file.size > MOST.bytes)
      throw new Unreadable(`it has ${Math.round(file.size / 1e6)} MB; expected at most ${MOST.bytes / 1e6}`);
    const text = await file.text();
    let results;
    try {
      results = JSON.parse(text);
    } catch {
      throw new Unreadable("it is not JSON");
    }
    if (results?.format_version !== figures.format_version)
      throw new Unreadable(`it has no format_version ${figures.format_version}, as profile.py writes it`);
    const modes = own(results, "modes", "object", "results");
    const found = Object.keys(figures.modes).filter((mode) => Object.hasOwn(modes, mode));
    if (!found.length) throw new Unreadable("it has neither --mode=ladder nor --mode=each; expected one of them");
    return found.map((mode) => measured(results, mode));
  }

  function measured(results, mode) {
    const rows = summarize(results, mode);
    const found = [];
    let before = null;
    for (const row of rows) {
      found.push(figuresOf(row, { naive: rows[0], before: mode === "ladder" ? before : null }));
      if (row.rounds) before = row;
    }
    const words = own(results, "config", "array", "results").map(String).join(" ").slice(0, MOST.text);
    const machine = inWords(own(results, "machine", "object", "results"));
    const preset = words
      .split(" ")
      .filter((word) => word.endsWith(".py"))
      .map((word) => word.replace(/^.*\/|\.py$/g, ""));
    return {
      name: (preset.join("-") || "defaults") + figures.modes[mode],
      machine,
      mode,
      conditions: conditions(results, words, Math.max(0, ...rows.map((row) => row.rounds?.length ?? 0))),
      rows: found,
    };
  }

  function inWords(machine) {
    if (optional(machine, "gpu")) return optional(machine, "gpu");
    const cpu = own(machine, "cpu", "string", "machine").replaceAll("(R)", "").replaceAll(" Processor", "");
    return (
      `${cpu}, ${number(machine, "threads", "machine", 1)} threads` +
      (machine.native_bfloat16 === true ? ", native bfloat16" : "")
    );
  }

  function conditions(results, words, nRounds) {
    const keys = own(results, "keys", "object", "results");
    const names = { torch: "torch", python: "Python", cuda: "CUDA", cudnn: "cuDNN" };
    const version = (key) =>
      optional(results.machine, key) ?? (typeof results.machine[key] === "number" ? results.machine[key] : null);
    const versions = Object.keys(names)
      .filter((key) => version(key))
      .map((key) => `${names[key]} ${version(key)}`);
    const [batch, length] = ["batch_size", "context_length"].map((key) => number(keys, key, "keys", 1));
    const steps = number(results, "steps", "results", 1);
    return [
      ["config", words],
      ["a step", `${batch} × ${length} tokens`],
      ["figures", `medians over up to ${nRounds} processes, each of which times at least ${steps} steps`],
      ["versions", versions.join(", ")],
      ["code", [optional(results, "code"), optional(results, "commit")].filter(Boolean).join(", commit ")],
    ];
  }

  function summarize(results, mode) {
    const part = own(results.modes, mode, "object", "modes");
    const keys = own(results, "keys", "object", "results");
    let first = null; // the first row that was examined
    return entries(part, "rows", mode).map(([name]) => {
      const row = own(part.rows, name, "object", mode);
      const where = `${mode}: ${name.slice(0, 40)}`;
      const figure = { name: name.slice(0, 60), note: optional(row, "note") };
      const timed = list(row, "time", where);
      if (timed.length) {
        figure.rounds = timed.map((process) => number(process, "seconds", where, 1e-9, MOST.seconds));
        figure.seconds = median(figure.rounds);
      }
      const examined = list(row, "examine", where)[0];
      if (examined) {
        first ??= examined;
        Object.assign(figure, examination(examined, first, figure, Boolean(results.machine?.gpu), where));
        const given = list(row, "words", where).map(String);
        const anotherUpdate = given.length
          ? given.some((word) => word.startsWith("--optimizer="))
          : (keys.optimizer ?? "adamw") !== "adamw";
        if (examined !== first) figure.loss = losses(figure.gap, anotherUpdate, keys.dropout);
      }
      if (timed.length && row.limit) {
        const positive = (key) =>
          entries(row.limit, key, where).map(([kind]) => [
            kind.slice(0, 40),
            number(row.limit[key], kind, where, 0, MOST.seconds),
          ]);
        figure.limit_kinds = Object.fromEntries(
          positive("kinds").filter(([kind]) => Object.hasOwn(figures.kinds, kind)),
        );
        figure.limit = sum(Object.values(figure.limit_kinds));
        const bounds = positive("bounds").sort((a, b) => b[1] - a[1]);
        if (bounds.length)
          figure.bound = `${bounds[0][0]} ${percent(bounds[0][1], sum(bounds.map((bound) => bound[1])))}`;
      }
      return figure;
    });
  }

  function examination(found, first, row, gpu, where) {
    const memory = own(found, "memory", "object", where);
    const size = Object.fromEntries(
      ["weights", "optimizer", "activations", "rest", "peak"].map((part) => [
        part,
        number(memory, part, where, -MOST.memory),
      ]),
    );
    size["kept gradients"] = size.peak - size.weights - size.optimizer - size.activations - size.rest;
    const step = gpu && row.seconds ? row.seconds : number(found, "profiled_seconds", where, 1e-9, MOST.seconds);
    const byKind = own(found, "seconds_by_kind", "object", where);
    const { data: waited, ...shares } = Object.fromEntries(
      Object.keys(figures.kinds)
        .filter((kind) => kind !== "host" && kind !== "least")
        .map((kind) => [kind, number(byKind, kind, where, 0, MOST.seconds) / step]),
    );
    const idle = Math.max(0, 1 - sum(Object.values(shares)));
    shares.data = Math.min(waited, idle);
    shares.host = idle - shares.data;
    const [ours, theirs] = [found, first].map((one) => own(one, "losses", "array", where));
    if (!ours.length || ours.length !== theirs.length)
      throw new Unreadable(`${where}: its losses are not as many as naive's`);
    return {
      parts: Object.fromEntries(Object.keys(figures.parts).map((part) => [part, size[part]])),
      peak: size.peak,
      shares,
      last_loss: number(ours, ours.length - 1, where).toFixed(4),
      gap: Math.max(...ours.map((_, i) => Math.abs(number(ours, i, where) - number(theirs, i, where)))),
    };
  }

  function figuresOf(row, others) {
    const { name, note, seconds, limit, bound, parts, peak, loss, last_loss } = row;
    const figure = { name, note, seconds, limit, bound, parts, peak, loss, last_loss };
    if (seconds) figure.seconds = rounded(seconds);
    if (limit !== undefined) {
      figure.limit = rounded(limit);
      figure.limit_kinds = Object.fromEntries(
        Object.entries(row.limit_kinds).map(([kind, value]) => [kind, rounded(value)]),
      );
    }
    if (seconds && row.shares) {
      const kinds = Object.keys(row.shares).map((kind) => [kind, rounded(seconds * row.shares[kind])]);
      figure.kinds = Object.fromEntries(kinds);
    }
    for (const [against, other] of Object.entries(others)) {
      if (!other || other === row || !seconds) continue;
      const memory = other.peak && peak ? times(other.peak, peak) : "";
      figure[against] = { name: other.name, speed: speedup(other, row), memory };
    }
    return figure;
  }

  function speedup(before, after) {
    const n = Math.min(before.rounds?.length ?? 0, after.rounds?.length ?? 0);
    if (n < 2) return "";
    const ratios = after.rounds.slice(0, n).map((seconds, i) => before.rounds[i] / seconds);
    const [low, middle, high] = [Math.min(...ratios), median(ratios), Math.max(...ratios)];
    if (Math.abs(middle - 1) <= high - low) return figures.unchanged;
    return `${middle.toFixed(2)}× (${low.toFixed(2)}–${high.toFixed(2)})`;
  }

  function losses(gap, anotherUpdate, dropout) {
    const short = (digits) => String(Number(gap.toPrecision(digits)));
    if (gap === 0) return "bit-equal";
    if (anotherUpdate) return "another update";
    if (gap > figures.same_loss) return dropout ? `${short(2)} apart (dropout)` : `WRONG by ${short(2)}`;
    return `within ${gap.toExponential(0).replace(/e([+-])(\d)$/, "e$10$2")}`;
  }

  return { read, Unreadable };
})();
