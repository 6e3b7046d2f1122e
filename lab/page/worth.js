// Draws a stage's time and memory on a machine, ours or one that a reader drops on the page: Worth.show(stage).
// Nothing that was dropped becomes markup: texts are set as textContent.
"use strict";
window.Worth = (() => {
  const sets = [...figures.sets]; // and those of dropped files
  let stage = figures.stages[0];
  let drawn = []; // [{set, update}] of the cards on the page

  // -- small helpers

  function make(tag, properties = {}, ...children) {
    const { style, data, ...attributes } = properties;
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== false && value !== undefined) element.setAttribute(name, value === true ? "" : value);
    }
    Object.assign(element.dataset, data);
    for (const [name, value] of Object.entries(style ?? {})) element.style.setProperty(name, value);
    element.append(...children);
    return element;
  }

  // A text whose lines break between words alone: not after the slash of ms/step, nor the hyphens of an option.
  const words = (text) => text.split(" ").flatMap((word) => [make("span", { class: "worth-word" }, word), " "]);

  const share = (part, whole) => `${(100 * Math.min(1, Math.max(0, whole ? part / whole : 0))).toFixed(2)}%`;

  const store = {
    // Under file:// a browser may refuse.
    get(key) {
      try {
        return localStorage.getItem(`nanoladder.${key}`);
      } catch {
        return null;
      }
    },
    set(key, value) {
      try {
        localStorage.setItem(`nanoladder.${key}`, value);
      } catch {
        // chosen for this visit alone
      }
    },
  };

  // -- a card: one machine's figures at a stage

  // The row of a stage, or the last one below it that was measured; note: why it is not the stage's own.
  function rowAt(set) {
    const found = set.rows.find((row) => row.name === stage);
    if (found?.seconds) return { row: found, note: "" };
    if (stage in figures.scaling_modes) {
      return { row: null, note: `${stage}: ${found?.note ?? "acts in several processes"}.` };
    }
    const below = set.mode === "each" ? [figures.stages[0]] : figures.stages.slice(0, figures.stages.indexOf(stage));
    const measured = set.rows.filter((row) => row.seconds && below.includes(row.name));
    const row = measured.at(-1) ?? null;
    const why = found?.note ?? "not measured here";
    return { row, note: row ? `${stage}: ${why}. Below: ${row.name}.` : `${stage}: ${why}.` };
  }

  const CHARTS = {
    time: {
      title: "Time of a step",
      total: (row) => row.seconds,
      parts: (row) => row.kinds ?? { least: row.seconds },
      names: figures.kinds,
      text: (value, of) => milliseconds(value, of),
      unit: "ms",
    },
    memory: {
      title: "Memory of a step",
      total: (row) => row.peak,
      parts: (row) => row.parts ?? {},
      names: figures.parts,
      text: (value, of) => gigabytes(value, of),
      unit: "GB",
    },
  };

  // [kind: good, bad or same; ratio; text; range] of a comparison; null if there is none.
  function verdict(chart, row, other, otherRow) {
    if (!other) return null;
    if (chart === CHARTS.memory) {
      if (!other.memory || !otherRow) return null;
      const [before, after] = [otherRow.peak, row.peak];
      const [big, small] = [Math.max(before, after), Math.min(before, after)];
      const ratio = times(big, small);
      if (ratio === "1.00×") return ["same", "as much memory", `as ${other.name}`, ""];
      return after < before
        ? ["good", ratio, `less memory than ${other.name}`, ""]
        : ["bad", ratio, `more memory than ${other.name}`, ""];
    }
    if (other.speed === figures.unchanged) return ["same", figures.unchanged, `against ${other.name}`, ""];
    const [, ratio, range] = other.speed.match(/^(\S+×)(?: \((.*)\))?$/) ?? [];
    if (!ratio) return ["same", "", `measured once, not compared with ${other.name}`, ""];
    const kind = parseFloat(ratio) >= 1 ? "good" : "bad";
    return [ratio === "1.00×" ? "same" : kind, ratio, `the speed of ${other.name}`, range ?? ""];
  }

  function sayVerdict(element, found) {
    const [kind, ratio, text, range] = found ?? ["none", "", "", ""];
    element.dataset.kind = kind;
    element.replaceChildren(...(ratio ? [make("strong", {}, ratio), " "] : []), text);
    if (range) element.append(" ", make("small", { title: "lowest and highest of the rounds" }, `(${range})`));
  }

  function makeBar(chart, n) {
    const parts = Object.keys(chart.names).map((part) => [part, make("i", { data: { part } })]);
    const limit = make("b", { class: "worth-limit", hidden: true });
    const track = make("div", { class: "worth-track", role: "img" }, ...parts.map(([, element]) => element), limit);
    const [name, value] = [make("span", { class: "worth-name" }), make("span", { class: "worth-value" })];
    const line = make("div", { class: "worth-bar", data: { n } }, name, track, value);
    return {
      line,
      update(row, scale, label) {
        line.classList.toggle("worth-away", !row);
        const values = row ? chart.parts(row) : {};
        const total = row ? chart.total(row) : 0;
        const told = [];
        for (const [part, element] of parts) {
          const value = values[part] ?? 0;
          element.style.width = share(value, scale);
          element.title = `${chart.names[part]} ${chart.text(value, total)} ${chart.unit}, ${percent(value, total)}`;
          if (value > 0) told.push(element.title);
        }
        limit.hidden = !(row && chart === CHARTS.time && row.limit);
        if (!limit.hidden) {
          limit.style.left = share(row.limit, scale);
          limit.title = `its limit by roofline: ${milliseconds(row.limit)} ms`;
        }
        name.textContent = name.title = label;
        value.textContent = row ? `${chart.text(total)} ${chart.unit}` : "";
        track.setAttribute(
          "aria-label",
          row ? `${label}: ${chart.text(total)} ${chart.unit}: ${told.join("; ")}` : label,
        );
      },
    };
  }

  // The parts as a table: the key to the colors, and the bars in numbers.
  function makeLegend(chart) {
    const body = make("tbody");
    const head = make("tr");
    const caption = make("caption", { class: "worth-hidden" });
    const table = make("table", { class: "worth-legend" }, caption, make("thead", {}, head), body);
    return {
      table,
      update(row, other, set) {
        const values = chart.parts(row);
        const kinds = Object.keys(chart.names).filter(
          (part) => part in values || set.rows.some((one) => one.seconds && part in chart.parts(one)),
        );
        const limits = chart === CHARTS.time && row.limit_kinds;
        const headings = [
          ...(other ? [row.before ? "before" : other.name] : []),
          "now",
          "share",
          ...(limits ? ["of its limit"] : []),
        ];
        caption.textContent = `${chart.title}, ${chart.unit}: ${row.name}${other ? ` and ${other.name}` : ""}`;
        head.replaceChildren(
          make("td", {}, chart.unit),
          ...headings.map((heading) => make("th", { scope: "col" }, heading)),
        );
        table.hidden = kinds.length < 2;
        const lines = kinds.map((part) => {
          const value = values[part] ?? 0;
          const cells = [chart.text(value, chart.total(row)), percent(value, chart.total(row))];
          if (other) cells.unshift(chart.text(chart.parts(other)[part] ?? 0, chart.total(row)));
          if (limits) cells.push(limits[part] && value ? percent(limits[part], value) : "");
          const heading = make("th", { scope: "row" }, make("i", { data: { part } }), chart.names[part]);
          return make("tr", {}, heading, ...cells.map((cell) => make("td", {}, cell)));
        });
        body.replaceChildren(...lines);
      },
    };
  }

  // All rows' totals, small; a click climbs there. The rail does the same for the keyboard and for screen readers.
  function makeStrip(chart, set, scale) {
    const columns = set.rows
      .filter((row) => row.seconds && chart.total(row))
      .map((row) => {
        const isStage = figures.stages.includes(row.name);
        const title = `${row.name}: ${chart.text(chart.total(row))} ${chart.unit}`;
        const bar = make("i", { style: { height: share(chart.total(row), scale) } });
        return [
          row.name,
          make(isStage ? "a" : "span", { ...(isStage ? { href: `#${row.name}`, tabindex: -1 } : {}), title }, bar),
        ];
      });
    const strip = make("div", { class: "worth-strip", "aria-hidden": "true" }, ...columns.map(([, column]) => column));
    return {
      strip,
      update: (name) => columns.forEach(([row, column]) => column.classList.toggle("worth-now", row === name)),
    };
  }

  function makeChart(chart, set) {
    const scale = Math.max(...set.rows.map((row) => (row.seconds && chart.total(row)) || 0));
    const bars = ["naive", "before", "now"].map((n) => makeBar(chart, n));
    const legend = makeLegend(chart);
    const strip = makeStrip(chart, set, scale);
    const total = make("span", { class: "worth-total" });
    const [main, more] = [make("p", { class: "worth-verdict" }), make("p", { class: "worth-verdict worth-more" })];
    const limit = make("p", { class: "worth-of-limit" });
    const element = make(
      "section",
      { class: "worth-chart" },
      make("h4", {}, chart.title, " ", total),
      make("div", { class: "worth-verdicts" }, main, more),
      make("div", { class: "worth-bars" }, ...bars.map((bar) => bar.line)),
      limit,
      legend.table,
      strip.strip,
    );
    return {
      element,
      update(row) {
        const find = (name) => set.rows.find((one) => one.name === name && one.seconds && chart.total(one)) ?? null;
        const other = row.before ?? row.naive;
        const naive = row.naive && row.naive.name !== other.name ? row.naive : null;
        total.textContent = chart.total(row) ? `${chart.text(chart.total(row))} ${chart.unit}` : "not measured";
        const start = other ? null : ["same", "the start", "that each stage is measured against", ""];
        sayVerdict(main, verdict(chart, row, other, find(other?.name)) ?? start);
        sayVerdict(more, verdict(chart, row, naive, find(naive?.name)));
        bars[0].update(naive && find(naive.name), scale, naive?.name ?? "");
        bars[1].update(other && find(other.name), scale, other?.name ?? "");
        bars[2].update(row, scale, row.name);
        limit.textContent = chart === CHARTS.time ? ofLimit(row) : "";
        legend.update(row, other && find(other.name), set);
        strip.update(row.name);
      },
    };
  }

  function ofLimit(row) {
    const bound = row.bound ? `bound by ${row.bound}` : "";
    if (!row.limit) return bound;
    const least = `${milliseconds(row.limit, row.seconds)} ms by roofline`;
    return `${percent(row.limit, row.seconds)} of the limit: ${[least, bound].filter(Boolean).join(", ")}`;
  }

  const SAYS = { "bit-equal": " to naive’s", "another update": ": not naive’s" }; // after a text on losses
  let tips = 0;

  function makeConditions(set) {
    const id = `worth-tip-${++tips}`;
    const lines = set.conditions.flatMap(([heading, text]) => [make("dt", {}, heading), make("dd", {}, text)]);
    const button = make("button", { type: "button", "aria-describedby": id }, "conditions");
    button.addEventListener("keydown", (event) => event.key === "Escape" && button.blur());
    return make(
      "div",
      { class: "worth-conditions" },
      button,
      make("div", { id, role: "tooltip" }, make("dl", {}, ...lines)),
    );
  }

  function makeCard(set) {
    const note = make("p", { class: "worth-note", hidden: true });
    const loss = make("p", { class: "worth-loss" });
    const charts = Object.values(CHARTS).map((chart) => makeChart(chart, set));
    const title = make("h3", {}, set.machine, " ", make("small", {}, set.name));
    const all = make("div", { class: "worth-charts" }, ...charts.map((chart) => chart.element), loss);
    const element = make("article", { class: "worth-card" }, make("header", {}, title, makeConditions(set)), note, all);
    return {
      set,
      element,
      update() {
        const found = rowAt(set);
        note.textContent = found.note;
        note.hidden = !found.note;
        element.classList.toggle("worth-still", Boolean(found.note));
        all.hidden = !found.row;
        if (all.hidden) return;
        charts.forEach((chart) => chart.update(found.row));
        const { last_loss, loss: against } = found.row;
        loss.hidden = !last_loss;
        loss.dataset.kind = /WRONG/.test(against ?? "") ? "bad" : "same";
        loss.replaceChildren(
          make("b", {}, "Loss "),
          `${last_loss ?? ""}`,
          against ? ` · ${against}${SAYS[against] ?? " of naive’s"}` : "",
        );
      },
    };
  }

  // -- stages of several processes

  function makeScaling({ where, batch, headings, cells, rows }) {
    const [machine, config] = where.split(": ");
    const linear = (n) => (n * rows[0][1]) / rows[0][0];
    const most = Math.max(...rows.map(([n, speed]) => Math.max(speed, linear(n))));
    const whole = (number) => Math.round(number).toLocaleString("en");
    const processes = (n) => `${n} process${n === 1 ? "" : "es"}`;
    const bars = rows.map(([n, speed]) => {
      const mark = make("b", {
        class: "worth-limit",
        style: { left: share(linear(n), most) },
        title: `linear: ${whole(linear(n))}`,
      });
      const bar = make("i", { data: { part: "gemm" }, style: { width: share(speed, most) } });
      const track = make(
        "div",
        { class: "worth-track", role: "img", "aria-label": `${processes(n)}: ${whole(speed)} tokens/s` },
        bar,
        mark,
      );
      const [name, value] = [
        make("span", { class: "worth-name" }, processes(n)),
        make("span", { class: "worth-value" }, whole(speed)),
      ];
      return make("div", { class: "worth-bar" }, name, track, value);
    });
    const headers = ["processes", ...headings].map((heading) => make("th", { scope: "col" }, ...words(heading)));
    const lines = cells.map(([name, ...texts]) =>
      make("tr", {}, make("th", { scope: "row" }, name), ...texts.map((text) => make("td", {}, text))),
    );
    const caption = make("caption", { class: "worth-hidden" }, `${stage} by number of processes`);
    const [n, speed] = rows.at(-1);
    const ratio = times(speed, rows[0][1]);
    const kind = speed >= rows[0][1] ? "good" : "bad";
    const verdict = make(
      "p",
      { class: "worth-verdict", data: { kind } },
      make("strong", {}, ratio),
      ` the tokens per second of ${processes(rows[0][0])}, on ${n}`,
    );
    return make(
      "article",
      { class: "worth-card" },
      make("h3", {}, machine, " ", make("small", {}, batch)),
      make(
        "section",
        { class: "worth-chart" },
        make("h4", {}, "Tokens per second"),
        verdict,
        make("div", { class: "worth-bars" }, ...bars),
      ),
      make(
        "table",
        { class: "worth-legend" },
        caption,
        make("thead", {}, make("tr", {}, ...headers)),
        make("tbody", {}, ...lines),
      ),
      make(
        "p",
        { class: "worth-fine" },
        ...words(`The marks: linear scaling. profile.py ${config} --mode=${figures.scaling_modes[stage]}`),
      ),
    );
  }

  // -- choosing and dropping

  const cards = make("div", { class: "worth-cards worth-machines" });
  const scaling = make("div", { class: "worth-cards worth-scaling" });
  const status = make("p", { class: "worth-status", role: "status" });
  const problem = make("p", { class: "worth-status worth-problem", role: "alert" });
  const selects = { machine: make("select", { id: "worth-machine" }), beside: make("select", { id: "worth-beside" }) };
  const file = make("input", { type: "file", accept: ".json,application/json", id: "worth-file" });

  function fillSelects() {
    for (const [key, select] of Object.entries(selects)) {
      const options = sets.map((set) =>
        make("option", { value: set.id }, `${set.machine.replace(", native bfloat16", "")}: ${set.name}`),
      );
      const chosen = select.value;
      select.replaceChildren(...(key === "beside" ? [make("option", { value: "" }, "nothing")] : []), ...options);
      select.value = sets.some((set) => set.id === chosen) ? chosen : key === "machine" ? figures.default : "";
    }
  }

  function redraw() {
    const chosen = [...new Set([selects.machine.value, selects.beside.value])]
      .map((id) => sets.find((set) => set.id === id))
      .filter(Boolean);
    drawn = chosen.map((set) => drawn.find((card) => card.set === set) ?? makeCard(set));
    cards.replaceChildren(...drawn.map((card) => card.element));
    show(stage);
  }

  function show(name) {
    stage = name;
    scaling.replaceChildren(...(figures.scaling[stage] ?? []).map(makeScaling));
    drawn.forEach((card) => card.update());
  }

  async function take(dropped) {
    status.textContent = problem.textContent = "";
    const before = sets.length;
    const name = dropped.name.slice(0, 80);
    try {
      const found = (await Dropped.read(dropped)).map((set, i) => ({
        ...set,
        id: `yours/${sets.length + i}`,
        machine: `yours: ${set.machine}`,
      }));
      sets.push(...found);
      fillSelects();
      selects.beside.value = found[0].id;
      redraw();
      status.textContent = `${name} is drawn beside ours. It stays on this page.`;
    } catch (error) {
      if (sets.length > before) {
        sets.length = before;
        fillSelects();
        redraw();
      }
      const why = error instanceof Dropped.Unreadable ? error.message : "it is damaged";
      problem.textContent = `${name} is not a results.json of profile.py: ${why}`;
    }
  }

  function listen() {
    for (const [key, select] of Object.entries(selects)) {
      select.addEventListener("change", () => {
        if (!select.value.startsWith("yours/")) store.set(key, select.value);
        redraw();
      });
    }
    file.addEventListener("change", () => {
      if (file.files[0]) take(file.files[0]);
      file.value = "";
    });
    const carries = (event) => event.dataTransfer?.types.includes("Files");
    const mark = (on) => document.documentElement.classList.toggle("worth-drop", on);
    document.addEventListener("dragover", (event) => {
      if (!carries(event)) return;
      event.preventDefault();
      mark(true);
    });
    document.addEventListener("dragleave", (event) => event.relatedTarget || mark(false));
    document.addEventListener("drop", (event) => {
      mark(false);
      if (!carries(event)) return;
      event.preventDefault();
      if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
    });
  }

  function begin() {
    fillSelects();
    for (const [key, select] of Object.entries(selects)) {
      if (sets.some((set) => set.id === store.get(key))) select.value = store.get(key);
    }
    document
      .getElementById("machine")
      .append(
        make("label", { for: "worth-machine" }, "Machine "),
        selects.machine,
        make("label", { for: "worth-beside" }, "beside "),
        selects.beside,
        make(
          "label",
          { class: "worth-file", title: "or drop it anywhere on the page; it stays on this page" },
          "your results.json",
          file,
        ),
        status,
        problem,
      );
    document.getElementById("worth").append(scaling, cards);
    listen();
    redraw();
  }

  begin();
  return { show };
})();
