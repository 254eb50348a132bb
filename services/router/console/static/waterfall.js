// Draws where one request's time went, from its bars alone. It depends on preact and htm and on no other module,
// because `baton trace FILE --open` puts it into a page of its own.
//
// A bar: {name, depth: 0-2, start_ms, end_ms (null: it still runs), worker, kind: "router" | "prefill" | "transfer" |
// "decode", hidden (it ran beside the prefill, and cost nothing), outcome, attributes: {}, events: [{name, at_ms}]}.
// A transfer may come as one bar with an event `sealed`, or as a hidden one followed by one that was waited for.

import { html, useState } from "./vendor/htm-preact.js";

const KINDS = {
  router: "router",
  prefill: "prefill worker",
  transfer: "KV transfer, waited for",
  hidden: "KV transfer beside the prefill: costs nothing",
  decode: "decode worker",
};
// How parts end when all is well.
const FINE = new Set(["", "ok", "done", "stop", "length"]);
const MOST_TICKS = 6;

// Draws bars of a request that took `totalMs`, or has taken so much so far.
export function Waterfall({ bars, totalMs, caption = "Where the time went" }) {
  const rows = rowsOf(bars);
  const total = Math.max(totalMs || 0, ...bars.map((bar) => bar.end_ms ?? bar.start_ms), 0.001);
  const place = (ms) => `${Math.min(100, Math.max(0, (100 * ms) / total)).toFixed(3)}%`;
  const marks = marksOf(bars);
  const seen = new Set(rows.flatMap((row) => row.parts.map((part) => (part.hidden ? "hidden" : part.kind))));
  return html`<div class="waterfall">
    <ul class="wf-legend" aria-label="Colours">
      ${Object.entries(KINDS)
        .filter(([kind]) => seen.has(kind))
        .map(([kind, words]) => html`<li key=${kind}><span class="wf-swatch wf-${kind}"></span>${words}</li>`)}
    </ul>
    <table>
      <caption class="wf-hear">
        ${caption}. Times are counted from the request's arrival.
      </caption>
      <thead>
        <tr>
          <th scope="col"><span class="wf-hear">Step</span></th>
          <th scope="col">
            <span class="wf-hear">When</span>
            <div class="wf-axis" aria-hidden="true">
              ${ticks(total).map((ms) => html`<span key=${ms} style=${{ left: place(ms) }}>${tickLabel(ms)}</span>`)}
            </div>
          </th>
          <th scope="col" class="wf-took">took</th>
        </tr>
      </thead>
      <tbody>
        ${rows.map((row, index) => html`<${Row} key=${`${index} ${row.name}`} ...${{ row, total, place, marks }} />`)}
      </tbody>
      ${
        marks.length > 0 &&
        html`<tfoot>
          <tr>
            <td></td>
            <td>
              ${marks.map(
                (mark, index) =>
                  html`<span
                    key=${index}
                    class=${`wf-mark-label wf-${mark.kind}`}
                    style=${marks.length === 1 ? { marginInlineStart: `min(${place(mark.at_ms)}, 100% - 10rem)` } : {}}
                    >${mark.words} ${duration(mark.at_ms)}</span
                  >`,
              )}
            </td>
            <td></td>
          </tr>
        </tfoot>`
      }
    </table>
  </div>`;
}

function Row({ row, total, place, marks }) {
  const [isOpen, open] = useState(false);
  const bad = FINE.has(row.outcome) ? "" : row.outcome;
  const facts = Object.entries(row.attributes);
  const name = html`<bdi>${visible(row.name)}</bdi>`;
  return html`<tr class=${`wf-row wf-depth-${Math.min(row.depth, 2)}${bad ? " wf-bad" : ""}`}>
      <th scope="row">
        <div>
          ${
            facts.length > 0
              ? html`<button type="button" aria-expanded=${String(isOpen)} onClick=${() => open(!isOpen)}>
                  ${name}
                </button>`
              : html`<span>${name}</span>`
          }
          ${row.worker && html` <span class="wf-where"><bdi>${visible(row.worker)}</bdi></span>`}
          ${bad && html` <span class="wf-outcome"><bdi>${visible(bad)}</bdi></span>`}
        </div>
      </th>
      <td class="wf-track">
        <span class="wf-hear">${inWords(row, total)}</span>
        <div aria-hidden="true">
          ${ticks(total).map((ms) => html`<i key=${`t${ms}`} class="wf-grid" style=${{ left: place(ms) }}></i>`)}
          ${row.parts.map((part, index) => {
            const end = part.end_ms ?? total;
            const width = place(Math.max(0, end - part.start_ms));
            const beside = part.hidden ? " (beside the prefill)" : "";
            const look = `${part.hidden ? "hidden" : part.kind}${row.isParent ? " wf-parent" : ""}`;
            return html`<i
              key=${`p${index}`}
              class=${`wf-bar wf-${look}${part.end_ms === null ? " wf-runs" : ""}`}
              style=${{ left: place(part.start_ms), width }}
              title=${`${visible(row.name)}${beside}: ${duration(end - part.start_ms)}`}
            ></i>`;
          })}
          ${row.events
            .filter((event) => event.name === "chunk" || event.name === "preempted")
            .map(
              (event, index) =>
                html`<i
                  key=${`e${index}`}
                  class=${`wf-event wf-${event.name}`}
                  style=${{ left: place(event.at_ms) }}
                  title=${`${event.name} at ${duration(event.at_ms)}`}
                ></i>`,
            )}
          ${marks.map(
            (mark, index) =>
              html`<i key=${`m${index}`} class=${`wf-mark wf-${mark.kind}`} style=${{ left: place(mark.at_ms) }}></i>`,
          )}
        </div>
      </td>
      <td class="wf-took">${row.runs ? html`<em>runs</em>` : duration(row.end_ms - row.start_ms)}</td>
    </tr>
    ${
      isOpen &&
      html`<tr class="wf-facts">
        <td colspan="3">
          <dl>
            ${facts.map(
              ([key, value]) =>
                html`<div key=${key}>
                  <dt><bdi>${visible(key)}</bdi></dt>
                  <dd><bdi>${visible(told(value))}</bdi></dd>
                </div>`,
            )}
          </dl>
        </td>
      </tr>`
    }`;
}

// Joins the two bars of one transfer, and divides one bar of a transfer where it was sealed.
function rowsOf(bars) {
  const rows = [];
  bars.forEach((bar, index) => {
    const before = rows.at(-1);
    const events = bar.events ?? [];
    if (
      before &&
      bar.kind === "transfer" &&
      before.kind === "transfer" &&
      before.endsHidden &&
      bar.name === before.name
    ) {
      before.parts.push(bar);
      Object.assign(before, { end_ms: bar.end_ms, runs: bar.end_ms === null, endsHidden: Boolean(bar.hidden) });
      before.outcome ||= bar.outcome ?? "";
      before.attributes = { ...before.attributes, ...bar.attributes };
      before.events = [...before.events, ...events];
      return;
    }
    const sealed = bar.kind === "transfer" && !bar.hidden ? events.find((event) => event.name === "sealed") : undefined;
    rows.push({
      name: bar.name,
      depth: bar.depth ?? 0,
      kind: bar.kind,
      worker: bar.worker ?? "",
      outcome: bar.outcome ?? "",
      attributes: bar.attributes ?? {},
      start_ms: bar.start_ms,
      end_ms: bar.end_ms,
      runs: bar.end_ms === null,
      endsHidden: Boolean(bar.hidden),
      events,
      parts: sealed
        ? [
            { ...bar, end_ms: sealed.at_ms, hidden: true },
            { ...bar, start_ms: sealed.at_ms },
          ]
        : [bar],
      // A parent is drawn thin: its children say what the time was spent on.
      isParent: (bars[index + 1]?.depth ?? 0) > (bar.depth ?? 0),
    });
  });
  return rows;
}

function marksOf(bars) {
  const words = { first_token: "first token after", retry: "placed again at" };
  return bars
    .flatMap((bar) => bar.events ?? [])
    .filter((event) => event.name in words)
    .map((event) => ({ kind: event.name, at_ms: event.at_ms, words: words[event.name] }))
    .sort((one, other) => one.at_ms - other.at_ms);
}

function inWords(row, total) {
  const parts = row.parts.map((part) => {
    const took = duration((part.end_ms ?? total) - part.start_ms);
    return `${took}${part.hidden ? " beside the prefill" : part.kind === "transfer" ? " waited for" : ""}`;
  });
  return `from ${duration(row.start_ms)}${row.runs ? ", still running" : ""}: ${parts.join(", ")}`;
}

function ticks(total) {
  let step = 1e-3;
  for (let power = -3; total / step > MOST_TICKS; power += 1) {
    step =
      [1, 2, 5, 10].map((unit) => unit * 10 ** power).find((each) => total / each <= MOST_TICKS) ?? 10 ** (power + 1);
  }
  return Array.from({ length: Math.floor(total / step) + 1 }, (_, index) => index * step);
}

function tickLabel(ms) {
  return ms < 1000 ? `${Number(ms.toPrecision(3))} ms` : `${Number((ms / 1000).toPrecision(3))} s`;
}

function told(value) {
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

// Returns milliseconds as people say them: "4.4 ms", "127 ms", "4.27 s", "12 min 5 s".
export function duration(ms) {
  if (ms === null || ms === undefined || Number.isNaN(ms)) return "–";
  if (Math.abs(ms) < 99.95) return `${ms.toFixed(1)} ms`;
  if (Math.abs(ms) < 999.5) return `${ms.toFixed(0)} ms`;
  if (Math.abs(ms) < 99_995) return `${(ms / 1000).toFixed(2)} s`;
  const seconds = Math.round(ms / 1000);
  return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
}

// What moves, hides or turns text around: controls, formatting, surrogates, separators of lines and paragraphs. The two
// joiners stay, because letters and emoji are joined with them.
export const UNSAFE = /[^\P{C}\u200c\u200d\p{Cn}\p{Co}]|[\u2028\u2029]/gu;

// Returns text of unknown origin with what cannot be seen written as an escape such as \u{202e}; `keep` stays.
export function visible(text, keep = "") {
  return String(text ?? "").replace(UNSAFE, (each) =>
    keep.includes(each) ? each : `\\u{${each.codePointAt(0).toString(16)}}`,
  );
}
