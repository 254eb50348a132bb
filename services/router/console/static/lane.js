// The lane between prefill and decode workers: a line for each pair, and handoffs drawn from source to destination.

import { html, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";
import { pairKey } from "./feed.js";
import { Name, bytes, plural } from "./format.js";
import { Arrow } from "./parts.js";
import { isSplit } from "./story.js";

const LATELY_S = 10;
const MOST_LINES = 96;
const MOST_DOTS = 4;
const MOST_LISTED = 6;
const MOST_LABELS = 12;

// Handoffs of the last seconds, by pair: those on their way, and those that have arrived.
export function handoffs(rows, now) {
  const pairs = new Map();
  for (const row of rows) {
    if (!isSplit(row)) continue;
    const underWay = row.phase !== "ended" && (!row.ttft_ms || row.phase === "parked" || row.phase === "binding");
    const tookMs = (row.ttft_ms ?? Infinity) + (row.timings?.transfer_exposed_ms ?? 0);
    if (!underWay && !(row.arrived + tookMs / 1000 > now - LATELY_S && tookMs < Infinity)) continue;
    const key = pairKey(row.prefill_worker, row.decode_worker);
    const pair = pairs.get(key) ?? {
      prefill: row.prefill_worker,
      decode: row.decode_worker,
      underWay: [],
      arrived: [],
    };
    (underWay ? pair.underWay : pair.arrived).push(row);
    pairs.set(key, pair);
  }
  return pairs;
}

export function Lane({ moves, pairs, prefill, decode }) {
  const box = useRef(null);
  const [ends, measure] = useState({ height: 0, width: 0, left: {}, right: {} });
  const ids = JSON.stringify([prefill.map((worker) => worker.id), decode.map((worker) => worker.id)]);
  useLayoutEffect(() => {
    const look = () => {
      const lane = box.current.getBoundingClientRect();
      const middle = (card) => {
        const place = card.getBoundingClientRect();
        return Math.round(place.top - lane.top + place.height / 2);
      };
      const sides = [...box.current.parentElement.querySelectorAll(".side")].map((side) =>
        Object.fromEntries(
          [...side.querySelectorAll("[data-worker]")].map((card) => [card.dataset.worker, middle(card)]),
        ),
      );
      measure({ height: Math.round(lane.height), width: Math.round(lane.width), left: sides[0], right: sides[1] });
    };
    const watcher = new ResizeObserver(look);
    watcher.observe(box.current.parentElement);
    return () => watcher.disconnect();
  }, [ids]);
  const known =
    pairs.length <= MOST_LINES ? pairs : pairs.filter((pair) => moves.has(pairKey(pair.prefill, pair.decode)));
  const lines = known.filter((pair) => pair.prefill in ends.left && pair.decode in ends.right);
  return html`<div class="lane" ref=${box}>
    <svg aria-hidden="true" viewBox=${`0 0 ${ends.width || 1} ${ends.height || 1}`}>
      ${lines.map((pair) => {
        const [from, to] = [ends.left[pair.prefill], ends.right[pair.decode]];
        const bend = ends.width / 2;
        const path = `M0,${from} C${bend},${from} ${bend},${to} ${ends.width},${to}`;
        const move = moves.get(pairKey(pair.prefill, pair.decode));
        return html`<g
          key=${pairKey(pair.prefill, pair.decode)}
          class=${`line line-${pair.state}${move ? " line-used" : ""}`}
        >
          <path d=${path} />
          ${move && html`<${Dots} ...${{ move, path }} />`}
        </g>`;
      })}
      ${
        moves.size <= MOST_LABELS &&
        lines.map((pair) => {
          const move = moves.get(pairKey(pair.prefill, pair.decode));
          const middle = (ends.left[pair.prefill] + ends.right[pair.decode]) / 2;
          return (
            move &&
            html`<g class="line" key=${pairKey(pair.prefill, pair.decode)}
              ><text x=${ends.width / 2} y=${middle - 8}>${told(move)}</text></g
            >`
          );
        })
      }
    </svg>
  </div>`;
}

// A dot travels for each handoff: again and again while it is on its way, once when it has arrived.
function Dots({ move, path }) {
  const rows = [...move.underWay, ...move.arrived].slice(0, MOST_DOTS);
  return rows.map(
    (row) =>
      html`<circle
        key=${row.number}
        r="4"
        class=${move.underWay.includes(row) ? "dot dot-under-way" : "dot"}
        style=${{ offsetPath: `path("${path}")` }}
      />`,
  );
}

// The same in words.
export function Handoffs({ moves }) {
  const all = [...moves.values()].sort((one, other) => other.underWay.length - one.underWay.length);
  return html`<div class="moves">
    <h3 class="ink-transfer">KV handed over <small>in the last ${LATELY_S} s</small></h3>
    ${
      all.length === 0
        ? html`<p class="muted">none</p>`
        : html`<ul class="plain">
            ${all.slice(0, MOST_LISTED).map((move) => {
              const size = move.arrived.reduce((sum, row) => sum + (row.timings?.transfer_bytes ?? 0), 0);
              return html`<li key=${pairKey(move.prefill, move.decode)}>
                <${Name} text=${move.prefill} /><${Arrow} /><${Name} text=${move.decode} />:${" "}
                ${told(move)}${size > 0 && `, ${bytes(size)}`}
              </li>`;
            })}
            ${
              all.length > MOST_LISTED &&
              html`<li class="muted">and ${plural(all.length - MOST_LISTED, "more pair")}</li>`
            }
          </ul>`
    }
  </div>`;
}

function told(move) {
  const parts = [
    move.underWay.length > 0 && `${move.underWay.length} on the way`,
    move.arrived.length > 0 && `${move.arrived.length} arrived`,
  ];
  return parts.filter(Boolean).join(", ");
}
