// Why a request went where it went: each choice of a worker as a table, as `baton explain` has it.

import { html } from "./vendor/htm-preact.js";
import { Name, count, duration, joined, visible } from "./format.js";
import { Wide } from "./parts.js";

const PHASES = { prefill: "Prefill", decode: "Decode", unsplit: "All of it, unsplit," };
const LEFT_OUT = {
  not_ready: "not ready",
  too_long: "cannot hold so long a sequence",
  other_fingerprint: "computes something else",
  barred: "transfers from the source fail",
  no_taker: "no decode worker could take over from it",
  blamed: "failed under this request",
  untried: "no transfer has proven the pair yet",
  claimed: "kept for a request that has waited too long",
  refused: "refused this handoff just now",
  no_blocks: "no room: too few blocks",
  full_batch: "no room: its batch is full",
  queue_limit: "no room: its queue is at the limit",
  no_decode_room: "no room at decode workers for one more handoff",
  reserved: "no room: what it has is for handoffs on their way",
  kept: "kept for shorter prompts",
  over_share: "its last room is kept for other tenants",
  ejected: "ejected for a while: slower than its peers",
};
const UNSPLIT = {
  queue: "prompts wait at the prefill workers",
  prefix: "more of the prompt is cached at the decode worker",
  handoff: "the handoff would take longer than the prompt delays others",
  speed: "the decode worker computes prompts faster",
  never: "the router runs with --split never",
};
const SPLIT = {
  cheaper: "it costs less",
  no_room: "no decode worker has room for all of it beside the handoffs on their way",
  unknown: "what a prompt costs is not yet measured at both",
};

export function Placements({ detail }) {
  const { placements, waiting, row } = detail;
  if (!placements.length && !waiting) return null;
  const waits = row.phase === "ended" ? "It ended while it waited" : "It waits";
  return html`<section aria-labelledby="placements-title">
    <h2 id="placements-title">Why it went where it went</h2>
    ${placements.map((choice) => html`<${Choice} key=${`${choice.phase} ${choice.leg}`} choice=${choice} />`)}
    ${waiting && html`<p>${waits} for a worker: <${Vain} vain=${waiting} />.</p>`}
  </section>`;
}

function Choice({ choice }) {
  const { candidates, terms, verdict } = choice;
  const winner = candidates[0]?.worker_id ?? "";
  const title = `${PHASES[choice.phase] ?? choice.phase} on ${visible(winner)}`;
  return html`<section class="choice">
    <h3>
      ${PHASES[choice.phase] ?? choice.phase} on <${Name} text=${winner} />${" "}
      <small>
        attempt ${choice.attempt}, after ${duration(choice.waited_us / 1000)} of waiting,${" "}
        ${choice.outcome ? visible(choice.outcome) : "runs"}</small
      >
    </h3>
    <p>${decided(verdict, winner)} ${candidates.length > 1 && nextBest(verdict, candidates[1].worker_id)}</p>
    ${choice.unsplit && html`<${Weighed} what="Not split" words=${UNSPLIT} of=${choice.unsplit} />`}
    ${choice.split && html`<${Weighed} what="Split" words=${SPLIT} of=${choice.split} />`}
    ${
      candidates.length > 0 &&
      html`<${Wide} label=${`${title}: candidates`}>
        <table>
          <caption class="hear">
            ${title}: candidates by score
          </caption>
          <thead>
            <tr>
              <th scope="col">worker</th>
              ${terms.map(
                ({ name, weight }) =>
                  html`<th key=${name} scope="col" class="num">
                    ${Number(weight.toFixed(3))} × <${Name} text=${name} />
                  </th>`,
              )}
              <th scope="col" class="num">score</th>
            </tr>
          </thead>
          <tbody>
            ${candidates.map(
              (candidate, index) =>
                html`<tr key=${candidate.worker_id} class=${index ? "" : "winner"}>
                  <th scope="row">
                    <${Name} text=${candidate.worker_id} />${index === 0 && html` <span class="tag">chosen</span>`}
                  </th>
                  ${candidate.values.map((value, place) => html`<td key=${place} class="num">${value.toFixed(3)}</td>`)}
                  <td class="num">${candidate.score.toFixed(3)}</td>
                </tr>`,
            )}
          </tbody>
        </table>
      <//>`
    }
    ${
      choice.num_candidates > candidates.length &&
      html`<p class="muted">And ${count(choice.num_candidates - candidates.length)} more with lower scores.</p>`
    }
    ${
      choice.num_left_out > 0 &&
      html`<p>Left out: <${LeftOut} named=${choice.left_out} number=${choice.num_left_out} />.</p>`
    }
    ${choice.before && html`<p>Before that: <${Vain} vain=${choice.before} />.</p>`}
  </section>`;
}

function Weighed({ what, words, of }) {
  return html`<p>${what}: ${words[of.reason] ?? visible(of.reason)}. <${Costs} costs=${of.costs} /></p>`;
}

function decided(verdict, winner) {
  if (verdict.decider === "term") {
    return html`Decided by <strong><${Name} text=${verdict.term} /></strong>: ${verdict.term_difference.toFixed(3)} more
      for <${Name} text=${winner} />.`;
  }
  return (
    {
      tie: "The scores are equal, and the lower id wins.",
      only: "It was the only candidate.",
      aged: "It had waited so long that it went to the worker nearest to having room, whatever its score.",
    }[verdict.decider] ?? visible(verdict.decider)
  );
}

function nextBest(verdict, runnerUp) {
  const costs = [];
  if (verdict.queue_ms !== undefined)
    costs.push(`its turn ${differs(verdict.queue_ms, "later", "earlier", "at the same time")}`);
  if (verdict.step_ms !== undefined)
    costs.push(`decode steps ${differs(verdict.step_ms, "longer", "shorter", "as long")}`);
  return costs.length > 0 && html`At <${Name} text=${runnerUp} />, the next best: ${joined(costs)}.`;
}

function differs(ms, more, less, same) {
  return Math.abs(ms) < 0.05 ? same : `${duration(Math.abs(ms))} ${ms > 0 ? more : less}`;
}

function Costs({ costs }) {
  if (!costs) return null;
  const apart = costs.queue_ms + costs.prefill_ms + costs.handoff_ms;
  const together = costs.unsplit_queue_ms + costs.unsplit_prefill_ms + costs.disturbance_ms;
  const split = [
    `queue ${duration(costs.queue_ms)}`,
    `prompt ${duration(costs.prefill_ms)}`,
    `handoff ${duration(costs.handoff_ms)}`,
  ].join(", ");
  const unsplit = [
    `queue ${duration(costs.unsplit_queue_ms)}`,
    `prompt ${duration(costs.unsplit_prefill_ms)}`,
    `delay of others ${duration(costs.disturbance_ms)}`,
  ].join(", ");
  return `Split it costs ${duration(apart)} of waiting (${split}), and unsplit ${duration(together)} (${unsplit}).`;
}

function Vain({ vain }) {
  return vain.num_left_out > 0
    ? html`<${LeftOut} named=${vain.left_out} number=${vain.num_left_out} />`
    : "no worker has the role";
}

function LeftOut({ named, number }) {
  const words = named.map(
    (each, index) =>
      html`${index ? ", " : ""}<${Name} text=${each.worker_id} /> (${LEFT_OUT[each.reason] ?? visible(each.reason)})`,
  );
  return html`${words}${number > named.length && ` and ${count(number - named.length)} more`}`;
}
