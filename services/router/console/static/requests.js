// The newest requests: a table to filter and to sort.

import { html, useRef, useState } from "./vendor/htm-preact.js";
import { newest } from "./feed.js";
import { Name, ago, count, duration, plural, visible } from "./format.js";
import { Empty, Milliseconds, Phase, Wide, Workers } from "./parts.js";
import { hasFailed, isSplit, isUnsplit } from "./story.js";

const PAGE = 100;
const exposed = (row) => row.timings?.transfer_exposed_ms;
const COLUMNS = {
  number: { words: "request", of: (row) => row.number },
  phase: { words: "state", of: (row) => (row.phase === "ended" ? row.outcome : row.phase) },
  arrived: { words: "arrived", of: (row) => row.arrived, minor: true },
  prompt: { words: "prompt", of: (row) => row.prompt_tokens, numeric: true },
  output: { words: "answer", of: (row) => row.output_tokens, numeric: true },
  ttft: { words: "TTFT", long: "time to first token", of: (row) => row.ttft_ms, numeric: true },
  itl: { words: "ITL max", long: "longest time between two tokens", of: (row) => row.longest_itl_ms, numeric: true },
  exposed: { words: "exposed", long: "transfer that nothing hid", of: exposed, numeric: true },
  total: { words: "total", of: (row) => row.total_ms, numeric: true },
  worker: { words: "workers", of: (row) => `${row.prefill_worker} ${row.decode_worker}` },
  retries: { words: "retries", of: (row) => row.retries, numeric: true },
};
const FINISHES = {
  "": "any state",
  live: "live",
  stop: "stop",
  length: "length",
  failed: "failed or cancelled",
};
const LATE = {
  "": "in time or not",
  ttft: "TTFT missed",
  itl: "ITL missed",
};
const SPLITS = { "": "split or not", split: "split", unsplit: "not split" };

const FIRST = html`No request has come yet: ask something in the <a href="#playground">playground</a>.`;

export function Requests({ feed }) {
  const [filter, set] = useState({ text: "", worker: "", finish: "", split: "", late: "", retried: false });
  const [sort, setSort] = useState({ by: "number", down: true });
  const [most, showMore] = useState(PAGE);
  const [isHeld, hold] = useState(false);
  const held = useRef(null);
  if (!isHeld) held.current = newest();
  const all = held.current;
  const rows = sorted(
    all.filter((row) => passes(row, filter, feed.hello.objectives)),
    sort,
  );
  const change = (field) => (event) =>
    set({ ...filter, [field]: event.target.type === "checkbox" ? event.target.checked : event.target.value });
  const workers = [...new Set(all.flatMap((row) => [row.prefill_worker, row.decode_worker]))].filter(Boolean).sort();
  return html`<h1>Requests</h1>
    <form class="filters" aria-label="Filter" onSubmit=${(event) => event.preventDefault()}>
      <label
        >Id <input type="search" value=${filter.text} onInput=${change("text")} placeholder="part of an id"
      /></label>
      <${Select}
        label="Worker"
        value=${filter.worker}
        onChange=${change("worker")}
        options=${{ "": "any worker", ...Object.fromEntries(workers.map((id) => [id, visible(id)])) }}
      />
      <${Select} label="State" value=${filter.finish} onChange=${change("finish")} options=${FINISHES} />
      <${Select} label="Split" value=${filter.split} onChange=${change("split")} options=${SPLITS} />
      <${Select} label="Objectives" value=${filter.late} onChange=${change("late")} options=${LATE} />
      <label class="check"
        ><input type="checkbox" checked=${filter.retried} onChange=${change("retried")} /> placed again</label
      >
      <button type="button" aria-pressed=${String(isHeld)} onClick=${() => hold(!isHeld)}>
        ${isHeld ? "Go on" : "Hold still"}
      </button>
      <span class="muted" role="status"
        >${plural(rows.length, "request")}${rows.length < all.length ? ` of ${count(all.length)}` : ""}</span
      >
    </form>
    ${
      rows.length === 0
        ? html`<${Empty}>${all.length === 0 ? FIRST : "No request is like that."}<//>`
        : html`<${Wide} label="Requests"><${Table} ...${{ rows: rows.slice(0, most), sort, setSort, feed }} /><//>`
    }
    ${
      rows.length > most &&
      html`<button type="button" onClick=${() => showMore(most + PAGE)}>Show ${PAGE} more</button>`
    }`;
}

function Select({ label, value, options, onChange }) {
  return html`<label>
    ${label}
    <select value=${value} onChange=${onChange}>
      ${Object.entries(options).map(
        ([key, words]) => html`<option key=${key} value=${key} selected=${key === value}>${words}</option>`,
      )}
    </select>
  </label>`;
}

function Table({ rows, sort, setSort, feed }) {
  const { objectives, near } = feed.hello;
  const now = feed.now();
  return html`<table class="requests">
    <thead>
      <tr>
        ${Object.entries(COLUMNS).map(([key, column]) => {
          const isSorted = sort.by === key;
          return html`<th
            key=${key}
            scope="col"
            class=${classes(column)}
            aria-sort=${isSorted ? (sort.down ? "descending" : "ascending") : null}
          >
            <button
              type="button"
              title=${`Sort by ${column.long ?? column.words}`}
              onClick=${() => setSort({ by: key, down: isSorted ? !sort.down : true })}
            >
              ${column.words}<span aria-hidden="true">${isSorted ? (sort.down ? " ▾" : " ▴") : ""}</span>
            </button>
          </th>`;
        })}
      </tr>
    </thead>
    <tbody>
      ${rows.map(
        (row) =>
          html`<tr key=${row.number} class=${hasFailed(row) ? "failed" : ""}>
            <th scope="row">
              <a href=${`#requests/${row.number}`}><${Name} text=${row.id} /></a>
            </th>
            <td><${Phase} row=${row} /></td>
            <td class="minor">${ago(row.arrived, now)}</td>
            <td class="num">
              ${count(row.prompt_tokens)}${
                row.cached_tokens > 0 && html` <span class="muted">${count(row.cached_tokens)} cached</span>`
              }
            </td>
            <td class="num">${count(row.output_tokens)}</td>
            <td class="num"><${Milliseconds} ms=${row.ttft_ms} ...${{ objective: objectives.ttft_ms, near }} /></td>
            <td class="num"><${Milliseconds} ms=${row.longest_itl_ms} ...${{ objective: objectives.itl_ms, near }} /></td>
            <td class="num">${isUnsplit(row) ? html`<span class="muted">not split</span>` : duration(exposed(row))}</td>
            <td class="num">
              ${
                row.phase === "ended"
                  ? duration(row.total_ms)
                  : html`<span class="muted">${duration(1000 * (now - row.arrived))}</span>`
              }
              <${Strip} row=${row} now=${now} />
            </td>
            <td><${Workers} row=${row} /></td>
            <td class="num">${row.retries > 0 ? html`<b class="retries">${row.retries}</b>` : "0"}</td>
          </tr>`,
      )}
    </tbody>
  </table>`;
}

// The request's time in a line: queue, prompt, handoff, answer.
function Strip({ row, now }) {
  const total = row.total_ms ?? Math.max(1, 1000 * (now - row.arrived));
  const first = row.ttft_ms ?? total;
  const queued = Math.min(first, row.timings?.queue_ms ?? 0);
  const handed = isSplit(row) ? Math.min(total - first, exposed(row) ?? 0) : 0;
  const parts = { router: queued, prefill: first - queued, transfer: handed, decode: total - first - handed };
  return html`<span class="strip" aria-hidden="true">
    ${Object.entries(parts).map(
      ([kind, ms]) => ms > 0 && html`<i key=${kind} class=${`wf-${kind}`} style=${{ flexGrow: ms }}></i>`,
    )}
  </span>`;
}

function passes(row, { text, worker, finish, split, late, retried }, objectives) {
  if (text && !row.id.toLowerCase().includes(text.toLowerCase())) return false;
  if (worker && row.prefill_worker !== worker && row.decode_worker !== worker) return false;
  if (finish === "live" && row.phase === "ended") return false;
  if (finish === "failed" && !hasFailed(row)) return false;
  if ((finish === "stop" || finish === "length") && row.outcome !== finish) return false;
  if (split === "split" && !isSplit(row)) return false;
  if (split === "unsplit" && !isUnsplit(row)) return false;
  const took = { ttft: row.ttft_ms, itl: row.longest_itl_ms }[late];
  if (late && !(objectives[`${late}_ms`] && took > objectives[`${late}_ms`])) return false;
  return !retried || row.retries > 0;
}

// What has no value comes last, whichever way the others are sorted.
function sorted(rows, { by, down }) {
  const { of } = COLUMNS[by];
  const order = down ? -1 : 1;
  return rows.sort((one, other) => {
    const [first, second] = [of(one), of(other)];
    const missing = [first, second].map((value) => value === null || value === undefined);
    if (missing[0] !== missing[1]) return missing[0] ? 1 : -1;
    if (missing[0] || first === second) return other.number - one.number;
    return order * (first < second ? -1 : 1);
  });
}

function classes(column) {
  return [column.numeric && "num", column.minor && "minor"].filter(Boolean).join(" ");
}
