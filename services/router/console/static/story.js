// Says in sentences what happened to a request: who computed its prompt, what the handoff moved, and what of it cost
// time.

import { html } from "./vendor/htm-preact.js";
import { Name, bytes, count, duration, joined, plural, share } from "./format.js";

const WAYS = { shm: "shared memory", grpc: "gRPC", tcp: "TCP", nixl: "NIXL", local: "no wire: it stayed where it was" };
const SEAMLESS = "and the answer went on from there: no token was lost or repeated.";
const FINE = new Set(["", "done", "stop", "length"]);

export function way(transport) {
  return WAYS[transport] ?? transport ?? "an unknown way";
}

export function isSplit(row) {
  return Boolean(row.prefill_worker && row.decode_worker && row.prefill_worker !== row.decode_worker);
}

export function isUnsplit(row) {
  return Boolean(row.prefill_worker) && row.prefill_worker === row.decode_worker;
}

export function hasFailed(row) {
  return row.phase === "ended" && !FINE.has(row.outcome);
}

// The handoff in one sentence, or null while there is nothing to say of one.
export function Handoff({ row }) {
  const { timings } = row;
  const prefill = html`<strong class="ink-prefill"><${Name} text=${row.prefill_worker} /></strong>`;
  const decode = html`<strong class="ink-decode"><${Name} text=${row.decode_worker} /></strong>`;
  if (isUnsplit(row)) {
    return html`${decode} ran this request alone, prompt and answer: no KV was handed over.`;
  }
  if (!isSplit(row)) return null;
  if (row.phase !== "ended" && !row.ttft_ms) {
    const prompt = plural(row.prompt_tokens, "token");
    return html`${prefill} is computing the prompt (${prompt}); what is done of its KV goes to ${decode} meanwhile.`;
  }
  const computed = timings?.prefill_compute_ms ?? stageMs(row, "prefill");
  const cached = row.cached_tokens ? `, ${count(row.cached_tokens)} of them from its cache` : "";
  const took = computed === null ? "" : ` in ${duration(computed)}`;
  const prompt = html`${prefill} computed the prompt (${plural(row.prompt_tokens, "token")}${cached})${took}`;
  if (timings?.transfer_exposed_ms === undefined) {
    return row.phase === "decoding"
      ? html`${prompt}; its KV went to ${decode}. What that cost is known when the answer is done.`
      : html`${prompt}; its KV ${row.phase === "ended" ? "was to go" : "goes"} to ${decode}.`;
  }
  const { transfer_overlapped_ms: hiddenMs, transfer_exposed_ms: exposedMs } = timings;
  const [size, route] = [bytes(timings.transfer_bytes), way(timings.transport)];
  const hidden = hiddenMs ? ` ${duration(hiddenMs)} of the transfer ran beside the prompt and cost nothing;` : "";
  const exposed = html`<strong class="ink-transfer">${duration(exposedMs)}</strong>`;
  const ofAll = row.total_ms ? `, ${share(exposedMs, row.total_ms)} of the request's time` : "";
  const cost = html`${exposed} of it nobody hid: that is what the handoff cost${ofAll}.`;
  return html`${prompt}; its KV (${size}) went to ${decode} over ${route}.${hidden} ${cost}`;
}

// What else there is to know: the answer, waits, faults.
export function Story({ row }) {
  return html`<div class="story">
    <p>${opening(row)} <${Handoff} row=${row} /> ${answer(row)}</p>
    ${row.retries > 0 && html`<p class="story-fault">${replay(row)}</p>`}
    ${
      hasFailed(row) &&
      html`<p class="story-fault">
        It ended as <strong><${Name} text=${row.outcome} /></strong>${
          row.failure ? html`; its client was told: “<${Name} text=${row.failure} />”` : ""
        }
      </p>`
    }
  </div>`;
}

function opening(row) {
  if (row.phase === "queued") return "It waits for a worker.";
  if (row.phase === "prefilling" && !isSplit(row) && row.prefill_worker) {
    const prefill = html`<strong class="ink-prefill"><${Name} text=${row.prefill_worker} /></strong>`;
    return html`${prefill} is computing the prompt (${plural(row.prompt_tokens, "token")}).`;
  }
  if (row.phase === "parked") return "Its prompt is done, and its KV waits for a decode worker with room.";
  return "";
}

function answer(row) {
  if (!row.decode_worker || !row.output_tokens) return "";
  const who = html`<strong class="ink-decode"><${Name} text=${row.decode_worker} /></strong>`;
  const pace = row.tpot_ms ? `, one in ${duration(row.tpot_ms)} on average` : "";
  const [verb, yet] = row.phase === "ended" ? ["made", ""] : ["is making", " so far"];
  return html` ${who} ${verb} the answer: ${plural(row.output_tokens, "token")}${yet}${pace}.`;
}

function replay(row) {
  const ended = row.stages.filter((stage) => stage.worker && stage.outcome && !FINE.has(stage.outcome));
  const faults = ended.map(
    (stage) =>
      html`the ${stage.name} on <${Name} text=${stage.worker} /> was given up (<${Name} text=${stage.outcome} />)
        ${stage.end_ms === null ? "" : ` at ${duration(stage.end_ms)}`}`,
  );
  const what = faults.length ? html`: ${faults.map((fault, index) => html`${index ? "; " : ""}${fault}`)}` : "";
  return html`<strong>It was placed again ${row.retries === 1 ? "once" : `${row.retries} times`}</strong>${what}.${" "}
    ${goneOn(row)}`;
}

function goneOn(row) {
  const prompts = row.stages.filter((stage) => stage.name === "prefill").length;
  if (prompts > 1) {
    return `Its prompt and what its client had received by then were computed again, ${SEAMLESS}`;
  }
  if (isSplit(row))
    return html`Its KV was still on <${Name} text=${row.prefill_worker} />, and was handed over again: nothing was
      computed twice.`;
  return `What its client had received by then was kept, ${SEAMLESS}`;
}

function stageMs(row, name) {
  const stage = row.stages.findLast((each) => each.name === name && each.end_ms !== null);
  return stage ? stage.end_ms - stage.start_ms : null;
}

// Where the time to the first token went: [{words, ms, kind}], the largest says it in a sentence. Stages tell of all
// attempts, and what workers measured is of the last one, which may have begun after the first token.
export function firstToken(row) {
  if (!row.ttft_ms) return null;
  const name = row.stages.some((stage) => stage.name === "prefill") ? "prefill" : "decode";
  const legs = row.stages.filter((stage) => stage.name === name);
  const first = legs.findLast((leg) => leg.start_ms < row.ttft_ms);
  if (!first) return null;
  const until = (stage) => Math.max(0, Math.min(stage.end_ms ?? row.ttft_ms, row.ttft_ms) - stage.start_ms);
  const sum = (stages) => stages.reduce((ms, stage) => ms + until(stage), 0);
  const named = (stage) => sum(row.stages.filter((each) => each.name === stage));
  const { prefill_wait_ms: waitMs, prefill_compute_ms: computeMs } = row.timings ?? {};
  const isMeasured = computeMs !== undefined && first === legs.at(-1);
  const parts = [
    { words: "waiting for a prefill worker", ms: named("queue"), kind: "router" },
    { words: "tokenising", ms: named("tokenize"), kind: "router" },
    ...(legs[0] === first
      ? []
      : [{ words: "attempts that were given up", ms: sum(legs.slice(0, legs.indexOf(first))), kind: "prefill" }]),
    ...(isMeasured
      ? [
          { words: "waiting for the worker's batch", ms: waitMs ?? 0, kind: "prefill" },
          { words: "computing the prompt", ms: computeMs, kind: "prefill" },
        ]
      : [{ words: "waiting for the worker's batch and computing the prompt", ms: until(first), kind: "prefill" }]),
  ];
  const rest = row.ttft_ms - parts.reduce((ms, part) => ms + part.ms, 0);
  return [...parts, { words: "placing and messages", ms: Math.max(0, rest), kind: "router" }];
}

export function FirstToken({ row }) {
  const parts = firstToken(row);
  if (!parts) return null;
  const large = parts.filter((part) => part.ms >= 0.1 * row.ttft_ms).sort((one, other) => other.ms - one.ms);
  const words = joined(large.map((part) => `${part.words} (${share(part.ms, row.ttft_ms)})`));
  return html`<section aria-labelledby="ttft-title">
    <h2 id="ttft-title">Where the first token's ${duration(row.ttft_ms)} went</h2>
    <p>Mostly ${words}. The handoff is no part of it: the prefill worker makes the first token itself.</p>
    <table class="parts">
      <thead>
        <tr>
          <th scope="col">part</th>
          <th scope="col" class="num">took</th>
          <th scope="col" class="num">share</th>
        </tr>
      </thead>
      <tbody>
        ${parts.map(
          (part) =>
            html`<tr key=${part.words}>
              <th scope="row">
                <span
                  class=${`meter wf-${part.kind}`}
                  aria-hidden="true"
                  style=${{ width: `${Math.min(100, (100 * part.ms) / row.ttft_ms)}%` }}
                ></span>
                ${part.words}
              </th>
              <td class="num">${duration(part.ms)}</td>
              <td class="num">${share(part.ms, row.ttft_ms)}</td>
            </tr>`,
        )}
      </tbody>
    </table>
  </section>`;
}
