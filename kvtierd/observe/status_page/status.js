"use strict";
const $ = id => document.getElementById(id);
const NONE = "\u2013";
function el(tag, text, cls) {
  const e = document.createElement(tag);
  if (text !== undefined) e.textContent = text;
  if (cls) e.className = cls;
  return e;
}
function fill(id, nodes) { $(id).replaceChildren(...nodes); }
function percent(v) { return v === null || v === undefined ? NONE : (100 * v).toFixed(1) + " %"; }
function number(v, digits) { return v === null || v === undefined ? NONE : v.toLocaleString("en", {maximumFractionDigits: digits || 0}); }
function bytes(v) {
  if (v === null || v === undefined) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let i = 0;
  while (v >= 1024 && i < units.length - 1) { v /= 1024; i++; }
  return v.toFixed(i && v < 100 ? 1 : 0) + " " + units[i];
}
function seconds(v) { return v === null || v === undefined ? NONE : v < 1 ? Math.round(1000 * v) + " ms" : v.toFixed(1) + " s"; }
function when(at) { return new Date(1000 * at).toLocaleTimeString("en-GB"); }
const SVG = "http://www.w3.org/2000/svg";
function spark(ages, values, cls, most) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 240 32");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  const known = values.filter(v => v !== null);
  const top = most || Math.max(1e-9, ...known);
  svg.setAttribute("aria-label", "last hour, " + known.length + " points");
  const base = document.createElementNS(SVG, "line");
  for (const [k, v] of [["x1", 0], ["x2", 240], ["y1", 31], ["y2", 31]]) base.setAttribute(k, v);
  svg.append(base);
  let run = [];
  const flush = () => {
    if (run.length) {
      const line = document.createElementNS(SVG, "polyline");
      line.setAttribute("points", (run.length === 1 ? [run[0], run[0]] : run).join(" "));
      line.setAttribute("class", cls);
      svg.append(line);
    }
    run = [];
  };
  ages.forEach((age, i) => {
    if (values[i] === null) return flush();
    const x = 240 * (1 - Math.min(age, 3600) / 3600), y = 30 - 28 * Math.min(values[i] / top, 1);
    run.push(x.toFixed(1) + "," + y.toFixed(1));
  });
  flush();
  return svg;
}
function row(cells) {
  const tr = el("tr");
  for (const [text, cls] of cells) {
    const td = el("td", undefined, cls);
    td.append(text instanceof Node ? text : String(text));
    tr.append(td);
  }
  return tr;
}
const GOOD = {ready: "ok", joinable: "ok", failed: "bad", down: "bad"};
function show(s) {
  document.title = "kvtierd " + s.node;
  $("node").textContent = s.node || "no plan yet";
  const known = s.cluster.master ? "follows " + s.cluster.master : "knows no master";
  const part = !s.cluster.role ? "single node" : s.cluster.role === "master" ? "master of the cluster" : known;
  $("about").textContent = "kvtierd " + s.version + " \u00b7 " + part + (s.cluster.paused ? " \u00b7 paused" : "");
  $("tier").textContent = s.tier.state.replace("_", " ");
  $("tier").className = GOOD[s.tier.state] || "warn";
  $("why").textContent = s.tier.reasons.join("; ");
  const h = s.history;
  fill("tiers", s.tiers.map(t => row([
    [t.name, "w"], [t.where, "dim"], [percent(t.hit_rate["1m"]), "n"], [percent(t.hit_rate["5m"]), "n"],
    [percent(t.hit_rate["1h"]), "n"], [spark(h.age_seconds, h[t.name], t.name, 1)]])));
  const cards = [["Prompt tokens not computed", number(s.saved_tokens)]];
  const p = s.pool;
  if (p) cards.push(["Pool in use", bytes(p.used_bytes) + " of " + bytes(p.capacity_bytes)], ["Keys", number(p.stored_keys)],
    ["Segments", number(p.segments)], ["Evicted keys a second", number(p.evicted_keys_per_second, 1)],
    ["Pool turnovers an hour", number(p.turnovers_per_hour, 2)], ["Failed allocations, last minute", number(p.failed_allocations)]);
  if (p && p.hung_seconds > 5) cards.push(["MetaService silent for", seconds(p.hung_seconds)]);
  fill("pool", cards.map(([k, v]) => { const d = el("div"); d.append(el("span", k, "dim"), el("b", v)); return d; }));
  fill("evictions", p ? [spark(h.age_seconds, h.evicted, "evicted")] : [el("span", "the master has the pool", "dim")]);
  const engines = new Map(s.engines.map(e => [e.unit, e]));
  fill("units", s.units.map(u => {
    const e = engines.get(u.id) || {};
    const told = [u.reason, e.problem, e.registered === false ? "not registered with the MetaService" : "", e.l3_detached ? "L3 detached" : ""];
    return row([[u.id, "w"], [u.state, "w " + (GOOD[u.state] || (u.state === "stopped" || u.state === "planned" ? "dim" : "warn"))],
      [number(u.restarts), "n"], [number(e.running), "n"], [number(e.waiting), "n"], [seconds(e.ttft_p50_seconds), "n"],
      [seconds(e.ttft_p95_seconds), "n"], [number(e.failed_loads), "n"], [told.filter(Boolean).join("; "), "dim"]]);
  }));
  $("problem-box").hidden = !s.problems.length;
  fill("problems", s.problems.map(t => el("li", t)));
  fill("events", s.events.slice().reverse().map(e => row([[when(e.at), "w dim"],
    [e.severity, "w " + ({error: "bad", warning: "warn"}[e.severity] || "dim")], [e.unit, "w"], [e.message]])));
  $("fresh").textContent = "as of " + when(s.at) + (s.age_seconds !== null && s.age_seconds > 10 ? ", figures " + s.age_seconds.toFixed(0) + " s old" : "");
  $("fresh").className = s.age_seconds !== null && s.age_seconds > 10 ? "warn" : "dim";
}
async function poll() {
  try {
    const answer = await fetch("/status.json", {cache: "no-store", signal: AbortSignal.timeout(5000)});
    if (!answer.ok) throw new Error("status " + answer.status);
    show(await answer.json());
  } catch (error) {
    $("fresh").textContent = "kvtierd does not answer: what is shown is old";
    $("fresh").className = "bad";
  }
  setTimeout(poll, document.hidden ? 15000 : 2000);
}
poll();
