// The cluster: router and workers by role, the blocks of their pools, which pairs hand over to one another, handoffs on
// their way, and what waits.

import { html, useState } from "./vendor/htm-preact.js";
import { newest, pairKey } from "./feed.js";
import { NOTHING, Name, bytes, count, duration, plural, rate, share } from "./format.js";
import { Handoffs, Lane, handoffs } from "./lane.js";
import { Empty, State, Tile, Wide } from "./parts.js";
import { Handoff, isSplit, way } from "./story.js";

const CLASSES = {
  importing: "importing: on their way in",
  leased: "leased: promised to a decode worker",
  active: "active: of sequences that run",
  cached: "cached: prefixes kept for reuse",
  free: "free",
};
const PAIR_SAMPLES = 20;
const MOST_CARDS = 24;
const MOST_WAITING = 8;
const AGES = [
  [0.1, "under 0.1 s"],
  [1, "0.1 to 1 s"],
  [10, "1 to 10 s"],
  [Infinity, "over 10 s"],
];

export function Cluster({ feed }) {
  const { state } = feed;
  const workers = [...feed.workers.values()].sort((one, other) =>
    one.id.localeCompare(other.id, "en", { numeric: true }),
  );
  const rows = newest();
  return html`<h1>Cluster</h1>
    <${Summary} state=${state} workers=${workers} />
    <${Newest} rows=${rows} />
    <${Flow} ...${{ feed, workers, rows }} />
    <div class="columns">
      <${Waiting} ...${{ feed, rows }} />
      <${Models} models=${state.models} />
    </div>
    <${Pairs} ...${{ feed, rows }} />
    <${WorkerTable} workers=${workers} />`;
}

function Summary({ state, workers }) {
  const { phases } = state;
  const ready = workers.filter((worker) => worker.state === "ready").length;
  return html`<dl class="tiles">
    <${Tile} label="Cluster" value=${state.ready ? "ready" : "not ready"}>
      <span class="unit">${ready} of ${plural(workers.length, "worker")}</span>
    <//>
    <${Tile} label="Requests" value=${rate(state.requests_per_s)} unit="a second" />
    <${Tile} label="Prompts" value=${rate(state.prompt_tokens_per_s)} unit="tokens/s" />
    <${Tile} label="Answers" value=${rate(state.output_tokens_per_s)} unit="tokens/s" />
    <${Tile} label="Queued" value=${count(phases.queued)} />
    <${Tile} label="Prefilling" value=${count(phases.prefilling)} />
    <${Tile} label="Parked" value=${count(phases.parked)} />
    <${Tile} label="Decoding" value=${count(phases.decoding)} />
  </dl>`;
}

// What sets this cluster apart, told by the newest request that shows it.
function Newest({ rows }) {
  const row = rows.find((each) => isSplit(each) && each.timings?.transfer_exposed_ms !== undefined);
  if (!row) {
    return html`<p class="newest">
      <span class="tag">how it works</span> A prefill worker computes a prompt; its KV cache is handed over to a decode
      worker, which makes the answer. Ask something in the <a href="#playground">playground</a>, and the handoff shows
      here.
    </p>`;
  }
  return html`<p class="newest">
    <span class="tag">newest handoff</span> <${Handoff} row=${row} />${" "}
    <a href=${`#requests/${row.number}`}>See request ${row.number}</a>
  </p>`;
}

function Flow({ feed, workers, rows }) {
  const [isAll, showAll] = useState(false);
  const shown = isAll ? workers : workers.slice(0, MOST_CARDS);
  const has = (worker, role) => worker.roles.includes(role) || worker.roles.includes("mixed");
  const of = (test) => shown.filter((worker) => test(has(worker, "prefill"), has(worker, "decode")));
  const [prefill, decode, mixed] = [of((p, d) => p && !d), of((p, d) => d && !p), of((p, d) => p && d)];
  const stores = shown.filter((worker) => worker.roles.includes("store"));
  if (workers.length === 0) {
    return html`<${Empty}
      >No worker has joined yet: <code>baton prefill</code> and <code>baton decode</code> join at the router's control
      port.<//
    >`;
  }
  const moves = handoffs(rows, feed.now());
  return html`<section aria-labelledby="flow-title">
    <h2 id="flow-title">Workers, and the handoffs between them</h2>
    <${Legend} />
    <div class="flow">
      <div class="side">
        <h3 class="ink-prefill">Prefill <small>computes prompts</small></h3>
        ${prefill.map((worker) => html`<${Card} key=${worker.id} worker=${worker} />`)}
        ${prefill.length === 0 && html`<${Empty}>none<//>`}
      </div>
      <${Lane} ...${{ moves, pairs: [...feed.pairs.values()], prefill, decode }} />
      <div class="side">
        <h3 class="ink-decode">Decode <small>makes answers</small></h3>
        ${decode.map((worker) => html`<${Card} key=${worker.id} worker=${worker} />`)}
        ${decode.length === 0 && html`<${Empty}>none<//>`}
      </div>
    </div>
    <${Handoffs} moves=${moves} />
    ${
      mixed.length > 0 &&
      html`<h3>Mixed <small>both phases over one pool</small></h3>
        <div class="mixed">${mixed.map((worker) => html`<${Card} key=${worker.id} worker=${worker} />`)}</div>`
    }
    ${
      stores.length > 0 &&
      html`<h3>Stores <small>keep KV in host memory</small></h3>
        <div class="mixed">${stores.map((worker) => html`<${Card} key=${worker.id} worker=${worker} />`)}</div>`
    }
    ${
      shown.length < workers.length &&
      html`<button type="button" onClick=${() => showAll(true)}>Show all ${workers.length} workers</button>`
    }
  </section>`;
}

function Legend() {
  return html`<ul class="legend" aria-label="Blocks of KV, by what they are used for">
    ${Object.entries(CLASSES).map(
      ([name, words]) => html`<li key=${name}><span class=${`swatch kv-${name}`}></span>${words}</li>`,
    )}
  </ul>`;
}

function Card({ worker }) {
  const step = worker.roles.includes("prefill")
    ? worker.prefill_step_ms
    : (worker.decode_step_ms ?? worker.prefill_step_ms);
  return html`<article class=${`card card-${worker.state}`} data-worker=${worker.id}>
    <h4><${Name} text=${worker.id} /> <${State} state=${worker.state} /></h4>
    <${Ledger} blocks=${worker.blocks} />
    <p class="facts">
      <span>${count(worker.running)} running</span><span>${count(worker.waiting)} waiting</span>
      <span>${step === null ? "no step yet" : `${duration(step)} a step`}</span>
      <span>${rate(worker.tokens_per_s)} tokens/s</span>
    </p>
    ${worker.reason && html`<p class="reason"><${Name} text=${worker.reason} /></p>`}
  </article>`;
}

// The pool of a worker: each block is in one class, and they add up.
function Ledger({ blocks }) {
  const total = Object.keys(CLASSES).reduce((sum, name) => sum + (blocks?.[name] ?? 0), 0);
  if (!total) return html`<p class="facts">no blocks reported</p>`;
  const words = Object.keys(CLASSES)
    .map((name) => `${blocks[name]} ${name}`)
    .join(", ");
  return html`<div class="ledger" role="img" aria-label=${`${total} blocks: ${words}`} title=${words}>
      ${Object.keys(CLASSES).map(
        (name) =>
          blocks[name] > 0 && html`<i key=${name} class=${`kv-${name}`} style=${{ flexGrow: blocks[name] }}></i>`,
      )}
    </div>
    <p class="facts numbers" aria-hidden="true">
      ${Object.keys(CLASSES)
        .filter((name) => blocks[name] > 0)
        .map((name) => html`<span key=${name}>${name} <b>${count(blocks[name])}</b></span>`)}
    </p>`;
}

function Waiting({ feed, rows }) {
  const now = feed.now();
  const waiting = rows
    .filter((row) => row.phase === "queued" || row.phase === "parked")
    .map((row) => ({ row, age: now - row.arrived - (row.stages.at(-1)?.start_ms ?? 0) / 1000 }))
    .sort((one, other) => other.age - one.age);
  const number = (phase, index) =>
    waiting.filter(
      ({ row, age }) => row.phase === phase && age < AGES[index][0] && (index === 0 || age >= AGES[index - 1][0]),
    ).length;
  return html`<section aria-labelledby="waiting-title">
    <h2 id="waiting-title">What waits, by age</h2>
    <table>
      <thead>
        <tr>
          <th scope="col">has waited</th>
          <th scope="col" class="num">for a worker</th>
          <th scope="col" class="num">handoff, parked</th>
        </tr>
      </thead>
      <tbody>
        ${AGES.map(
          ([, words], index) =>
            html`<tr key=${words}>
              <th scope="row">${words}</th>
              <td class="num">${count(number("queued", index))}</td>
              <td class="num">${count(number("parked", index))}</td>
            </tr>`,
        )}
      </tbody>
    </table>
    ${
      waiting.length === 0
        ? html`<p class="muted">Nothing waits.</p>`
        : html`<ul class="plain">
            ${waiting.slice(0, MOST_WAITING).map(
              ({ row, age }) =>
                html`<li key=${row.number}>
                  <a href=${`#requests/${row.number}`}><${Name} text=${row.id} /></a> ${row.phase} for${" "}
                  ${duration(1000 * Math.max(0, age))}
                </li>`,
            )}
          </ul>`
    }
  </section>`;
}

function Models({ models }) {
  return html`<section aria-labelledby="models-title">
    <h2 id="models-title">Models</h2>
    ${models.map(
      (model) =>
        html`<div key=${model.id} class="model">
          <h3><${Name} text=${model.id} /> <${State} state=${model.ready ? "ready" : "down"} /></h3>
          <p>
            ${plural(model.workers, "worker")}, context of ${plural(model.context_tokens, "token")},${" "}
            ${count(model.live)} live, ${count(model.queued)} queued. Placed by${" "}
            <${Policy} policy=${model.policy} />
          </p>
          <p><${Split} split=${model.split} /></p>
        </div>`,
    )}
  </section>`;
}

// A preset's name, and behind it its terms and their weights.
function Policy({ policy }) {
  const [name, ...terms] = policy.split(" ");
  return html`<b><${Name} text=${name} /></b> <span class="muted"><${Name} text=${terms.join(" ")} /></span>`;
}

function Split({ split }) {
  if (!split) return html`<span class="muted">Whether a prompt is split is not being weighed now.</span>`;
  const pair = html`<${Name} text=${split.prefill} /> → <${Name} text=${split.decode} />`;
  const cost = split.handoff_ms === null ? "" : ` Handoffs cost ${duration(split.handoff_ms)} that nothing hides.`;
  if (split.tokens === null) return html`No prompt would be split now (${pair}).${cost}`;
  if (split.tokens === 0) return html`Every prompt is split now (${pair}).${cost}`;
  return html`Prompts of ${plural(split.tokens, "uncached token")} and more are split (${pair}); shorter ones stay on
  the decode worker.${cost}`;
}

function Pairs({ feed, rows }) {
  const pairs = [...feed.pairs.values()];
  if (pairs.length === 0) return null;
  const sorted = (key) => [...new Set(pairs.map((pair) => pair[key]))].sort();
  const moved = new Map();
  for (const row of rows) {
    const { transfer_bytes: size, transfer_ms: ms } = row.timings ?? {};
    if (!size || !ms || !isSplit(row)) continue;
    const key = pairKey(row.prefill_worker, row.decode_worker);
    const known = moved.get(key) ?? { bytesPerS: 0, number: 0 };
    if (known.number >= PAIR_SAMPLES) continue;
    moved.set(key, { bytesPerS: Math.max(known.bytesPerS, (1000 * size) / ms), number: known.number + 1 });
  }
  const [sources, destinations] = [sorted("prefill"), sorted("decode")];
  return html`<section aria-labelledby="pairs-title">
    <h2 id="pairs-title">Pairs: who hands over to whom</h2>
    <${Wide} label="Pairs of prefill and decode workers">
      <table class="pairs">
        <thead>
          <tr>
            <th scope="col">from, to</th>
            ${destinations.map((id) => html`<th key=${id} scope="col"><${Name} text=${id} /></th>`)}
          </tr>
        </thead>
        <tbody>
          ${sources.map(
            (source) =>
              html`<tr key=${source}>
                <th scope="row"><${Name} text=${source} /></th>
                ${destinations.map(
                  (id) =>
                    html`<td key=${id}>
                      <${Pair} pair=${feed.pairs.get(pairKey(source, id))} seen=${moved.get(pairKey(source, id))} />
                    </td>`,
                )}
              </tr>`,
          )}
        </tbody>
      </table>
    <//>
    <p class="muted">
      Bandwidth: the best of the pair's newest ${PAIR_SAMPLES} handoffs, bytes by time from the first block to the last.
      Most of them wait for the prompt meanwhile.
    </p>
  </section>`;
}

function Pair({ pair, seen }) {
  if (!pair) return html`<span class="muted">${NOTHING}</span>`;
  const facts = [
    pair.transport && way(pair.transport),
    seen && `up to ${bytes(Math.round(seen.bytesPerS))}/s`,
    pair.handoff_ms !== null && pair.handoff_ms !== undefined && `${duration(pair.handoff_ms)} exposed`,
  ].filter(Boolean);
  return html`<${State} state=${pair.state} /> <span>${facts.join(", ")}</span>${
      pair.reason && html`<div class="reason"><${Name} text=${pair.reason} /></div>`
    }`;
}

function WorkerTable({ workers }) {
  return html`<section aria-labelledby="workers-title">
    <h2 id="workers-title">Workers in numbers</h2>
    <${Wide} label="Workers in numbers">
      <table>
        <thead>
          <tr>
            <th scope="col">worker</th>
            <th scope="col">roles</th>
            <th scope="col">state</th>
            ${Object.keys(CLASSES).map((name) => html`<th key=${name} scope="col" class="num">${name}</th>`)}
            <th scope="col" class="num">running</th>
            <th scope="col" class="num">waiting</th>
            <th scope="col" class="num">prompt tokens queued</th>
            <th scope="col" class="num">prefill step</th>
            <th scope="col" class="num">decode step</th>
            <th scope="col" class="num">tokens/s</th>
            <th scope="col" class="num">prefix hits</th>
            <th scope="col" class="num">preempted</th>
            <th scope="col" class="num">heard of</th>
          </tr>
        </thead>
        <tbody>
          ${workers.map(
            (worker) =>
              html`<tr key=${worker.id}>
                <th scope="row"><${Name} text=${worker.id} /></th>
                <td>${worker.roles.join(", ")}</td>
                <td><${State} state=${worker.state} /></td>
                ${Object.keys(CLASSES).map(
                  (name) => html`<td key=${name} class="num">${count(worker.blocks?.[name])}</td>`,
                )}
                <td class="num">${count(worker.running)}</td>
                <td class="num">${count(worker.waiting)}</td>
                <td class="num">${count(worker.queued_tokens)}</td>
                <td class="num">${duration(worker.prefill_step_ms)}</td>
                <td class="num">${duration(worker.decode_step_ms)}</td>
                <td class="num">${rate(worker.tokens_per_s)}</td>
                <td class="num">${share(worker.prefix_hit, worker.prefix_queried)}</td>
                <td class="num">${count(worker.preemptions)}</td>
                <td class="num">${heard(worker.load_age_ms)}</td>
              </tr>`,
          )}
        </tbody>
      </table>
    <//>
    <details>
      <summary>What they run on</summary>
      <dl class="pairs-of-facts">
        ${workers.map(
          (worker) =>
            html`<div key=${worker.id}>
              <dt><${Name} text=${worker.id} /></dt>
              <dd>
                <${Name} text=${`${worker.device}; ${worker.kernels}`} />
                <div class="muted">
                  process ${worker.pid} on <${Name} text=${worker.host} />, at <${Name} text=${worker.address} />;
                  computes${" "}
                  <${Name} text=${worker.fingerprint} />
                </div>
              </dd>
            </div>`,
        )}
      </dl>
    </details>
  </section>`;
}

function heard(ageMs) {
  if (ageMs === null || ageMs === undefined) return "never";
  return ageMs < 2000 ? "now" : `${duration(ageMs)} ago`;
}
