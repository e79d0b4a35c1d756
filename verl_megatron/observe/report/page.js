// Plots and the table of samples. All text of the run reaches the page as text: by textContent, or escaped for
// the few tags that plotly.js knows.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  // Okabe and Ito's colours, which people with colour blindness can tell apart
  const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999999"];
  const PHASES = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#ff9da7",
    "#9c755f", "#bab0ac", "#1f77b4", "#98df8a"];
  const DASHES = ["solid", "dot", "dash", "dashdot", "longdash"];
  const CONFIG = {displayModeBar: false, responsive: true};
  const all = (selector) => [...document.querySelectorAll(selector)];
  const byId = (id) => document.getElementById(id);
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // ---- plots ------------------------------------------------------------------------------------------------

  const drawn = new Map(); // element → function that draws it again
  let zoom = null; // iterations that all plots show; null: all

  function smoothed(values, width) {
    if (width < 2) return values;
    const result = [], window = [];
    let total = 0;
    for (const value of values) { // the mean of the values so far in the window
      if (value !== null) { window.push(value); total += value; }
      if (window.length > width) total -= window.shift();
      result.push(value === null || !window.length ? null : total / window.length);
    }
    return result;
  }

  function layout(extra) {
    const axis = {gridcolor: variable("--line"), zerolinecolor: variable("--line"), automargin: true};
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: {color: variable("--text"), size: 12, family: "system-ui, sans-serif"},
      margin: {l: 48, r: 12, t: 8, b: 36},
      legend: {orientation: "h", y: -0.16, x: 0, font: {size: 11}},
      hovermode: "x unified", hoverlabel: {bgcolor: variable("--card"), font: {color: variable("--text")}},
      ...extra,
      xaxis: {...axis, ...(extra.xaxis || {})}, yaxis: {...axis, ...(extra.yaxis || {})},
    };
  }

  const several = data.runs.length > 1; // then colours are those of the runs, and a legend has the metrics only
  const isShown = (number) => !several || document.querySelector(`.runs input[value="${number}"]`).checked;

  function traces(plot, width) {
    const found = [];
    for (const number of plot.runs.filter(isShown)) {
      const run = data.runs[number];
      plot.curves.forEach(([key, label], place) => {
        const curve = run.series[key];
        if (!curve) return;
        const x = run.steps[curve[0]], colour = COLOURS[(several ? number : place) % COLOURS.length];
        const name = plain(several ? `${run.name}: ${label}` : label);
        const line = {color: colour, width: 1.6, dash: several ? DASHES[place % DASHES.length] : "solid"};
        const mode = x.length > 60 ? "lines" : "lines+markers";
        const common = {x, name, legendgroup: key, showlegend: !several, marker: {size: 4, color: colour}};
        if (width > 1) {
          found.push({...common, y: curve[1], mode: "lines", line: {color: colour, width: 1}, opacity: 0.3, showlegend: false, hoverinfo: "skip"});
        }
        found.push({...common, y: smoothed(curve[1], width), mode, line, hovertemplate: "%{y:.4~g}"});
      });
    }
    if (several && plot.curves.length > 1) {
      plot.curves.forEach(([key, label], place) => found.push({
        x: [null], y: [null], name: plain(label), legendgroup: key, mode: "lines", hoverinfo: "skip",
        line: {color: variable("--quiet"), dash: DASHES[place % DASHES.length]},
      }));
    }
    return found;
  }

  function stacked(plot) {
    const run = data.runs[plot.runs[0]];
    return plot.curves.filter(([key]) => run.series[key]).map(([key, label], place) => ({
      x: run.steps[run.series[key][0]], y: run.series[key][1].map((value) => value ?? 0), name: plain(label),
      stackgroup: "phases", mode: "lines", line: {width: 0.5, shape: "hvh", color: PHASES[place % PHASES.length]},
      fillcolor: PHASES[place % PHASES.length], hovertemplate: "%{y:.3~g} s",
    }));
  }

  function alarmShapes(plot) {
    const keys = new Set(plot.curves.map(([key]) => key)), shapes = [];
    for (const number of plot.runs.filter(isShown)) {
      for (const step of data.runs[number].resumed) {
        shapes.push({type: "line", xref: "x", yref: "paper", x0: step + 0.5, x1: step + 0.5, y0: 0, y1: 1, layer: "below",
          line: {width: 1, dash: "dot", color: variable("--quiet")}});
      }
      const last = Math.max(...data.runs[number].steps.map((steps) => steps[steps.length - 1]));
      for (const alarm of data.runs[number].alarms.filter((each) => keys.has(each.metric))) {
        shapes.push({
          type: "rect", xref: "x", yref: "paper", x0: alarm.first - 0.5, x1: alarm.last + 0.5, y0: 0, y1: 1, layer: "below",
          fillcolor: variable("--alarm"), opacity: 0.13, line: {width: 0},
          label: {
            text: plain(several ? `${data.runs[number].name}: ${alarm.name}` : alarm.name), font: {size: 10, color: variable("--alarm")},
            textposition: `${["top", "middle", "bottom"][shapes.length % 3]} ${alarm.first > 0.6 * last ? "right" : "left"}`,
          },
        });
      }
    }
    return shapes;
  }

  function drawPlot(element) {
    const plot = data.plots[Number(element.dataset.plot)];
    const log = document.querySelector(`button[data-plot="${element.dataset.plot}"]`).getAttribute("aria-pressed") === "true";
    const isStacked = plot.kind === "stacked";
    const found = isStacked ? stacked(plot) : traces(plot, Number(byId("smoothing").value));
    Plotly.react(element, found, layout({
      showlegend: plot.curves.length > 1,
      xaxis: zoom ? {range: zoom} : {autorange: true},
      yaxis: {type: log ? "log" : "linear", exponentformat: "SI", rangemode: plot.from_zero ? "tozero" : "normal"},
      shapes: alarmShapes(plot),
    }), CONFIG);
    if (drawn.has(element)) return;
    drawn.set(element, drawPlot);
    element.on("plotly_relayout", (change) => {
      if (!byId("together").checked) return;
      const range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (range[0] === undefined && !change["xaxis.autorange"]) return;
      const next = range[0] === undefined ? null : range;
      if (JSON.stringify(next) === JSON.stringify(zoom)) return;
      zoom = next;
      for (const other of drawn.keys()) {
        if (other !== element && other.dataset.plot) {
          Plotly.relayout(other, next ? {"xaxis.range": [...next]} : {"xaxis.autorange": true});
        }
      }
    });
  }

  const labelOf = ({rank, world}) => plain(world ? `rank ${rank} · ${world}` : `rank ${rank}`);

  function timelineTraces(ranks) {
    const names = [...new Set(ranks.flatMap((rank) => rank.events.map((event) => event[0])))], found = [];
    names.forEach((name, place) => {
      const colour = name === "waiting" ? "#999999" : PHASES[place % PHASES.length], title = plain(name.replaceAll("_", " "));
      const isOnlyWaiting = ranks.every((rank) => rank.events.every(([other, start, busy]) => other !== name || busy === start));
      for (const waits of isOnlyWaiting ? [true] : [false, true]) {
        const y = [], base = [], x = [], text = [];
        ranks.forEach((rank, row) => rank.events.filter((event) => event[0] === name).forEach(([, start, busy, end]) => {
          const seconds = waits ? end - busy : busy - start;
          if (seconds <= 0) return;
          y.push(row); base.push(waits ? busy : start); x.push(seconds);
          text.push(labelOf(rank));
        }));
        const said = waits ? (isOnlyWaiting ? "waits:" : "waits after") : "";
        found.push({
          type: "bar", orientation: "h", width: 0.75, y, x, base, text, textposition: "none", name: title, legendgroup: name, showlegend: isOnlyWaiting || !waits,
          marker: waits ? {color: "rgba(0,0,0,0)", pattern: {shape: "/", fgcolor: colour, size: 6}} : {color: colour},
          hovertemplate: `%{text} ${said} ${title}: %{x:.3~g} s<extra></extra>`,
        });
      }
    });
    return found;
  }

  function worldsOf(ranks) { // consecutive rows of one world
    const found = [];
    ranks.forEach(({world}, row) => {
      if (!found.length || found[found.length - 1].world !== world) found.push({world, first: row, last: row});
      found[found.length - 1].last = row;
    });
    return found;
  }

  function drawTimeline(element) {
    const ranks = data.runs[Number(element.dataset.run)].timeline, worlds = worldsOf(ranks);
    const apart = Math.ceil(ranks.length / 40), rows = ranks.map((_, row) => row).filter((row) => row % apart === 0);
    const height = Math.min(120 + 26 * ranks.length, 1200);
    element.style.height = `${height}px`;
    Plotly.react(element, timelineTraces(ranks), layout({
      barmode: "overlay", hovermode: "closest", bargap: 0.25, xaxis: {title: {text: "seconds"}}, legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0},
      yaxis: {range: [ranks.length - 0.5, -0.5], tickvals: rows, ticktext: rows.map((row) => labelOf(ranks[row]))},
      shapes: worlds.slice(1).map(({first}) => ({
        type: "line", xref: "paper", x0: 0, x1: 1, y0: first - 0.5, y1: first - 0.5, line: {width: 1, color: variable("--quiet")},
      })),
    }), CONFIG);
    drawn.set(element, drawTimeline);
  }

  function draw(element) {
    (element.classList.contains("timeline") ? drawTimeline : drawPlot)(element);
  }

  const redraw = () => drawn.forEach((how, element) => how(element));
  const places = all(".plot, .timeline");
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((each) => each.isIntersecting)) {
      seen.unobserve(entry.target);
      draw(entry.target);
    }
  }, {rootMargin: "200px"});
  places.forEach((element) => seen.observe(element));
  addEventListener("beforeprint", () => places.filter((element) => !drawn.has(element)).forEach(draw));
  dark.addEventListener("change", redraw);
  byId("smoothing")?.addEventListener("change", redraw);
  all(".runs input").forEach((box) => {
    box.nextElementSibling.style.backgroundColor = COLOURS[Number(box.value) % COLOURS.length];
    box.addEventListener("change", redraw);
  });
  all("button.log").forEach((button) => button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
    drawPlot(document.querySelector(`.plot[data-plot="${button.dataset.plot}"]`));
  }));

  // ---- from an alarm to its plot ----------------------------------------------------------------------------

  for (const alarm of all(".alarm")) {
    const run = Number(alarm.dataset.run);
    const place = data.plots.findIndex((plot) => plot.runs.includes(run) && plot.curves.some(([key]) => key === alarm.dataset.metric));
    if (!alarm.dataset.metric || place < 0) continue;
    alarm.classList.add("linked");
    alarm.tabIndex = 0;
    const show = () => {
      const figure = document.querySelector(`.plot[data-plot="${place}"]`).closest("figure");
      all("figure.found").forEach((other) => other.classList.remove("found"));
      figure.classList.add("found");
      figure.scrollIntoView({block: "center"});
    };
    alarm.addEventListener("click", show);
    alarm.addEventListener("keydown", (event) => { if (event.key === "Enter") show(); });
  }

  // ---- samples ----------------------------------------------------------------------------------------------

  const MOST_SURPRISING = 5; // nats at which the colour of a log-prob is full
  const LEAST_SCALE = 0.01; // nats at which that of a gap is full, at least: rounding is not worth a colour
  const short = (value, digits) => value === null || Number.isNaN(value) ? "–" : Number(value.toPrecision(digits)).toString();

  function scaleOf(group) { // nats of full colour: what 1 % of the group's tokens exceed
    const gaps = group.samples.flatMap((sample) => sample.gaps || []).filter((gap) => gap !== null).map(Math.abs).sort((a, b) => a - b);
    return Math.max(LEAST_SCALE, gaps.length ? gaps[Math.floor(0.99 * (gaps.length - 1))] : 0);
  }

  function colourOf(sample, at, how, scale) {
    if (how === "none" || sample.gaps[at] === null) return "";
    if (how === "logprobs") return `rgba(204, 121, 167, ${Math.min(-sample.logprobs[at] / MOST_SURPRISING, 1).toFixed(2)})`;
    const share = Math.min(Math.abs(sample.gaps[at]) / scale, 1).toFixed(2);
    return sample.gaps[at] < 0 ? `rgba(230, 120, 20, ${share})` : `rgba(30, 130, 210, ${share})`;
  }

  function responseOf(sample, how, scale) {
    const text = make("div", "text response");
    if (!sample.tokens) {
      text.textContent = sample.response;
      return text;
    }
    const gapAt = sample.left_out ? sample.tokens.length - 500 : -1;
    sample.tokens.forEach((token, at) => {
      if (at === gapAt) text.append(make("span", "mark", ` … ${sample.left_out} tokens left out … `));
      const span = make("span", "", token);
      const colour = colourOf(sample, at, how, scale);
      if (colour) span.style.backgroundColor = colour;
      const logprob = sample.logprobs[at], gap = sample.gaps[at];
      span.title = gap === null ? `${token}\nnot sampled` : `${token}\ntrainer ${short(logprob, 3)}, sampler ${short(logprob - gap, 3)}, difference ${short(gap, 3)} nats`;
      text.append(span);
    });
    return text;
  }

  function showGroup(group) {
    const how = byId("colouring").value, scale = scaleOf(group), holder = byId("group");
    const table = make("table"), head = table.createTHead().insertRow(), body = table.createTBody();
    const titles = [...(group.source === "validation" ? ["iteration"] : []), "score", "tokens", "response"];
    titles.forEach((title) => { const cell = make("th", "", title); cell.scope = "col"; head.append(cell); });
    for (const sample of group.samples) {
      const row = body.insertRow();
      if (group.source === "validation") row.append(make("td", "", String(sample.step)));
      row.append(make("td", "", short(sample.score, 4)));
      const length = make("td", "", sample.tokens ? String(sample.tokens.length + sample.left_out) : "–");
      if (sample.cut) length.append(make("div", "cut", "cut off"));
      const cell = make("td", "response");
      cell.append(responseOf(sample, how, scale));
      row.append(length, cell);
    }
    const prompt = make("div", "text prompt", group.prompt), scroll = make("div", "scroll");
    scroll.append(table);
    holder.replaceChildren(make("h3", "", "Prompt"), prompt);
    if (group.answer) holder.append(make("h3", "", "Answer"), make("div", "text prompt", group.answer));
    holder.append(scroll);
    showScale(group, how, scale);
  }

  function showScale(group, how, scale) {
    const holder = byId("scale"), swatch = (colour) => { const box = make("span", "swatch"); box.style.backgroundColor = colour; return box; };
    holder.replaceChildren();
    if (!group.samples.some((sample) => sample.tokens)) {
      holder.append("validation samples have no log-probs");
    } else if (how === "gaps") {
      holder.append(swatch("rgba(230, 120, 20, 1)"), `trainer finds the token less likely by ${short(scale, 2)} nats or more `, swatch("rgba(30, 130, 210, 1)"), "more likely");
    } else if (how === "logprobs") {
      holder.append(swatch("rgba(204, 121, 167, 1)"), `${MOST_SURPRISING} nats or more of surprise`);
    }
  }

  function listGroups(run) {
    const holder = byId("groups");
    let current = null;
    holder.replaceChildren(...run.groups.map((group) => {
      const button = make("button"), scores = group.samples.map((sample) => sample.score ?? NaN);
      const mean = scores.reduce((a, b) => a + b, 0) / scores.length;
      const when = group.source === "validation" ? "validation" : `iteration ${group.samples[0].step}`;
      button.type = "button";
      button.append(make("span", "start", group.prompt.trim().replace(/\s+/g, " ").slice(0, 160)));
      const spread = group.source === "validation" ? `score ${scores.map((score) => short(score, 3)).join(" → ")}` : `${scores.length} sample${scores.length > 1 ? "s" : ""}, mean score ${short(mean, 3)}`;
      button.append(make("span", "quiet", `${when} · ${spread}`));
      button.addEventListener("click", () => {
        current?.removeAttribute("aria-current");
        current = button;
        button.setAttribute("aria-current", "true");
        shown = group;
        showGroup(group);
      });
      return button;
    }));
    holder.querySelector("button")?.click();
  }

  let shown = null;
  if (byId("samples")) {
    const choice = byId("sample-run"), first = data.runs.findIndex((run) => run.groups.length);
    const list = () => listGroups(data.runs[choice ? Number(choice.value) : first]);
    choice?.addEventListener("change", list);
    byId("colouring").addEventListener("change", () => showGroup(shown));
    const once = new IntersectionObserver((entries) => { // the table is built when it is first looked at
      if (entries.some((entry) => entry.isIntersecting)) { once.disconnect(); list(); }
    }, {rootMargin: "600px"});
    once.observe(byId("samples"));
  }
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
})();
