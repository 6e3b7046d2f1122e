// Climbs the ladder: shows the program at a stage, and marks its changes against another.
//
// The address names the view: #amp is a stage against the one that it stands on, #naive..amp against any other.
"use strict";

const find = (id) => document.getElementById(id);
const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
const plural = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

// A stage: its name, the number of the stage that it stands on, the positions of its lines in the table of all, and
// its functions [name, first line, last line], and the positions of its file's lines in `alone`.
// changes: {a: {b: [lines that are equal, then removed, then added, again and again]}} for a < b.
const { stages, changes, alone } = JSON.parse(find("ladder").textContent);
const numbers = new Map(stages.map(({ name }, n) => [name, n]));
const lines = [...find("lines").content.children];
const texts = lines.map((line) => line.textContent);
const links = [...find("rail").querySelectorAll("a")];
const program = find("program");

const view = {
  stage: 0,
  base: null, // a stage that was chosen to compare with; null: the one that it stands on
  plain: matchMedia("(max-width: 66rem)").matches, // the diff alone: short enough for a narrow window
  quiet: false, // functions without a change are folded
  folded: new Map(), // {function: true or false}, as chosen
};
let jumps = []; // the first line of each change, next to jump to first

const store = {
  get(key) {
    try {
      return localStorage.getItem(`nanoladder.${key}`);
    } catch {} // storage may be forbidden
  },
  set(key, value) {
    try {
      localStorage.setItem(`nanoladder.${key}`, value);
    } catch {} // chosen for this visit alone
  },
};

// -- the program

/** A line of a stage's program as a row; its mark is its tag: ins, del or div. */
function row(stage, n, tag) {
  const element = make(tag, { className: "line" }, lines[stage.lines[n]].cloneNode(true));
  if (tag !== "del") element.dataset.n = n + 1;
  const around = stage.parts.filter(([, first, last]) => first <= n + 1 && n < last).map(([name]) => name);
  return { element, around, changed: tag !== "div", added: tag === "ins", text: texts[stage.lines[n]] };
}

function* rowsOf(base, stage) {
  const [a, b] = [Math.min(base, stage), Math.max(base, stage)];
  let [n, old] = [0, 0];
  const counts = a === b ? [] : changes[a][b];
  for (let k = 0; k < counts.length; k += 3) {
    const [equal, first, second] = counts.slice(k, k + 3);
    const [removed, added] = a === base ? [first, second] : [second, first];
    for (let i = 0; i < equal; i++, old++) yield row(stages[stage], n++, "div");
    for (let i = 0; i < removed; i++) yield row(stages[base], old++, "del");
    for (let i = 0; i < added; i++) yield row(stages[stage], n++, "ins");
  }
  while (n < stages[stage].lines.length) yield row(stages[stage], n++, "div");
}

/** The changed rows with two around them, and over each group the function of its first change, as in ladder.py diff. */
function* hunks(rows) {
  let apart = true;
  for (const [n, { element }] of rows.entries()) {
    const near = rows.slice(Math.max(0, n - 2), n + 3).some(({ changed }) => changed);
    if (near && apart) yield make("div", { className: "hunk", textContent: `@@ ${heading(rows.slice(n))}`.trim() });
    if (near) yield element;
    apart = !near;
  }
}

function heading(rows) {
  const first = rows.slice(rows.findIndex(({ changed }) => changed));
  const end = first.findIndex(({ changed }) => !changed);
  const run = first.slice(0, end < 0 ? first.length : end);
  const here = run.some(({ added }) => added) ? run.filter(({ added }) => added) : run;
  return (here.find(({ text }) => text) ?? here[0]).around.at(-1) ?? "";
}

/** All rows; classes and functions fold. */
function nested(rows) {
  const root = document.createDocumentFragment();
  const open = [root];
  const names = [];
  for (const { element, around, changed } of rows) {
    while (names.length && !around.includes(names.at(-1))) {
      names.pop();
      open.pop();
    }
    if (around.length > names.length) {
      const name = around.at(-1);
      const part = make("details", { open: !(view.folded.get(name) ?? view.quiet) }, make("summary", {}, element));
      part.dataset.name = name;
      open.at(-1).append(part);
      open.push(part);
      names.push(name);
    } else open.at(-1).append(element);
    if (changed) open.slice(1).forEach((part) => (part.open = !view.folded.get(part.dataset.name)));
  }
  return [root];
}

const below = () => view.base ?? stages[view.stage].on ?? view.stage;

/** Draws the program, or the diff, and returns in words how much changed. */
function draw() {
  const rows = [...rowsOf(below(), view.stage)];
  const changed = rows.filter((row) => row.changed);
  const first = (view.base ?? stages[view.stage].on) === null; // has no diff
  const plain = view.plain && !first;
  program.replaceChildren(...(plain ? hunks(rows) : nested(rows)));
  program.classList.toggle("quiet", view.quiet);
  if (plain && !changed.length) program.append(make("p", { textContent: "Both programs are the same." }));
  const mechanism = find(stages[view.stage].name).querySelector(".mechanism");
  if (view.base === null) program.append(mechanism.cloneNode(true));
  jumps = rows.filter((row, n) => row.changed && !rows[n - 1]?.changed).map(({ element }) => element);
  find("jump").textContent = jumps.length ? `↓ ${plural(jumps.length, "change")}` : "No changes";
  find("jump").disabled = !jumps.length;
  find("plain").disabled = first;
  find("quiet").hidden = plain;
  for (const [id, on] of [["whole", !plain], ["plain", plain], ["quiet", view.quiet]]) press(id, on);
  program.scrollTop = 0;
  if (!plain) jump("instant");
  const added = changed.filter((row) => row.added).length;
  return `${plural(added, "line")} added, ${changed.length - added} removed`;
}

/** Scrolls the program to the next change. */
function jump(behavior = "smooth") {
  if (!jumps.length) return;
  const top = jumps[0].getBoundingClientRect().top - program.getBoundingClientRect().top + program.scrollTop;
  const still = matchMedia("(prefers-reduced-motion)").matches;
  program.scrollTo({ top: top - program.clientHeight / 4, behavior: still ? "instant" : behavior });
  jumps.push(jumps.shift());
}

// -- climbing

const address = (stage, base) => `#${base === null ? "" : `${stages[base].name}..`}${stages[stage].name}`;

function go(stage, base = view.base) {
  if (location.hash !== address(stage, base)) history.pushState(null, "", address(stage, base));
  show();
}

/** Shows what the address names; the first stage if it names none. */
function show() {
  const [base, name] = location.hash.slice(1).split(".."); // #stage, or #base..stage
  view.stage = numbers.get(name ?? base) ?? 0;
  view.base = name === undefined ? null : (numbers.get(base) ?? null);
  const { stage } = view;
  const path = [];
  for (let n = stage; n !== null; n = stages[n].on) path.push(n);
  links.forEach((link, n) => {
    link.classList.toggle("climbed", path.includes(n));
    if (n === stage) link.ariaCurrent = "page";
    else link.removeAttribute("aria-current");
  });
  for (const { name } of stages) find(name).hidden = name !== stages[stage].name;
  find("head").replaceChildren(...find(stages[stage].name).querySelector("header").cloneNode(true).children);
  document.title = `${stages[stage].name} · nanoladder`;
  find("down").replaceChildren(...(path[1] === undefined ? [] : [link(path[1])]));
  find("up").replaceChildren(...standingOn(stage).map(link));
  find("place").textContent = `${stage + 1} of ${stages.length}`;
  find("against").options[0].textContent = path[1] === undefined ? "nothing below" : `${stages[path[1]].name}, below`;
  find("against").value = view.base === null ? "" : stages[view.base].name;
  const several = path.includes(numbers.get("ddp"));
  find("command").textContent = `${several ? "torchrun --nproc_per_node=2" : "python"} ${stages[stage].name}.py data/python_stdlib`;
  find("status").textContent = `${stages[stage].name}, ${stage + 1} of ${stages.length}: ${draw()}`;
  center(links[stage]);
}

const standingOn = (stage) => [...stages.keys()].filter((n) => stages[n].on === stage);
const link = (n) => make("a", { href: address(n, view.base), textContent: stages[n].name });

/** Scrolls the rail to a link. Not by scrollIntoView, after which Tab would continue from there. */
function center({ offsetLeft, offsetTop, offsetWidth }) {
  const rail = find("rail");
  rail.scrollTo(offsetLeft - (rail.clientWidth - offsetWidth) / 2, offsetTop - rail.clientHeight / 2);
}

/** Left and right climb anywhere; up and down go through the list, on the rail and where there is nothing to scroll. */
function onKey(event) {
  if (event.defaultPrevented || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  if (event.target.closest?.("select")) return;
  const onRail = find("rail").contains(event.target);
  const still = event.target === document.body && document.documentElement.scrollHeight <= innerHeight;
  const { stage } = view;
  const near = { ArrowRight: standingOn(stage)[0], ArrowLeft: stages[stage].on };
  if (onRail || still) Object.assign(near, { ArrowDown: stage + 1, ArrowUp: stage - 1 });
  if (!(event.key in near)) return;
  event.preventDefault();
  if (!stages[near[event.key]]) return;
  go(near[event.key]);
  if (onRail) links[view.stage].focus();
}

// -- the program, to take along

/** The stage as one file that imports nothing of nanoladder. */
const source = () => stages[view.stage].alone.map((n) => `${alone[n]}\n`).join("");

async function copy() {
  let answer = "Copied";
  try {
    await navigator.clipboard.writeText(source());
  } catch {
    answer = "Not allowed: use Download";
  }
  find("copy").textContent = find("status").textContent = answer;
  setTimeout(() => (find("copy").textContent = "Copy"), 1500);
}

function download() {
  const url = URL.createObjectURL(new Blob([source()], { type: "text/x-python" }));
  make("a", { href: url, download: `${stages[view.stage].name}.py` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// -- choices

function press(name, pressed) {
  find(name).ariaPressed = String(pressed);
}

/** Redraws with a choice changed: {plain} or {quiet}. */
function choose(choice) {
  Object.assign(view, choice);
  draw();
}

/** Shows the figures of the machine, and of the one beside it. */
function machines() {
  const chosen = ["machine", "beside"].map((id) => find(id).value);
  for (const card of document.querySelectorAll("[data-set]")) card.hidden = !chosen.includes(card.dataset.set);
}

function theme() {
  const root = document.documentElement;
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : preferred.matches);
  find("theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    store.set("theme", root.dataset.theme);
    press("theme", dark());
  });
  press("theme", dark());
}

for (const select of [find("machine"), find("beside")]) {
  const kept = store.get(select.id);
  if ([...select.options].some(({ value }) => value === kept)) select.value = kept;
  select.addEventListener("change", () => {
    store.set(select.id, select.value);
    machines();
  });
}
document.addEventListener("click", (event) => {
  const to = event.target.closest("a[href^='#']");
  if (!to || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const stage = numbers.get(to.hash.split(/[#.]+/).at(-1));
  if (stage === undefined) program.focus(); // and the address stays that of the stage
  else go(stage);
});
program.addEventListener("click", ({ target }) => {
  const part = target.closest("summary")?.parentElement; // not yet toggled
  if (part?.dataset.name) view.folded.set(part.dataset.name, part.open);
});
find("against").addEventListener("change", ({ target }) => go(view.stage, numbers.get(target.value) ?? null));
find("whole").addEventListener("click", () => choose({ plain: false }));
find("plain").addEventListener("click", () => choose({ plain: true }));
find("quiet").addEventListener("click", () => {
  view.folded.clear();
  choose({ quiet: !view.quiet });
});
find("jump").addEventListener("click", () => jump());
find("copy").addEventListener("click", copy);
find("download").addEventListener("click", download);
addEventListener("keydown", onKey);
addEventListener("popstate", show);
theme();
machines();
show();
