// Latencies of the last minutes as distributions, against their objectives, and split against unsplit requests.

import { html, useState } from "./vendor/htm-preact.js";
import { Distribution } from "./chart.js";
import { NOTHING, ago, count, duration, graded, plural, share } from "./format.js";
import { newest } from "./feed.js";
import { Choices, Wide } from "./parts.js";
import { isSplit, isUnsplit } from "./story.js";

const WINDOWS = [
  [60, "1 min"],
  [300, "5 min"],
  [900, "15 min"],
];
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
    says: "Every time between two tokens: what a prompt beside a decode would spoil. Estimated from a histogram.",
    of: null,
  },
  queue: {
    title: "Queue",
    says: "How long requests waited for a worker, all waits of each together.",
    of: waited,
  },
};

export function Latency({ feed }) {
  const [seconds, choose] = useState(300);
  const { objectives, near } = feed.hello;
  const now = feed.now();
  const since = now - seconds;
  const known = newest();
  const rows = known.filter((row) => row.arrived + (row.total_ms ?? row.ttft_ms ?? 0) / 1000 >= since);
  return html`<h1>Latency</h1>
    <div class="bar">
      <${Choices} label="Of the last" options=${WINDOWS} chosen=${seconds} choose=${choose} />
      <span class="muted">
        Each line rises to the share of requests that took no longer: the further left it rises, the better. A warning
        is given from ${100 * near} % of an objective on. ${covered(known, since, now)}
      </span>
    </div>
    <div class="charts">
      ${Object.entries(MEASURES).map(([key, measure]) => {
        const objective = objectives[`${key}_ms`] || null;
        const groups = measure.of ? grouped(rows, measure.of) : between(feed.seconds, since);
        return html`<${Measure} key=${key} ...${{ id: key, measure, groups, objective, near }} />`;
      })}
    </div>`;
}

function waited(row) {
  if (row.timings?.queue_ms !== undefined) return row.timings.queue_ms;
  const waits = row.stages.filter((stage) => stage.name === "queue" && stage.end_ms !== null);
  return waits.length ? waits.reduce((ms, stage) => ms + stage.end_ms - stage.start_ms, 0) : null;
}

// Says where this page does not know all requests since then: it is told of the newest first, and of not too many at
// once. The router numbers them all.
function covered(known, since, now) {
  const oldest = known.findLast((row) => row.arrived >= since);
  if (!oldest) return "";
  const number = known[0].number - oldest.number + 1;
  const missing = number - known.filter((row) => row.number >= oldest.number).length;
  const said = [
    oldest === known.at(-1) && oldest.number > 1 && `This page knows none that arrived before ${ago(oldest.arrived, now)}.`,
    missing > 0 && `Of ${plural(number, "request")}, it was not told of ${count(missing)}.`,
  ].filter(Boolean);
  return said.length ? `${said.join(" ")} ITL is of all.` : "";
}

function grouped(rows, of) {
  const values = (test) =>
    weighed(
      rows
        .filter(test)
        .map(of)
        .filter((ms) => ms !== null && ms !== undefined),
    );
  const all = {
    split: values(isSplit),
    unsplit: values(isUnsplit),
    neither: values((row) => !isSplit(row) && !isUnsplit(row)),
  };
  const some = Object.entries(all).filter(([, group]) => group.total > 0);
  return some.length ? Object.fromEntries(some) : { all: weighed([]) };
}

// Sorted values, each with how many there are of it above the one in `from`: here, all are what they are.
function weighed(values) {
  const sorted = [...values].sort((one, other) => one - other);
  return { from: sorted, ms: sorted, counts: sorted.map(() => 1), total: sorted.length };
}

// Of the seconds since then, the histograms together: a bucket's times lie evenly between its bounds, as far as anybody
// knows.
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
    from: kept.map((index) => ms[index - 1] ?? 0),
    ms: kept.map((index) => ms[index]),
    counts: kept.map((index) => counts[index]),
    total: counts.reduce((sum, each) => sum + each, 0),
  };
}

function Measure({ id, measure, groups, objective, near }) {
  const verdict = judged(groups, objective, near);
  return html`<section class="measure" aria-labelledby=${`${id}-title`}>
    <h2 id=${`${id}-title`}>
      ${measure.title} ${verdict && html`<span class=${`verdict verdict-${verdict.grade}`}>${verdict.words}</span>`}
    </h2>
    <p class="muted">${measure.says}${objective ? ` Objective: ${duration(objective)}.` : ""}</p>
    <${Distribution} ...${{ groups, objective, near }} />
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
            const isNear = over(group, objective && near * objective) - missed;
            const told = (number) => (objective ? share(number, group.total) : NOTHING);
            return html`<tr key=${name}>
              <th scope="row"><span class=${`swatch line-${name}`} aria-hidden="true"></span> ${name}</th>
              <td class="num">${count(group.total)}</td>
              ${[50, 90, 99].map(
                (percent) => html`<td key=${percent} class="num">${duration(percentile(group, percent))}</td>`,
              )}
              <td class="num">${told(group.total - missed)}</td>
              <td class="num">${told(isNear)}</td>
              <td class="num">${told(missed)}</td>
            </tr>`;
          })}
        </tbody>
      </table><//
    >
  </section>`;
}

function judged(groups, objective, near) {
  const all = Object.values(groups).filter((group) => group.total > 0);
  if (!objective || all.length === 0) return null;
  const grade = graded(Math.max(...all.map((group) => percentile(group, 99))), objective, near);
  const words = {
    missed: "✕ p99 over the objective",
    near: `▲ p99 over ${100 * near} % of the objective`,
    met: "✓ p99 in time",
  };
  return { grade, words: words[grade] };
}

function percentile({ from, ms, counts, total }, percent) {
  let before = (percent / 100) * total;
  for (let index = 0; index < ms.length; index += 1) {
    if (before <= counts[index]) return from[index] + ((ms[index] - from[index]) * before) / counts[index];
    before -= counts[index];
  }
  return ms.at(-1) ?? null;
}

function over({ from, ms, counts }, limit) {
  const above = (index) => {
    if (!limit || ms[index] <= limit) return 0;
    return from[index] >= limit ? 1 : (ms[index] - limit) / (ms[index] - from[index]);
  };
  return counts.reduce((sum, each, index) => sum + each * above(index), 0);
}
