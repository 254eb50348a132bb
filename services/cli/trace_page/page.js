// The page of a trace file: a list of requests, and the waterfall of the one that is chosen. `baton trace --open` joins
// it with the modules that it imports; its data stands in the page.

import { html, render, useState } from "../../router/console/static/vendor/htm-preact.js";
import { Waterfall, duration, visible } from "../../router/console/static/waterfall.js";

const COLUMNS = [
  ["request", (row) => row.id, (row) => visible(row.id)],
  ["started", (row) => row.startMs, (row) => new Date(row.startMs).toLocaleTimeString(undefined, { hour12: false })],
  ["took", (row) => row.totalMs, (row) => duration(row.totalMs)],
  ["first token", (row) => row.ttftMs, (row) => duration(row.ttftMs)],
  ["transfer waited for", (row) => row.exposedMs, (row) => duration(row.exposedMs)],
  ["prompt", (row) => row.promptTokens, (row) => known(row.promptTokens)],
  ["output", (row) => row.outputTokens, (row) => known(row.outputTokens)],
  ["prefill", (row) => row.prefill, (row) => visible(row.prefill)],
  ["decode", (row) => row.decode, (row) => visible(row.decode)],
  ["ended", (row) => row.outcome, (row) => visible(row.outcome)],
];
const TEXTS = new Set(["request", "prefill", "decode", "ended"]);

function known(value) {
  return value === null || value === undefined ? "–" : visible(value);
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let index = 0;
  for (; bytes >= 1024 && index < units.length - 1; index += 1) bytes /= 1024;
  return `${index === 0 ? bytes : bytes.toFixed(1)} ${units[index]}`;
}

function Page({ data }) {
  const [chosen, choose] = useState(0);
  const [wanted, want] = useState("");
  const [order, sort] = useState({ column: -1, down: true });
  const rows = sorted(found(data.requests.map((row, index) => ({ ...row, index })), wanted), order);
  const row = data.requests[chosen];
  const turn = (column) => sort({ column, down: order.column === column ? !order.down : true });
  return html`<header>
      <h1>Requests of <bdi>${visible(data.file)}</bdi></h1>
      ${data.numLeftOut > 0 && html`<p>The newest ${data.requests.length}; ${data.numLeftOut} earlier ones are left out.</p>`}
    </header>
    <section aria-labelledby="one">
      <${Request} key=${chosen} row=${row} />
    </section>
    <section aria-labelledby="all">
      <h2 id="all">All requests</h2>
      <label>Find <input type="search" value=${wanted} onInput=${(event) => want(event.target.value)} /></label>
      <div class="scrolls" tabindex="0" role="region" aria-label="The list, which scrolls sideways">
        <table class="requests">
          <thead>
            <tr>
              ${COLUMNS.map(
                ([name], column) => html`<th
                  key=${name}
                  scope="col"
                  class=${TEXTS.has(name) ? "" : "number"}
                  aria-sort=${order.column !== column ? "none" : order.down ? "descending" : "ascending"}
                >
                  <button type="button" onClick=${() => turn(column)}>${name}</button>
                </th>`,
              )}
            </tr>
          </thead>
          <tbody>
            ${rows.map(
              (each) => html`<tr key=${each.index} class=${each.index === chosen ? "chosen" : ""}>
                ${COLUMNS.map(([name, , shown], column) =>
                  column === 0
                    ? html`<th key=${name} scope="row">
                        <button type="button" aria-pressed=${String(each.index === chosen)} onClick=${() => choose(each.index)}>
                          <bdi>${shown(each)}</bdi>
                        </button>
                      </th>`
                    : html`<td key=${name} class=${TEXTS.has(name) ? "" : "number"}><bdi>${shown(each)}</bdi></td>`,
                )}
              </tr>`,
            )}
          </tbody>
        </table>
      </div>
    </section>`;
}

function Request({ row }) {
  return html`<h2 id="one"><bdi>${visible(row.id)}</bdi></h2>
    <p class="facts">
      ${facts(row).map(([name, value]) => html`<span key=${name}>${name} <b><bdi>${value}</bdi></b></span>`)}
      ${row.jaeger && html`<a href=${row.jaeger} rel="noreferrer">in Jaeger</a>`}
    </p>
    ${row.failure && html`<p class="failure"><bdi>${visible(row.failure)}</bdi></p>`}
    <${Waterfall} bars=${row.bars} totalMs=${row.totalMs} />
    ${row.movedBytes !== null &&
    html`<p>
      ${size(row.movedBytes)} of KV went from <bdi>${visible(row.prefill)}</bdi> to <bdi>${visible(row.decode)}</bdi> by${" "}
      <bdi>${known(row.transport)}</bdi>: ${duration(row.overlappedMs)} of it beside the prefill, which costs nothing, and${" "}
      <b>${duration(row.exposedMs)}</b> waited for.
    </p>`}`;
}

function facts(row) {
  const cached = row.cachedTokens ? ` (${visible(row.cachedTokens)} cached)` : "";
  return [
    ["model", visible(row.model)],
    ["prompt", `${known(row.promptTokens)} tokens${cached}`],
    ["output", `${known(row.outputTokens)} tokens`],
    ["first token after", duration(row.ttftMs)],
    ["took", duration(row.totalMs)],
    ["ended", visible(row.outcome) || "–"],
    ...(row.retries ? [["placed again", `${visible(row.retries)} times`]] : []),
    ["trace", visible(row.traceId)],
  ];
}

function found(rows, wanted) {
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (row) => [row.id, row.traceId, row.model, row.prefill, row.decode, row.outcome].join(" ").toLowerCase();
  return rows.filter((row) => words.every((word) => text(row).includes(word)));
}

function sorted(rows, { column, down }) {
  if (column < 0) return rows;
  const value = COLUMNS[column][1];
  const compared = (one, other) => {
    if (one === null || one === undefined) return 1;
    if (other === null || other === undefined) return -1;
    return (one < other ? -1 : one > other ? 1 : 0) * (down ? -1 : 1);
  };
  return [...rows].sort((one, other) => compared(value(one), value(other)));
}

render(html`<${Page} data=${JSON.parse(document.getElementById("data").textContent)} />`, document.getElementById("page"));
