// Latencies of the last minutes as distributions, against their objectives, and split against unsplit requests.

import { html, useState } from "./vendor/htm-preact.js";
import { Distribution } from "./chart.js";
import { NOTHING, count, duration, share } from "./format.js";
import { newest } from "./feed.js";
import { Choices, Wide } from "./parts.js";
import { isSplit, isUnsplit } from "./story.js";

const WINDOWS = [
  [60, "1 min"],
  [300, "5 min"],
  [900, "15 min"],
];
const NEAR = 0.8;
const MEASURES = {
  ttft: {
    title: "Time to first token (TTFT)",
    says: "From a request's arrival to its first token.",
    of: (row) => row.ttft_ms,
  },
  tpot: {
    title: "Time per output token (TPOT)",
    says: "The mean time of a request's tokens after the first.",
    of: (row) => row.tpot_ms,
  },
  itl: {
    title: "Between two tokens (ITL)",
    says: "Every time between two tokens: what a prompt beside a decode would spoil.",
    of: null,
  },
  queue: {
    title: "Queue",
    says: "How long requests waited for a worker.",
    of: (row) => row.timings?.queue_ms,
  },
};

export function Latency({ feed }) {
  const [seconds, choose] = useState(300);
  const { objectives } = feed.hello;
  const since = feed.now() - seconds;
  const rows = newest().filter((row) => row.arrived + (row.total_ms ?? row.ttft_ms ?? 0) / 1000 >= since);
  return html`<h1>Latency</h1>
    <div class="bar">
      <${Choices} label="Of the last" options=${WINDOWS} chosen=${seconds} choose=${choose} />
      <span class="muted">
        Each line rises to the share of requests that took no longer: the further left it rises, the better. A warning
        is given from ${100 * NEAR} % of an objective on.
      </span>
    </div>
    <div class="charts">
      ${Object.entries(MEASURES).map(([key, measure]) => {
        const objective = objectives[`${key}_ms`] || null;
        const groups = measure.of ? grouped(rows, measure.of) : between(feed.seconds, since);
        return html`<${Measure} key=${key} ...${{ id: key, measure, groups, objective }} />`;
      })}
    </div>`;
}

function grouped(rows, of) {
  const values = (test) =>
    weighed(
      rows
        .filter(test)
        .map(of)
        .filter((ms) => ms !== null && ms !== undefined),
    );
  const all = { split: values(isSplit), unsplit: values(isUnsplit) };
  const some = Object.entries(all).filter(([, group]) => group.total > 0);
  return some.length ? Object.fromEntries(some) : { all: values(() => true) };
}

// Sorted values, each with how many there are of it.
function weighed(values) {
  const sorted = [...values].sort((one, other) => one - other);
  return { ms: sorted, counts: sorted.map(() => 1), total: sorted.length };
}

// Of the seconds since then, the histograms together: each time counts as its bucket's upper bound.
function between(seconds, since) {
  const histograms = seconds.filter((second) => second.at >= since && second.itl).map((second) => second.itl);
  const { buckets_ms: bounds = [] } = histograms.at(-1) ?? {};
  const sums = (of) =>
    [...bounds, null].map((_, index) => histograms.reduce((sum, each) => sum + (of(each)[index] ?? 0), 0));
  const groups = Object.entries({ split: sums((each) => each.split), unsplit: sums((each) => each.unsplit) });
  const some = groups.filter(([, counts]) => counts.some((number) => number > 0));
  const ms = [...bounds, 2 * (bounds.at(-1) ?? 1)];
  if (some.length === 0) return { all: binned(ms, []) };
  return Object.fromEntries(some.map(([name, counts]) => [name, binned(ms, counts)]));
}

function binned(ms, counts) {
  const kept = counts.map((_, index) => index).filter((index) => counts[index] > 0);
  return {
    ms: kept.map((index) => ms[index]),
    counts: kept.map((index) => counts[index]),
    total: counts.reduce((sum, each) => sum + each, 0),
  };
}

function Measure({ id, measure, groups, objective }) {
  const verdict = judged(groups, objective);
  return html`<section class="measure" aria-labelledby=${`${id}-title`}>
    <h2 id=${`${id}-title`}>
      ${measure.title} ${verdict && html`<span class=${`verdict verdict-${verdict.grade}`}>${verdict.words}</span>`}
    </h2>
    <p class="muted">${measure.says}${objective ? ` Objective: ${duration(objective)}.` : ""}</p>
    <${Distribution} ...${{ groups, objective, near: NEAR }} />
    <${Wide} label=${`${measure.title} in numbers`}
      ><table>
        <thead>
          <tr>
            <th scope="col">of</th>
            <th scope="col" class="num">number</th>
            ${[50, 90, 99].map((percent) => html`<th key=${percent} scope="col" class="num">p${percent}</th>`)}
            <th scope="col" class="num">in time</th>
            <th scope="col" class="num">near</th>
            <th scope="col" class="num">missed</th>
          </tr>
        </thead>
        <tbody>
          ${Object.entries(groups).map(([name, group]) => {
            const missed = over(group, objective);
            const near = over(group, objective && NEAR * objective) - missed;
            const told = (number) => (objective ? share(number, group.total) : NOTHING);
            return html`<tr key=${name}>
              <th scope="row"><span class=${`swatch line-${name}`} aria-hidden="true"></span> ${name}</th>
              <td class="num">${count(group.total)}</td>
              ${[50, 90, 99].map(
                (percent) => html`<td key=${percent} class="num">${duration(percentile(group, percent))}</td>`,
              )}
              <td class="num">${told(group.total - missed)}</td>
              <td class="num">${told(near)}</td>
              <td class="num">${told(missed)}</td>
            </tr>`;
          })}
        </tbody>
      </table><//
    >
  </section>`;
}

function judged(groups, objective) {
  const all = Object.values(groups).filter((group) => group.total > 0);
  if (!objective || all.length === 0) return null;
  const worst = Math.max(...all.map((group) => percentile(group, 99)));
  if (worst > objective) return { grade: "missed", words: "✕ p99 over the objective" };
  if (worst > NEAR * objective) return { grade: "near", words: `▲ p99 over ${100 * NEAR} % of the objective` };
  return { grade: "met", words: "✓ p99 in time" };
}

function percentile({ ms, counts, total }, percent) {
  if (!total) return null;
  let seen = 0;
  for (let index = 0; index < ms.length; index += 1) {
    seen += counts[index];
    if (seen >= (percent / 100) * total) return ms[index];
  }
  return ms.at(-1);
}

function over({ ms, counts }, limit) {
  return limit ? counts.reduce((sum, each, index) => sum + (ms[index] > limit ? each : 0), 0) : 0;
}
