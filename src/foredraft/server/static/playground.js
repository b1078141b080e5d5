// Playground page: runs requests, and draws their records at most once per frame.

import { ApiError, firstModel, stream } from "./api.js";
import { Card } from "./card.js";
import { Chart } from "./chart.js";
import { askForKey, hideKey, installPromptFitting, readKey, readRequest, withoutDrafts } from "./form.js";
import { Pane } from "./pane.js";
import { ORIGINS, Record } from "./record.js";
import { describe, drawTree } from "./tree.js";

const $ = (selector) => document.querySelector(selector);
const card = new Card($("#card"), $("#spoken"));
const charts = { length: new Chart($("#length-chart"), "Tokens per pass over seconds", 2), rate: new Chart($("#rate-chart"), "Tokens per second over seconds", 10) };
const handlers = { onChoose: showToken, onPin: pin };
const panes = { main: new Pane($("#output"), handlers), plain: new Pane($("#plain-output"), handlers) };
const records = { main: null, plain: null };
const DRAW_EVERY = 40; // milliseconds between two drawings: the server may share this processor
const CHART_EVERY = 200; // milliseconds between two drawings of the charts
const ONE_COLUMN = "(max-width: 999px)"; // the same limit as in the style sheet
let model = null;
let running = null; // AbortController of the request in flight
let isDrawScheduled = false;
let hovered = null; // {pass, record} of the token under the pointer
let pinned = null; // {pass, record} of the token that was clicked
let shownPass = null; // pass that the tree shows
let lastDraw = 0; // time of the last drawing, in milliseconds
let lastChartDraw = 0;

const formats = {
  tokens: (value) => String(value),
  passes: (value) => String(value),
  length: (value) => value.toFixed(2),
  rate: (value) => value.toFixed(value < 10 ? 1 : 0),
  first: seconds,
  total: seconds,
};

function seconds(value) {
  return value < 1 ? `${(value * 1000).toFixed(0)} ms` : `${value.toFixed(2)} s`;
}

const write = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};

function showToken(token, span, record, isByKey) {
  hovered = token?.pass ? { pass: token.pass, record } : null;
  if (token) card.show(token, span, record, model?.drafter, isByKey);
  else card.hide();
  drawPass();
}

function pin(token, record, pane) {
  for (const other of Object.values(panes)) if (other !== pane) other.unpin();
  pinned = token && { pass: token.pass, record };
  drawPass();
}

function unpin() {
  for (const pane of Object.values(panes)) pane.unpin();
  pinned = null;
  drawPass();
}

function showPass(pass, record, title) {
  if (pass !== shownPass) drawTree($("#tree"), pass, record);
  shownPass = pass;
  write($("#tree-title"), title);
  write($("#tree-note"), pass ? `${describe(pass)}` : "");
}

// Shows the first of these that exists: the hovered pass, the pinned pass, the last pass with a draft, the last pass.
function drawPass() {
  const chosen = hovered ?? pinned;
  if (chosen) {
    const ending = chosen.pass === pinned?.pass ? ", pinned" : "";
    showPass(chosen.pass, chosen.record, `Pass ${chosen.pass.number}${ending}`);
    return;
  }
  const record = records.main;
  const last = record?.passes.at(-1);
  const pass = record?.lastDraftedPass ?? last;
  const name = pass === last ? "Last pass" : "Last pass with a draft";
  showPass(pass, record, pass ? `${name} (${pass.number})` : name);
}

function drawFigures() {
  for (const [name, attribute] of [["main", "figure"], ["plain", "plain"]]) {
    const figures = records[name]?.figures;
    for (const element of document.querySelectorAll(`[data-${attribute}]`)) {
      const key = element.dataset[attribute];
      const hasValue = figures && figures.tokens > 0 && Number.isFinite(figures[key]);
      const text = hasValue ? formats[key](figures[key]) : name === "main" ? "–" : "";
      write(element, text && name === "plain" ? `plain ${text}` : text);
    }
  }
}

function drawLegend() {
  const record = records.main;
  ORIGINS.forEach((origin, i) => {
    const count = record?.counts[origin] ?? 0;
    const share = record?.numTokens ? count / record.numTokens : 0;
    write($(`[data-count=${origin}]`), count ? `${count} · ${(share * 100).toFixed(0)} %` : "0");
    $(".shares").children[i].style.flexGrow = share;
  });
}

function drawCharts() {
  lastChartDraw = performance.now();
  const [main, plain] = [records.main, records.plain].map((record) => record?.series() ?? []);
  const column = (points, i) => points.map((point) => [point[0], point[i]]);
  charts.length.draw(column(main, 1), column(plain, 1));
  charts.rate.draw(column(main, 2), column(plain, 2));
}

function draw() {
  lastDraw = performance.now();
  panes.main.draw();
  panes.plain.draw();
  drawFigures();
  drawLegend();
  drawPass();
  if (performance.now() - lastChartDraw > CHART_EVERY) drawCharts();
}

function scheduleDraw() {
  if (isDrawScheduled) return;
  isDrawScheduled = true;
  requestAnimationFrame(function wait(now) {
    if (now - lastDraw < DRAW_EVERY) {
      requestAnimationFrame(wait);
      return;
    }
    isDrawScheduled = false;
    draw();
  });
}

function note(name, text) {
  write($(`[data-note=${name}]`), text);
}

// Runs one request and draws it in the pane `name`; returns its record.
async function execute(name, request, signal) {
  const record = new Record();
  records[name] = record;
  panes[name].show(record);
  let isShown = false;
  note(name, "streaming");
  try {
    await stream(request.path, request.body, {
      key: readKey(),
      signal,
      onChunk: (chunk) => {
        record.add(chunk);
        if (name === "main" && !isShown) isShown = showWork(record);
        scheduleDraw();
      },
    });
    note(name, record.finish === "length" ? "stopped at max tokens" : "finished");
  } catch (error) {
    note(name, error.name === "AbortError" ? "stopped" : record.tokens.length ? "interrupted" : "refused");
    throw error;
  } finally {
    draw();
    drawCharts();
  }
  return record;
}

function bringIntoView(element, block) {
  const hasReducedMotion = matchMedia("(prefers-reduced-motion: reduce)").matches;
  element.scrollIntoView({ block, behavior: hasReducedMotion ? "instant" : "smooth" });
}

// Scrolls to the output at the first token if the page has one column: the output is below the form then.
function showWork(record) {
  if (!record.tokens.length) return false;
  if (matchMedia(ONE_COLUMN).matches) bringIntoView($(".work"), "start");
  return true;
}

// Writes the comparison of both runs. isUnseeded: the texts are independent samples and may differ.
function writeVerdict(main, plain, isUnseeded) {
  const [a, b] = [main.figures, plain.figures];
  const same = main.text === plain.text;
  const times = `${seconds(a.total)} instead of ${seconds(b.total)}`;
  const faster = `${(a.rate / b.rate).toFixed(2)}× the speed of plain decoding (${times})`;
  let texts = "the texts are identical";
  if (!same && isUnseeded) texts = "the texts are two samples; set a seed or temperature 0 to compare them";
  else if (!same) texts = `the texts differ from character ${firstDifference(main.text, plain.text) + 1}`;
  write($("#verdict"), `${faster}; ${texts}.`);
  $("#verdict").classList.remove("waits");
}

function firstDifference(a, b) {
  let index = 0;
  while (index < a.length && a[index] === b[index]) index++;
  return index;
}

function reset(isCompared) {
  records.main = records.plain = null;
  panes.main.show(null);
  panes.plain.show(null);
  hovered = pinned = null;
  for (const id of ["#error", "#status"]) write($(id), "");
  write($("#verdict"), isCompared ? "Plain decoding follows." : "");
  $("#verdict").classList.add("waits");
  document.body.classList.toggle("compared", isCompared);
  $("#plain-pane").hidden = $("#verdict").hidden = !isCompared;
  for (const key of document.querySelectorAll("[data-key]")) key.hidden = !isCompared;
  note("main", "");
  note("plain", isCompared ? "waiting for the first run" : "");
}

function setBusy(isBusy) {
  $("#run").disabled = isBusy;
  $("#stop").disabled = !isBusy;
  document.body.classList.toggle("busy", isBusy);
}

async function run() {
  if (running) return;
  const isCompared = $("#compare").checked;
  reset(isCompared);
  running = new AbortController();
  setBusy(true);
  try {
    if (!model) await loadModel();
    const request = readRequest(model?.id);
    write($("#status"), "Running.");
    const main = await execute("main", request, running.signal);
    if (isCompared) {
      write($("#status"), "Running again without drafts.");
      const plain = await execute("plain", withoutDrafts(request), running.signal);
      const { temperature = 1, seed } = request.body;
      writeVerdict(main, plain, temperature > 0 && seed === undefined);
    }
    write($("#status"), summary(main));
  } catch (error) {
    report(error);
  } finally {
    running = null;
    setBusy(false);
  }
}

function summary(record) {
  const { tokens, passes } = record.figures;
  return passes ? `Done: ${tokens} tokens in ${passes} passes.` : "Done; this server sends no trace.";
}

function report(error) {
  if (!$("#verdict").hidden) write($("#verdict"), "Not compared.");
  if (error.name === "AbortError") {
    write($("#status"), `Stopped after ${records.plain?.numTokens ?? records.main?.numTokens ?? 0} tokens.`);
    return;
  }
  write($("#status"), "");
  const line = error instanceof ApiError ? error.message : `The page failed: ${error.message}`;
  write($("#error"), error.status === 401 ? askForKey() : line);
  bringIntoView($("#error"), "nearest");
}

async function loadModel() {
  model = await firstModel(readKey());
  hideKey();
  write($("#model"), [model?.id, model?.drafter && `drafter ${model.drafter}`].filter(Boolean).join(" · "));
}

$("#form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
$("#stop").addEventListener("click", () => running?.abort());
$("#key").addEventListener("change", async () => {
  write($("#error"), "");
  await loadModel().catch(report);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  }
  if (event.key === "Escape") {
    running?.abort();
    card.hide();
    unpin();
  }
});
// Hide the card if its token scrolls away.
for (const scroller of [document, $(".work")]) scroller.addEventListener("scroll", () => card.hide(), { passive: true });
installPromptFitting();
drawCharts();
loadModel().catch(report);
