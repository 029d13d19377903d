"use strict";
// What a run says is text: it gets into the page as text nodes only, and pictures come as data alone.
const runs = JSON.parse(document.getElementById("runs").textContent);
const several = runs.length > 1;
const COLOURS = 6, DASHES = ["", "7 4", "2 3"], SVG = "http://www.w3.org/2000/svg";
const TITLES = { loss: "Loss", lr: "Learning rate", grad_norm: "Gradient norm", images_per_second: "Images per second" };

function el(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
function svg(tag, attributes = {}) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}
function picture(image, alt) {
  if (!image.src.startsWith("data:image/png;base64,")) return el("span");
  return el("img", { className: "picture", src: image.src, width: image.width, height: image.height, alt });
}
const colour = (run) => `var(--run-${run % COLOURS})`;
const dash = (run) => DASHES[Math.floor(run / COLOURS) % DASHES.length];
const known = (values) => values.filter((value) => value !== null && value !== undefined);
const last = (values) => known(values || []).at(-1) ?? null;
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
function format(value) {
  if (typeof value !== "number") return value ?? "";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  if (size && (size < 1e-3 || size >= 1e6)) return String(Number(value.toPrecision(3)).toExponential()).replace("e+", "e");
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 6 : 4 });
}
function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
function swatch(run) {
  const node = el("span", { className: "swatch" });
  node.style.background = colour(run);
  return node;
}
// A reference is named by what stands before its first comma, and only where there are several.
const shortly = (reference) => (reference ?? "").split(",")[0];
const references = [...new Set(runs.flatMap((run) => (run.evaluation?.rows || []).map((row) => row.reference)))];
const against = (reference) => (references.length > 1 ? ` against ${shortly(reference)}` : "");
const heading = (run) => [several ? swatch(run) : null, several ? runs[run].name : ""];

// The page and its sections; one that has nothing to show is left out.
const page = document.getElementById("page"), contents = el("nav", { ariaLabel: "On this page" });
function section(id, title, note, ...children) {
  page.append(el("section", { id }, el("h2", {}, title), note ? el("p", { className: "note" }, note) : null, ...children));
  contents.append(el("a", { href: `#${id}` }, title));
}
function table(head, rows, label) {
  const cell = (tag, content, scope) => {
    const { text, kind = "" } = content !== null && typeof content === "object" && !(content instanceof Node) ? content : { text: content };
    const node = el(tag, { className: kind }, typeof text === "number" ? format(text) : text ?? "");
    if (scope) node.scope = scope;
    return node;
  };
  const body = rows.map(({ cells: [first, ...others], marked }) =>
    el("tr", { className: marked ? "marked" : "" }, cell("th", first, "row"), ...others.map((each) => cell("td", each))));
  const whole = el("table", {}, el("thead", {}, el("tr", {}, ...head.map((each) => cell("th", each, "col")))), el("tbody", {}, ...body));
  return el("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: label }, whole);
}

// How a run went, in a few numbers.
function facts(run) {
  const { curves, audit, evaluation, total_steps } = run, found = {};
  const step = last(curves.step), seconds = last(curves.train_seconds);
  if (step !== null) found["Steps"] = total_steps > step ? `${format(step)} of ${format(total_steps)}` : format(step);
  if (seconds !== null) found["Training time"] = duration(seconds);
  const speeds = known(curves.images_per_second || []).sort((a, b) => a - b);
  if (speeds.length) found["Images per second"] = format(Number(speeds[speeds.length >> 1].toPrecision(3)));
  const loss = last(curves.smoothed_loss);
  if (loss !== null) found["Smoothed loss"] = format(loss);
  if (audit.length) found["Differs from paper"] = `in ${audit.filter(([, paper, own]) => paper !== own).length} of ${audit.length}`;
  // The columns are in the order of their numbers of images: of those with the most, the least against each reference.
  const distances = new Map();
  for (const [name, value, reference] of evaluation?.best || []) {
    const before = distances.get(reference);
    if (/^fid@/.test(name) && !(before?.name === name && before.value <= value)) distances.set(reference, { name, value });
  }
  for (const [reference, { name, value }] of distances) found[`Best ${inWords(name)}${against(reference)}`] = format(value);
  return found;
}
function showFacts() {
  const all = runs.map(facts), names = [...new Set(all.flatMap(Object.keys))];
  const title = several ? `${runs.length} runs` : runs[0].name;
  page.replaceChildren(el("header", {}, el("h1", {}, title), el("p", { className: "lead" }, describeData()), contents));
  if (!several)
    page.append(el("dl", { className: "facts" }, ...names.map((name) => el("div", {}, el("dt", {}, name), el("dd", {}, all[0][name])))));
  else {
    const differing = optionNames().filter(differs);
    const rows = names.map((name) => ({ cells: [name, ...all.map((each) => each[name] ?? "")] }));
    const marked = differing.map((name) => ({ cells: [name, ...runs.map((run) => ({ text: run.options[name] ?? "", kind: "marked" }))], marked: true }));
    const note = differing.length ? "* an option in which the runs differ" : "The runs have the same options.";
    section("runs", "The runs", note, table(["", ...runs.map((_, run) => el("span", {}, ...heading(run)))], [...rows, ...marked], "The runs side by side"));
  }
}
function describeData() {
  const all = runs.map(({ options }) => {
    const size = options.resolution ? ` at ${options.resolution}×${options.resolution}` : "";
    return `${options.dataset_name || options.train_data_dir || ""}${size}`;
  });
  const data = [...new Set(all)].join(", ");
  return several ? `Trained on ${data}: ${runs.map((run) => run.name).join(", ")}` : `A diffusion model trained on ${data}`;
}

// Options.
const optionNames = () => [...new Set(runs.flatMap((run) => Object.keys(run.options)))];
const differs = (name) => name !== "output_dir" && new Set(runs.map((run) => run.options[name])).size > 1;
function showOptions() {
  const rows = optionNames().map((name) => {
    const marked = differs(name), kind = marked ? "marked" : "";
    return { cells: [name, ...runs.map((run) => ({ text: run.options[name] ?? "", kind }))], marked };
  });
  const names = several ? runs.map((_, run) => el("span", {}, ...heading(run))) : ["value"];
  section("options", "Options", several ? "* an option in which the runs differ" : "",
    el("details", {}, el("summary", {}, `All ${rows.length} options`), table(["option", ...names], rows, "Options")));
}

// The audit.
function showAudit() {
  const audited = runs.map((run, index) => ({ run, index })).filter(({ run }) => run.audit.length);
  if (!audited.length) return;
  const papers = new Map(audited.flatMap(({ run }) => run.audit.map(([what, paper]) => [what, paper])));
  const rows = [...papers].map(([what, paper]) => {
    const own = audited.map(({ run }) => run.audit.find(([name]) => name === what)?.[2] ?? "");
    const cells = own.map((text) => ({ text, kind: text === paper ? "" : "marked" }));
    return { cells: [what, paper, ...cells], marked: own.some((text) => text !== paper) };
  });
  const names = audited.map(({ index }) => (several ? el("span", {}, ...heading(index)) : "this run"));
  section("audit", several ? "The paper and these runs" : "The paper and this run",
    "Ho et al. 2020, their CIFAR-10 run, beside what was trained here. * marks what differs.",
    table(["", "paper", ...names], rows, "Audit against the paper"));
}

// Curves. All of them share their horizontal axis: to zoom one is to zoom all.
const view = { axis: "step", zoom: null }, charts = [];
const tools = { reset: null };
function redraw() {
  for (const chart of charts) chart.draw();
  if (tools.reset) tools.reset.disabled = view.zoom === null;
}
function zoomTo(range) {
  view.zoom = range;
  redraw();
}
function wholeRange() {
  const ends = charts.flatMap((chart) => chart.lines.flatMap((line) => known(line.x[view.axis] || [])));
  return ends.length ? [Math.min(0, ...minmax(ends)), minmax(ends)[1]] : [0, 1];
}
function minmax(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return [low, high];
}
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high * (1 + 1e-9) && found.length < 50; at++) found.push(at * step);
  return found;
}
function logTicks(low, high) {
  const found = [], wide = Math.log10(high / low) > 3;
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const factor of wide ? [1] : [1, 2, 5]) found.push(factor * 10 ** power);
  const inside = found.filter((value) => value >= low && value <= high);
  return inside.length > 1 ? inside : ticks(low, high, 4);
}
function unitOfTime(seconds) {
  return seconds > 3 * 3600 ? [3600, "h"] : seconds > 300 ? [60, "min"] : [1, "s"];
}
function nearestIndex(values, wanted) {
  let best = -1;
  values.forEach((value, index) => {
    if (value !== null && (best < 0 || Math.abs(value - wanted) < Math.abs(values[best] - wanted))) best = index;
  });
  return best;
}

function makeChart(title, lines, { log = false, lowerIsBetter = null } = {}) {
  const root = svg("svg", { tabindex: 0, role: "img" }), tip = el("div", { className: "tip", hidden: true });
  const spoken = el("span", { className: "hidden", ariaLive: "polite" });
  const summary = el("span"), figure = el("figure", { className: "chart" }, el("figcaption", {}, el("h3", {}, title), summary), root, tip, spoken);
  let height = 220;
  const LEFT = 54, RIGHT = 10, TOP = 10, BOTTOM = 34;
  const all = lines.flatMap((line) => known(line.y)), [lowest, highest] = minmax(all);
  const isLog = log && lowest > 0 && highest / lowest > 8;
  const main = lines.filter((line) => !line.faint);
  if (main.length === 1) {
    const values = known(main[0].y), best = lowerIsBetter === null ? "" : `, best ${format(minmax(values)[lowerIsBetter ? 0 : 1])}`;
    summary.textContent = `last ${format(values.at(-1))}${best}`;
  }
  root.setAttribute("aria-label", `${title}: ${main.map((line) => `${line.name} ends at ${format(last(line.y))}`).slice(0, 6).join("; ")}. ` +
    "Arrow keys read the values, plus and minus zoom, Escape shows all.");
  let scale = null, cursor = null, selected = null;

  function draw() {
    height = root.clientHeight || 220;
    const width = root.clientWidth || 480, [whole0, whole1] = wholeRange(), [x0, x1] = view.zoom || [whole0, whole1];
    const drawn = lines.filter((line) => known(line.x[view.axis] || []).length);
    const visible = drawn.flatMap((line) => line.y.filter((value, i) => value !== null && line.x[view.axis][i] >= x0 && line.x[view.axis][i] <= x1));
    let [y0, y1] = visible.length ? minmax(visible) : [lowest, highest];
    if (y0 === y1) [y0, y1] = isLog ? [y0 / 2, y1 * 2] : [y0 - (Math.abs(y0) || 1) / 10, y1 + (Math.abs(y1) || 1) / 10];
    else if (isLog) [y0, y1] = [y0 / (y1 / y0) ** 0.05, y1 * (y1 / y0) ** 0.05];
    else [y0, y1] = [y0 >= 0 && y0 < (y1 - y0) / 3 ? 0 : y0 - (y1 - y0) * 0.06, y1 + (y1 - y0) * 0.06];
    const level = isLog ? Math.log : (value) => value;
    const toX = (value) => LEFT + ((value - x0) / (x1 - x0 || 1)) * (width - LEFT - RIGHT);
    const toY = (value) => height - BOTTOM - ((level(value) - level(y0)) / (level(y1) - level(y0))) * (height - TOP - BOTTOM);
    const fromX = (pixel) => x0 + ((pixel - LEFT) / (width - LEFT - RIGHT)) * (x1 - x0);
    scale = { x0, x1, toX, toY, fromX, width, drawn };

    root.replaceChildren();
    root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const clip = svg("clipPath", { id: `clip-${charts.indexOf(api)}` });
    clip.append(svg("rect", { x: LEFT, y: 0, width: Math.max(0, width - LEFT - RIGHT + 4), height: height }));
    root.append(clip);
    const write = (text, attributes) => {
      const node = svg("text", attributes);
      node.textContent = text;
      root.append(node);
    };
    for (const value of isLog ? logTicks(y0, y1) : ticks(y0, y1, 5)) {
      root.append(svg("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: toY(value), y2: toY(value) }));
      write(format(Number(value.toPrecision(6))), { x: LEFT - 6, y: toY(value) + 4, "text-anchor": "end" });
    }
    const [unit, unitName] = view.axis === "step" ? [1, "step"] : unitOfTime(x1);
    for (const value of ticks(x0 / unit, x1 / unit, Math.max(2, Math.min(7, width / 90)))) {
      const place = toX(value * unit), anchor = place > width - 24 ? "end" : "middle";
      write(format(Number(value.toPrecision(6))), { x: place, y: height - BOTTOM + 15, "text-anchor": anchor });
    }
    write(view.axis === "step" ? "step" : `${unitName} of training`, { x: (LEFT + width - RIGHT) / 2, y: height - 4, "text-anchor": "middle" });
    for (const line of drawn) {
      const group = svg("g", { "clip-path": `url(#clip-${charts.indexOf(api)})` });
      let path = "", pen = "M";
      line.y.forEach((value, i) => {
        const at = line.x[view.axis][i];
        if (value === null || at === null) return void (pen = "M");
        path += `${pen}${toX(at).toFixed(1)} ${toY(value).toFixed(1)}`;
        pen = "L";
        if (line.dots) {
          const dot = svg("circle", { cx: toX(at), cy: toY(value), r: 3.2 });
          dot.style.fill = colour(line.run);
          group.append(dot);
        }
      });
      const curve = svg("path", { class: line.faint ? "curve faint" : "curve", d: path, "stroke-dasharray": line.dash ?? dash(line.run) });
      curve.style.stroke = colour(line.run);
      group.append(curve);
      root.append(group);
    }
    tip.hidden = true;
    cursor = null;
  }

  function point(at) {
    if (!scale) return;
    root.querySelectorAll(".cursor").forEach((node) => node.remove());
    const first = scale.drawn.find((line) => !line.faint) || scale.drawn[0];
    const index = first ? nearestIndex(first.x[view.axis], at) : -1;
    if (index < 0) return;
    const snapped = first.x[view.axis][index], place = scale.toX(snapped);
    cursor = index;
    root.append(svg("line", { class: "cursor", x1: place, x2: place, y1: TOP, y2: height - BOTTOM }));
    const texts = [view.axis === "step" ? `step ${format(snapped)}` : `${format(Number(snapped.toPrecision(5)))} s of training`];
    for (const line of scale.drawn) {
      const own = nearestIndex(line.x[view.axis], snapped), value = own < 0 ? null : line.y[own];
      if (value !== null) texts.push(`${line.name}: ${format(value)}`);
    }
    tip.textContent = texts.join("\n");
    tip.hidden = false;
    const left = root.offsetLeft + place, room = figure.clientWidth;
    tip.style.left = `${Math.max(4, left + 12 + tip.offsetWidth > room ? left - 12 - tip.offsetWidth : left + 12)}px`;
    tip.style.top = `${root.offsetTop + TOP}px`;
    return texts.join(", ");
  }
  const atPointer = (event) => {
    const box = root.getBoundingClientRect(), pixel = ((event.clientX - box.left) / box.width) * scale.width;
    return Math.min(scale.x1, Math.max(scale.x0, scale.fromX(pixel)));
  };
  root.addEventListener("pointerdown", (event) => {
    if (event.button === 0) selected = { from: atPointer(event), pixel: event.clientX };
    root.setPointerCapture(event.pointerId);
  });
  root.addEventListener("pointermove", (event) => {
    const at = atPointer(event);
    point(at);
    root.querySelectorAll(".selection").forEach((node) => node.remove());
    if (!selected) return;
    const [left, right] = [scale.toX(selected.from), scale.toX(at)].sort((a, b) => a - b);
    root.append(svg("rect", { class: "selection", x: left, y: TOP, width: right - left, height: height - TOP - BOTTOM }));
  });
  root.addEventListener("pointerup", (event) => {
    if (selected && Math.abs(event.clientX - selected.pixel) > 8) zoomTo([selected.from, atPointer(event)].sort((a, b) => a - b));
    selected = null;
  });
  root.addEventListener("pointercancel", () => { selected = null; draw(); });
  root.addEventListener("pointerleave", () => { if (!selected) { tip.hidden = true; root.querySelectorAll(".cursor").forEach((node) => node.remove()); } });
  root.addEventListener("dblclick", () => zoomTo(null));
  root.addEventListener("keydown", (event) => {
    const first = scale?.drawn.find((line) => !line.faint) || scale?.drawn[0];
    if (!first) return;
    const xs = first.x[view.axis], move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) {
      const from = cursor ?? (move > 0 ? -1 : xs.length), to = Math.min(xs.length - 1, Math.max(0, from + move * (event.shiftKey ? 10 : 1)));
      if (xs[to] !== null) spoken.textContent = point(xs[to]) || "";
    } else if (event.key === "+" || event.key === "-") {
      const middle = cursor === null ? (scale.x0 + scale.x1) / 2 : xs[cursor], half = ((scale.x1 - scale.x0) / 2) * (event.key === "+" ? 0.5 : 2);
      const [low, high] = wholeRange(), range = [Math.max(low, middle - half), Math.min(high, middle + half)];
      zoomTo(range[0] <= low && range[1] >= high ? null : range);
    } else if (event.key === "Escape") zoomTo(null);
    else return;
    event.preventDefault();
  });
  const api = { figure, lines, draw };
  charts.push(api);
  return figure;
}

function legend() {
  if (!several) return null;
  const items = runs.map((run, index) => {
    const sample = svg("svg", { width: 28, height: 10, "aria-hidden": "true" });
    const stroke = svg("line", { x1: 0, x2: 28, y1: 5, y2: 5, "stroke-width": 2.5, "stroke-dasharray": dash(index) });
    stroke.style.stroke = colour(index);
    sample.append(stroke);
    return el("li", {}, sample, run.name);
  });
  return el("ul", { className: "legend" }, ...items);
}
const prefix = (run) => (several ? `${runs[run].name}, ` : "");

function trainingCharts() {
  return Object.entries(TITLES).flatMap(([name, title]) => {
    const lines = runs.flatMap(({ curves }, run) => {
      const line = (column, label, extra) => curves[column] ? [{ run, name: prefix(run) + label, x: curves, y: curves[column], ...extra }] : [];
      return name === "loss"
        ? [...line("loss", "loss", { faint: true, dash: "" }), ...line("smoothed_loss", "smoothed")]
        : line(name, title.toLowerCase());
    });
    return lines.length ? [makeChart(title, lines, { log: name === "loss" || name === "grad_norm" })] : [];
  });
}
const isOfFew = (column) => /^(s?fid|fd)[_@]/.test(column) && Number(column.split("@")[1]) < 10000;
const inWords = (column) => isOfFew(column) ? `${column} (few images)` : column;
const isDistance = (column) => /^(s?fid|fd|k[id]d?)[_@]/.test(column);
function evaluationCharts() {
  const columns = [...new Set(runs.flatMap((run) => run.evaluation?.columns || []))].filter((name) => !name.includes("_std@"));
  return columns.flatMap((column) => {
    const lines = runs.flatMap(({ evaluation }, run) => {
      const groups = new Map();
      for (const row of evaluation?.rows || []) {
        if (row.step === null || row[column] === null || row[column] === undefined) continue;
        const key = evaluation.method.map((part) => row[part] ?? "").join("\n");
        groups.set(key, [...(groups.get(key) || []), row]);
      }
      return [...groups.values()].map((rows, order) => {
        rows.sort((a, b) => a.step - b.step);
        const [{ weights, sampler, steps, settings, reference }] = rows, method = [weights, sampler, steps && `${format(steps)} steps`, settings];
        const x = { step: rows.map((row) => row.step), train_seconds: rows.map((row) => row.train_seconds) };
        return { run, name: prefix(run) + method.filter(Boolean).join(" ") + against(reference), x, y: rows.map((row) => row[column]), dots: true, dash: DASHES[order % DASHES.length] };
      });
    });
    const steps = new Set(lines.flatMap((line) => line.x.step));
    return steps.size > 1 ? [makeChart(inWords(column), lines, { log: isDistance(column), lowerIsBetter: isDistance(column) })] : [];
  });
}
function showCurves() {
  const training = trainingCharts(), measured = evaluationCharts();
  if (!charts.length) return;
  const axes = ["step", "train_seconds"].filter((axis) => charts.some((chart) => chart.lines.some((line) => known(line.x[axis] || []).length)));
  const choose = axes.map((axis) => {
    const choice = el("input", { type: "radio", name: "axis", value: axis, checked: axis === view.axis });
    choice.addEventListener("change", () => { view.axis = axis; zoomTo(null); });
    return el("label", {}, choice, axis === "step" ? "steps" : "time of training");
  });
  tools.reset = el("button", { type: "button", disabled: true, id: "reset" }, "Show all");
  tools.reset.addEventListener("click", () => zoomTo(null));
  const bar = el("div", { className: "tools" }, el("fieldset", {}, el("legend", { className: "hidden" }, "Horizontal axis"), ...choose), tools.reset);
  const smoothed = runs.some((run) => run.curves.smoothed_loss) ? " The faint line is the loss itself, the strong one is smoothed." : "";
  section("curves", "Curves", `Drag across a chart to zoom in on all of them; a double click shows everything again.${smoothed}`,
    bar, legend(), el("div", { className: "charts" }, ...training), measured.length ? el("div", { className: "charts small gap" }, ...measured) : null);
  new ResizeObserver(redraw).observe(page);
  redraw();
}

// Sample grids over the steps.
function showGrids() {
  const steps = [...new Set(runs.flatMap((run) => run.grids.map((grid) => grid.step)))].sort((a, b) => a - b);
  if (!steps.length) return;
  const frames = runs.flatMap(({ grids }, run) => {
    if (!grids.length) return [];
    const image = picture(grids[0], ""), label = el("span"), caption = several ? el("figcaption", {}, ...heading(run), label) : null;
    const figure = el("figure", {}, caption, image);
    const show = (step) => {
      const grid = grids.findLast((each) => each.step <= step) || grids[0];
      Object.assign(image, { src: grid.src, width: grid.width, height: grid.height, alt: `Samples of ${runs[run].name} at step ${format(grid.step)}` });
      label.textContent = ` at step ${format(grid.step)}`;
    };
    return [{ figure, show }];
  });
  const slider = el("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, id: "step", ariaLabel: "Step of the samples" });
  const shown = el("output", { htmlFor: "step" }), play = el("button", { type: "button" }, "Play");
  const show = () => {
    const step = steps[Number(slider.value)];
    shown.textContent = `step ${format(step)}`;
    slider.setAttribute("aria-valuetext", shown.textContent);
    for (const frame of frames) frame.show(step);
  };
  let timer = null;
  const stop = () => { clearInterval(timer); timer = null; play.textContent = "Play"; };
  slider.addEventListener("input", () => { stop(); show(); });
  play.addEventListener("click", () => {
    if (timer) return stop();
    if (Number(slider.value) === steps.length - 1) slider.value = 0;
    show();
    play.textContent = "Pause";
    timer = setInterval(() => {
      slider.value = Number(slider.value) + 1;
      show();
      if (Number(slider.value) === steps.length - 1) stop();
    }, 700);
  });
  show();
  const single = steps.length === 1 && !several ? `At step ${format(steps[0])}.` : "The same noise at every step, so that only the training changes the pictures.";
  section("samples", "Samples while it trained", single,
    steps.length > 1 ? el("div", { className: "tools" }, play, slider, shown) : null,
    el("div", { className: "side" }, ...frames.map((frame) => frame.figure)));
}

// Noise levels over the steps.
function heatmap(values, timesteps, paint, describe, label) {
  const { edges, steps } = timesteps, width = values.length, height = edges.length;
  // The bins are equally high, and those without a timestep are left out: a gap is drawn for each.
  const size = edges[0][1] - edges[0][0], low = minmax(edges.flat())[0], rows = Math.round((minmax(edges.flat())[1] - low) / size);
  const canvas = el("canvas", { width, height: rows, role: "img", ariaLabel: label }), tip = el("div", { className: "tip", hidden: true });
  const context = canvas.getContext("2d"), rowOf = edges.map(([bottom]) => rows - 1 - Math.round((bottom - low) / size));
  const draw = () => {
    context.clearRect(0, 0, width, rows);
    values.forEach((column, x) => column.forEach((value, bin) => {
      if (value === null) return;
      context.fillStyle = paint(value);
      context.fillRect(x, rowOf[bin], 1, 1);
    }));
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
  const cells = el("div", { className: "cells" }, canvas, tip);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), left = event.clientX - box.left, top = event.clientY - box.top;
    const x = Math.min(width - 1, Math.max(0, Math.floor((left / box.width) * width))), row = Math.floor((top / box.height) * rows), bin = rowOf.indexOf(row);
    const value = bin < 0 ? null : values[x][bin];
    tip.hidden = value === null;
    if (value === null) return;
    tip.textContent = `step ${format(steps[x])}, log-SNR ${edges[bin].map((edge) => edge.toFixed(1)).join(" to ")}\n${describe(value)}`;
    tip.style.left = `${left > box.width / 2 ? left - tip.offsetWidth - 10 : left + 14}px`;
    tip.style.top = `${Math.max(0, top - tip.offsetHeight / 2)}px`;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  const levels = el("div", { className: "levels" }, el("span", {}, "image"), el("span", {}, "noise"));
  return el("div", { className: "plot" }, levels, cells, el("div", { className: "steps" }, el("span", {}, "step 0"), el("span", {}, format(steps.at(-1)))));
}
const times = (value) => (value >= 1 ? `${format(Number(value.toPrecision(3)))} ×` : `1/${format(Number((1 / value).toPrecision(3)))} ×`);
function scaleBar(paint, low, high) {
  const canvas = el("canvas", { width: 60, height: 1, ariaHidden: "true" }), context = canvas.getContext("2d");
  const draw = () => {
    context.clearRect(0, 0, 60, 1);
    for (let x = 0; x < 60; x++) {
      context.fillStyle = paint(x / 59);
      context.fillRect(x, 0, 1, 1);
    }
  };
  draw();
  return el("span", { className: "scale" }, low, canvas, high);
}
function showTimesteps() {
  const found = runs.map(({ timesteps }, run) => ({ timesteps, run })).filter(({ timesteps }) => timesteps);
  if (!found.length) return;
  const moved = found.filter(({ timesteps }) => !timesteps.is_uniform), flat = found.filter(({ timesteps }) => timesteps.is_uniform);
  const sizes = moved.flatMap(({ timesteps }) => timesteps.density.flatMap((row) => known(row).filter((value) => value > 0).map((value) => Math.abs(Math.log2(value)))));
  const reach = Math.min(5, Math.max(1, Math.ceil(minmax(sizes.length ? sizes : [1])[1])));
  const around1 = (share) => (share >= 0 ? `rgba(214, 96, 30, ${Math.min(1, share)})` : `rgba(26, 110, 180, ${Math.min(1, -share)})`);
  const losses = found.flatMap(({ timesteps }) => timesteps.loss.flatMap(known)).filter((value) => value > 0), [least, most] = losses.length ? minmax(losses) : [1, 2];
  const ofLoss = (share) => `rgba(124, 80, 190, ${0.06 + 0.94 * Math.min(1, Math.max(0, share))})`;
  const children = [];
  if (moved.length) {
    const maps = moved.map(({ timesteps, run }) => el("figure", { className: "heat" }, el("figcaption", {}, ...heading(run), several ? `: ${timesteps.sampler}` : timesteps.sampler),
      heatmap(timesteps.density, timesteps, (value) => around1(value > 0 ? Math.log2(value) / reach : -1), (value) => `drawn ${times(value)} as often as uniformly`,
        `Density of the timesteps of ${runs[run].name} by log-SNR over the steps`)));
    children.push(el("div", { className: "tools gap" }, el("h3", {}, "How often a noise level was drawn"), scaleBar((x) => around1(2 * x - 1), `1/${2 ** reach}`, `${2 ** reach} × uniform`)),
      el("div", { className: "side" }, ...maps));
  }
  if (losses.length) {
    const maps = found.map(({ timesteps, run }) => el("figure", { className: "heat" }, several ? el("figcaption", {}, ...heading(run)) : null,
      heatmap(timesteps.loss, timesteps, (value) => ofLoss(Math.log(value / least) / Math.log(most / least || 2)), (value) => `loss ${format(value)}`,
        `Loss of ${runs[run].name} by log-SNR over the steps`)));
    children.push(el("div", { className: "tools gap" }, el("h3", {}, "The loss at each noise level"), scaleBar(ofLoss, format(least), format(most))),
      el("div", { className: "side" }, ...maps));
  }
  const names = flat.map(({ run }) => (several ? runs[run].name : "This run")).join(", ");
  const note = `Each row is a range of log-SNR, from clean images at the top to noise at the bottom.${names ? ` ${names} drew all timesteps equally often from start to end.` : ""} Where nothing was drawn, no loss is known.`;
  section("timesteps", "Timesteps", note, ...children);
}

// The table of evaluate.py.
function showEvaluation() {
  const measured = runs.map(({ evaluation }, run) => ({ evaluation, run })).filter(({ evaluation }) => evaluation);
  if (!measured.length) return;
  const columns = [...new Set(measured.flatMap(({ evaluation }) => evaluation.columns))].filter((name) => !name.includes("_std@"));
  const every = measured.flatMap(({ evaluation }) => evaluation.rows), labels = { num_images: "images", steps: "denoising steps" };
  // What all rows have in common is said once.
  const valuesOf = (name) => [...new Set(every.map((row) => row[name] ?? ""))], how = ["weights", "sampler", "steps", "settings", "num_images"];
  const method = ["step", ...[...how, "reference"].filter((name) => valuesOf(name).length > 1)], words = { weights: " weights", steps: " denoising steps", num_images: " images" };
  const common = how.filter((name) => valuesOf(name).length === 1 && valuesOf(name)[0] !== "").map((name) => `${format(valuesOf(name)[0])}${words[name] || ""}`);
  const rows = measured.flatMap(({ evaluation, run }) => {
    const best = new Map();
    for (const [metric, value] of evaluation.best) best.set(metric, [...(best.get(metric) || []), value]);
    return evaluation.rows.map((row) => {
      const first = several ? el("span", {}, ...heading(run)) : format(row.step) || row.images;
      const cells = method.slice(several ? 0 : 1).map((name) => ({ text: name === "reference" ? shortly(row[name]) : row[name], kind: typeof row[name] === "number" ? "number" : "" }));
      const values = columns.map((name) => ({ text: row[name], kind: best.get(name)?.includes(row[name]) ? "number best" : "number" }));
      return { cells: [first, ...cells, ...values] };
    });
  });
  const numeric = ["step", "steps", "num_images"];
  const head = [...(several ? ["run"] : []), ...method.map((name) => ({ text: labels[name] || name, kind: numeric.includes(name) && !(name === "step" && !several) ? "number" : "" })),
    ...columns.map((name) => ({ text: inWords(name), kind: "number" }))];
  const measuredAgainst = references.filter(Boolean).join("; ");
  const few = columns.some(isOfFew);
  section("metrics", "Metrics", `${measuredAgainst ? `Measured against ${measuredAgainst}${common.length ? `; ${common.join(", ")}` : ""}. ` : ""}The best of each is bold.` +
    (few ? " FID of fewer than 10,000 images is too high to be compared with published numbers; compare it with the same number of images only." : ""),
    table(head, rows, "Metrics"));
}

// Generated images.
function showGalleries() {
  const all = runs.flatMap(({ galleries }, run) => galleries.map((gallery) => ({ gallery, run })));
  if (!all.length) return;
  const blocks = all.map(({ gallery, run }) => {
    const { images, nearest, grid } = gallery;
    const count = gallery.count > images.length ? `${format(images.length)} of ${plural(gallery.count, "image")}` : plural(images.length, "image");
    const title = el("h3", {}, ...heading(run), several ? `: ${gallery.name}` : gallery.name);
    const items = images.map((image) => {
      const what = `seed ${format(image.seed)}${image.shows ? `, ${image.shows}` : ""}`, node = picture(image, `Generated image, ${what}`);
      Object.assign(node, { className: "" });
      return el("li", {}, node, el("span", {}, what));
    });
    const large = images.some((image) => image.width > 64 || image.shows);
    const list = items.length ? el("ul", { className: large ? "gallery large" : "gallery" }, ...items) : picture(grid, `Generated images of ${gallery.name}`);
    return el("div", { className: "gap" }, title, items.length ? el("p", { className: "note" }, count) : null, list, nearest ? showNearest(nearest) : null);
  });
  const missing = all.every(({ gallery }) => !gallery.nearest);
  section("gallery", "Generated images", "", ...blocks,
    missing ? el("p", { className: "note gap" }, "To see the nearest training images here as well, run generate.py with --nearest 5, then report.py again.") : null);
}
function showNearest(nearest) {
  const image = picture(nearest, "Generated images, each with its nearest training images to the right"), count = nearest.rows.length;
  // Below a caption of 22 pixels and an edge of 2, the rows are equally high.
  const labels = nearest.rows.map(({ seed, distance }, row) => {
    const item = el("li", {}, `seed ${format(seed)}${distance === null ? "" : `, distance ${format(Number(distance.toPrecision(3)))}`}`);
    item.style.top = `${24 + ((row + 0.5) * (nearest.height - 24)) / count}px`;
    return item;
  });
  const note = count ? "The distance is the root mean square difference of the pixels to the nearest, of 255 grey levels; near 0 the image is a copy." : null;
  return el("details", { open: true }, el("summary", {}, "Nearest training images"), note ? el("p", { className: "note" }, note) : null,
    el("div", { className: "nearest", tabIndex: 0, role: "region", ariaLabel: "Nearest training images" }, count ? el("ol", {}, ...labels) : null, image));
}

function showFooter() {
  const sizes = "Sample grids are embedded as they are, at most 40 of a run, and of each folder of generated images at most 64; the rest is in the run's folder. " +
    "Points of long curves are means of neighbouring lines of metrics.jsonl.";
  page.append(el("footer", {}, el("p", {}, sizes), el("p", {}, "Written by report.py of Exact DDPM. This page loads nothing from the network.")));
}

showFacts();
showAudit();
showCurves();
showGrids();
showTimesteps();
showEvaluation();
showGalleries();
showOptions();
showFooter();
