// Climbs the ladder: shows the program at a stage, and marks its changes against another.
//
// The address names the view: #amp is a stage against the one before, #naive..amp against any other.

(() => {
  "use strict";

  const find = (id) => document.getElementById(id);
  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const plural = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

  // The stages: n, name, the positions of their lines in the table of all, and their functions [name, first, last].
  const ladder = JSON.parse(find("ladder").textContent).map((stage, n) => ({ n, ...stage }));
  const stages = new Map(ladder.map((stage) => [stage.name, stage]));
  const lines = [...find("lines").content.children];
  const texts = lines.map((line) => line.textContent);
  const links = [...find("rail").querySelectorAll("a")];
  const program = find("program");

  const view = {
    stage: null,
    base: null, // a stage that was chosen to compare with; null: the one before
    plain: matchMedia("(max-width: 66rem)").matches, // the diff alone: short enough for a narrow window
    quiet: false, // functions without a change are folded
    folded: new Map(), // {function: true or false}, as chosen
  };
  let placed = []; // the rows on the page
  let changes = []; // the first row of each change that is not folded
  let next = 0; // the change to jump to

  // -- differences, as Python's difflib finds them

  /** Blocks {i, j, n} that a[from.i:to.i] and b[from.j:to.j] share: the longest, and those on both sides of it. */
  function shared(a, b, from, to) {
    let best = { i: from.i, j: from.j, n: 0 };
    let above = [];
    for (let i = from.i; i < to.i; i++) {
      const runs = [];
      for (let j = from.j; j < to.j; j++) {
        if (a[i] !== b[j]) continue;
        const n = (runs[j] = (above[j - 1] ?? 0) + 1);
        if (n > best.n) best = { i: i - n + 1, j: j - n + 1, n };
      }
      above = runs;
    }
    if (!best.n) return [];
    const end = { i: best.i + best.n, j: best.j + best.n };
    return [...shared(a, b, from, best), best, ...shared(a, b, end, to)];
  }

  /** Runs of lines {i, i2, j, j2, equal}: equal in both programs, or a[i:i2] replaced by b[j:j2]. */
  function compare(a, b) {
    const runs = [];
    let [i, j] = [0, 0];
    const blocks = shared(a, b, { i, j }, { i: a.length, j: b.length });
    for (const block of [...blocks, { i: a.length, j: b.length, n: 0 }]) {
      if (i < block.i || j < block.j) runs.push({ i, i2: block.i, j, j2: block.j, equal: false });
      [i, j] = [block.i + block.n, block.j + block.n];
      if (block.n) runs.push({ i: block.i, i2: i, j: block.j, j2: j, equal: true });
    }
    return runs;
  }

  /** Groups runs into hunks: changes with two lines around them, apart where more than four are equal. */
  function hunks(runs, around = 2) {
    const found = [];
    runs.forEach((run, n) => {
      if (run.equal) return;
      const [before, after] = [runs[n - 1], runs[n + 1]];
      const near = before && found.length && before.i2 - before.i <= 2 * around;
      if (!near) found.push([]);
      const skip = before && !near ? Math.max(0, before.i2 - before.i - around) : 0;
      if (before) found.at(-1).push({ ...before, i: before.i + skip, j: before.j + skip });
      found.at(-1).push(run);
      const far = after && (n + 2 === runs.length || after.i2 - after.i > 2 * around);
      const length = after && Math.min(around, after.i2 - after.i);
      if (far) found.at(-1).push({ ...after, i2: after.i + length, j2: after.j + length });
    });
    return found;
  }

  /** Innermost function or class around a line, counted from 0; undefined in none. */
  const innermost = (stage, line) => stage.parts.findLast(([, first, last]) => first <= line + 1 && line < last);

  /** Heads a hunk as ladder.py diff does. */
  function header(hunk, base, stage) {
    const change = hunk.find((run) => !run.equal);
    const [where, from, to] = change.j2 > change.j ? [stage, change.j, change.j2] : [base, change.i, change.i2];
    let line = from;
    while (line < to && !texts[where.lines[line]]) line++;
    const name = innermost(where, line < to ? line : from)?.[0] ?? "";
    const [{ i, j }, { i2, j2 }] = [hunk[0], hunk.at(-1)];
    return `@@ -${i + 1},${i2 - i} +${j + 1},${j2 - j} @@ ${name}`.trimEnd();
  }

  // -- the program

  /** A line of a program; its mark is its tag: ins, del or div. */
  const row = (stage, line, tag) => ({ stage, line, tag, key: `${tag} ${stage.lines[line]}` });

  function* rowsOf(runs, base, stage) {
    for (const { i, i2, j, j2, equal } of runs) {
      if (!equal) for (let n = i; n < i2; n++) yield row(base, n, "del");
      for (let n = j; n < j2; n++) yield row(stage, n, equal ? "div" : "ins");
    }
  }

  function* rowsOfDiff(runs, base, stage) {
    for (const hunk of hunks(runs)) {
      yield { key: header(hunk, base, stage), tag: "div" };
      yield* rowsOf(hunk, base, stage);
    }
  }

  const against = () => view.base ?? ladder[Math.max(0, view.stage.n - 1)];

  /** Draws the program, or the diff, and returns in words how much changed. */
  function draw() {
    const [base, stage] = [against(), view.stage];
    const rows = [...(view.plain ? rowsOfDiff : rowsOf)(compare(base.lines, stage.lines), base, stage)];
    place(rows);
    fold(rows);
    const marked = rows.filter(({ tag }) => tag !== "div");
    const starts = rows.filter(({ tag }, n) => tag !== "div" && (rows[n - 1]?.tag ?? "div") === "div");
    changes = starts.filter(({ hidden }) => !hidden);
    next = 0;
    find("jump").textContent = starts.length ? `↓ ${plural(starts.length, "change")}` : "No changes";
    find("jump").disabled = !changes.length;
    find("quiet").hidden = view.plain;
    find("none").hidden = rows.length > 0;
    find("none").textContent = stage.n ? "Both programs are the same." : "The ladder starts here: climb to see a diff.";
    const added = marked.filter(({ tag }) => tag === "ins").length;
    return `${plural(added, "line")} added, ${marked.length - added} removed`;
  }

  /** Puts rows on the page. The elements of rows that are there already stay, as most do from stage to stage. */
  function place(rows) {
    const keys = [placed, rows].map((some) => some.map(({ key }) => key));
    for (const { i, i2, j, j2, equal } of compare(...keys)) {
      const [old, fresh] = [placed.slice(i, i2), rows.slice(j, j2)];
      fresh.forEach((row, n) => (row.element = equal ? old[n].element : build(row)));
      if (equal) continue;
      for (const { element } of old) element.remove();
      const all = document.createDocumentFragment();
      all.append(...fresh.map(({ element }) => element));
      program.insertBefore(all, placed[i2]?.element ?? null);
    }
    for (const { element, line, tag } of rows) {
      const number = tag === "del" || line === undefined ? undefined : String(line + 1);
      if (number && element.dataset.n !== number) element.dataset.n = number;
    }
    placed = rows;
  }

  /** Makes the element of a row; of a hunk's header, which belongs to no stage, its text. */
  function build({ stage, line, tag, key }) {
    if (!stage) return make("div", { className: "hunk", textContent: key });
    return make(tag, { className: "line" }, lines[stage.lines[line]].cloneNode(true));
  }

  // -- folding

  /** Gives each function's first line a button, and hides the lines of functions that are folded. */
  function fold(rows) {
    const around = ({ stage, line }) =>
      view.plain ? [] : stage.parts.filter(([, first, last]) => first <= line + 1 && line < last);
    const changed = new Set(rows.filter(({ tag }) => tag !== "div").flatMap(around).map(([name]) => name));
    const folded = (name) => view.folded.get(name) ?? (view.quiet && !changed.has(name));
    let above = null; // the visible row before this one
    for (const row of rows) {
      const parts = around(row);
      const head = parts.find(([, first]) => first === row.line + 1 && row.tag !== "del");
      button(row.element, head, head && folded(head[0]));
      row.hidden = parts.some(([name, first]) => first <= row.line && folded(name));
      row.blank = row.tag === "div" && row.stage && !texts[row.stage.lines[row.line]];
      if (view.quiet && !view.plain) row.hidden ||= row.blank && above?.blank;
      if (!row.hidden) above = row;
      if (row.element.hidden !== Boolean(row.hidden)) row.element.hidden = row.hidden;
    }
  }

  /** Adds, updates or removes the button that folds a part of the program: [name, first line, last line]. */
  function button(element, part, folded) {
    let found = element.querySelector(".fold");
    if (!part) return found?.remove();
    const [name, first, last] = part;
    if (!found) element.prepend((found = make("button", { type: "button", className: "fold" })));
    found.dataset.name = name;
    found.ariaLabel = `${name}, ${plural(last - first, "more line")}`;
    found.ariaExpanded = String(!folded);
  }

  // -- steps

  /** Reads the address; the first stage if it names none. */
  function read() {
    const [stage, base] = location.hash.slice(1).split("..").reverse();
    view.stage = stages.get(stage) ?? ladder[0];
    view.base = stages.get(base) ?? null;
  }

  function address(stage, base) {
    return base ? `#${base.name}..${stage.name}` : `#${stage.name}`;
  }

  function go(stage, base = view.base) {
    history.pushState(null, "", address(stage, base));
    show();
  }

  /** Shows the stage that the address names. */
  function show() {
    read();
    const { stage } = view;
    for (const article of document.querySelectorAll(".stage")) article.hidden = article.id !== stage.name;
    links.forEach((link, n) => {
      link.classList.toggle("climbed", n <= stage.n);
      if (n === stage.n) link.setAttribute("aria-current", "step");
      else link.removeAttribute("aria-current");
    });
    find("head").replaceChildren(...find(stage.name).querySelector("header").cloneNode(true).children);
    document.title = `${stage.name} · nanoladder`;
    options();
    const said = draw();
    find("command").textContent = `python ${stage.name}.py config/quickstart.py --stage=${stage.name}`;
    find("place").textContent = `${stage.n + 1} of ${ladder.length}`;
    for (const [id, step] of [["down", -1], ["up", 1]]) {
      const other = ladder[stage.n + step];
      find(id).hidden = !other;
      if (other) Object.assign(find(id), { href: address(other, view.base), textContent: other.name });
    }
    find("said").textContent = `${stage.name}, stage ${stage.n + 1} of ${ladder.length}: ${said}`;
    window.Worth?.show(stage.name);
    center(links[stage.n]); // from here on the browser lays out the page, once
    reveal();
  }

  /** Scrolls the rail to a link. Not by scrollIntoView, after which Tab would continue from there. */
  function center({ offsetLeft, offsetTop, offsetWidth }) {
    const rail = find("rail");
    rail.scrollTo(offsetLeft - (rail.clientWidth - offsetWidth) / 2, offsetTop - rail.clientHeight / 2);
  }

  /** Lists the stages to compare with; the first entry is the stage before. */
  function options() {
    const before = view.stage.n ? `${ladder[view.stage.n - 1].name}, the stage before` : "no stage before";
    const entries = [["", before], ...ladder.map(({ name }) => [name, name])];
    find("base").replaceChildren(...entries.map(([value, textContent]) => make("option", { value, textContent })));
    find("base").value = view.base?.name ?? "";
  }

  /** Scrolls the program to its first change, the diff to its top. */
  function reveal() {
    if (view.plain || !changes.length) program.scrollTop = 0;
    else jump("instant");
  }

  /** Scrolls the program to the next change. */
  function jump(behavior = "smooth") {
    if (!changes.length) return;
    const top = changes[next].element.offsetTop - program.clientHeight / 4;
    program.scrollTo({ top, behavior: matchMedia("(prefers-reduced-motion)").matches ? "instant" : behavior });
    next = (next + 1) % changes.length;
  }

  function press(name, pressed) {
    find(name).ariaPressed = String(pressed);
  }

  function choose(plain) {
    view.plain = plain;
    press("whole", !plain);
    press("plain", plain);
    draw();
    reveal();
  }

  // -- the program at that stage, to take along

  const source = () => view.stage.lines.map((n) => `${texts[n]}\n`).join("");

  async function copy() {
    let answer = "Copied";
    try {
      await navigator.clipboard.writeText(source());
    } catch {
      answer = "Not allowed: use Download";
    }
    find("copy").textContent = find("said").textContent = answer;
    setTimeout(() => (find("copy").textContent = "Copy"), 1500);
  }

  function download() {
    const url = URL.createObjectURL(new Blob([source()], { type: "text/x-python" }));
    make("a", { href: url, download: `${view.stage.name}.py` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  // -- light and dark

  function theme() {
    const root = document.documentElement;
    const preferred = matchMedia("(prefers-color-scheme: dark)");
    const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : preferred.matches);
    const update = () => press("theme", dark());
    find("theme").addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      try {
        localStorage.setItem("nanoladder.theme", root.dataset.theme);
      } catch {} // storage may be forbidden
      update();
    });
    update();
  }

  // -- keys: left and right climb anywhere, up and down on the rail, and wherever there is nothing to scroll

  function onKey(event) {
    if (event.defaultPrevented || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (event.target.closest?.("input, select, textarea, [role=slider]")) return;
    const onRail = find("rail").contains(event.target);
    const still = event.target === document.body && document.documentElement.scrollHeight <= innerHeight;
    const keys = { ArrowRight: 1, ArrowLeft: -1, ...((onRail || still) && { ArrowDown: 1, ArrowUp: -1 }) };
    if (!(event.key in keys)) return;
    event.preventDefault();
    const stage = ladder[view.stage.n + keys[event.key]];
    if (!stage) return;
    go(stage);
    if (onRail) links[view.stage.n].focus();
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest("#rail a, #steps a, .skip");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const stage = stages.get(link.hash.split(/[#.]+/).at(-1));
    if (stage) go(stage);
    else program.focus(); // and the address stays that of the stage
  });
  find("base").addEventListener("change", ({ target }) => go(view.stage, stages.get(target.value) ?? null));
  find("whole").addEventListener("click", () => choose(false));
  find("plain").addEventListener("click", () => choose(true));
  find("jump").addEventListener("click", () => jump());
  find("quiet").addEventListener("click", () => {
    view.quiet = !view.quiet;
    view.folded.clear();
    press("quiet", view.quiet);
    draw();
    reveal();
  });
  program.addEventListener("click", ({ target }) => {
    if (!target.matches(".fold")) return;
    view.folded.set(target.dataset.name, target.ariaExpanded === "true");
    draw();
  });
  find("copy").addEventListener("click", copy);
  find("download").addEventListener("click", download);
  addEventListener("keydown", onKey);
  addEventListener("popstate", show);
  theme();
  press("whole", !view.plain);
  press("plain", view.plain);
  show();
})();
