// Draws distributions: of each group, the share of values at or below a time, on a logarithmic axis.

import { html, useEffect, useRef } from "./vendor/htm-preact.js";
import uPlot from "./vendor/uplot.js";
import { duration } from "./waterfall.js";

const HEIGHT = 190;
const MOST_POINTS = 400;
const LEAST_MS = 0.1;

export function Distribution({ groups, objective, near }) {
  const box = useRef(null);
  const chart = useRef(null);
  const drawn = useRef(null);
  const names = Object.keys(groups);
  const data = table(groups, objective);
  drawn.current = { objective, near };
  useEffect(() => {
    const make = () => {
      chart.current?.destroy();
      chart.current = new uPlot(options(box.current, names, drawn), data, box.current);
    };
    make();
    const fit = new ResizeObserver(() => chart.current.setSize({ width: box.current.clientWidth, height: HEIGHT }));
    fit.observe(box.current);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", make);
    window.addEventListener("baton-theme", make);
    return () => {
      fit.disconnect();
      scheme.removeEventListener("change", make);
      window.removeEventListener("baton-theme", make);
      chart.current.destroy();
      chart.current = null;
    };
  }, [names.join()]);
  useEffect(() => chart.current?.setData(data));
  return html`<div class="chart" ref=${box} aria-hidden="true"></div>`;
}

// uPlot wants one x for all lines: all times, and of each group its share up to there. Lines begin at the left edge and
// end at the right one.
function table(groups, objective) {
  const times = [...new Set(Object.values(groups).flatMap((group) => group.ms.map(drawable)))].sort((a, b) => a - b);
  const step = Math.ceil(times.length / MOST_POINTS) || 1;
  const shown = times.filter((_, index) => index % step === 0 || index === times.length - 1);
  const ends = [...times.slice(0, 1), ...times.slice(-1), ...(objective ? [objective] : [])];
  const xs = ends.length ? [Math.min(...ends) / 1.6, ...shown, Math.max(...ends) * 1.6] : [1, 1000];
  const lines = Object.values(groups).map(({ ms, counts, total }) => {
    let [index, seen] = [0, 0];
    return xs.map((time) => {
      for (; index < ms.length && drawable(ms[index]) <= time; index += 1) seen += counts[index];
      return total ? (100 * seen) / total : null;
    });
  });
  return [xs, ...lines];
}

// A logarithmic axis has no zero.
function drawable(ms) {
  return Math.max(ms, LEAST_MS);
}

function options(box, names, drawn) {
  const colour = (name) => resolved(box, `--chart-${name}`);
  const axis = {
    stroke: colour("text"),
    grid: { stroke: colour("grid"), width: 1 },
    ticks: { stroke: colour("grid") },
    font: "11px system-ui",
  };
  return {
    width: box.clientWidth || 300,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    scales: {
      x: { time: false, distr: 3, log: 10, range: (plot) => [plot.data[0][0], plot.data[0].at(-1)] },
      y: { range: [0, 100] },
    },
    axes: [
      { ...axis, size: 32, values: (_, splits) => splits.map((ms) => (ms === null ? "" : short(ms))) },
      { ...axis, size: 54, values: (_, splits) => splits.map((percent) => `${percent} %`) },
    ],
    series: [
      {},
      ...names.map((name) => ({
        stroke: colour(name),
        width: 2,
        // Dashes tell lines apart that colours do not.
        dash: { unsplit: [6, 4], neither: [2, 2] }[name],
        paths: uPlot.paths.stepped({ align: 1 }),
        points: { show: false },
      })),
    ],
    hooks: { draw: [(plot) => drawObjective(plot, drawn.current, colour)] },
  };
}

function drawObjective(plot, { objective, near }, colour) {
  if (!objective) return;
  const { ctx, bbox } = plot;
  for (const [ms, name, dash] of [
    [near * objective, "near", [3, 4]],
    [objective, "missed", []],
  ]) {
    const x = plot.valToPos(ms, "x", true);
    ctx.save();
    ctx.beginPath();
    ctx.setLineDash(dash.map((length) => length * devicePixelRatio));
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.strokeStyle = colour(name);
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.restore();
  }
}

function short(ms) {
  return ms >= 1000
    ? `${Number((ms / 1000).toPrecision(2))} s`
    : ms >= 0.1
      ? `${Number(ms.toPrecision(2))} ms`
      : duration(ms);
}

// A canvas knows no variables of CSS: what the variable means here and now.
function resolved(box, variable) {
  const probe = document.createElement("i");
  probe.style.color = `var(${variable})`;
  box.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}
