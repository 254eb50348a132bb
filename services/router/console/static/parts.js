// Small pieces that several views are made of.

import { html, useState } from "./vendor/htm-preact.js";
import { Name, duration, graded } from "./format.js";
import { hasFailed } from "./story.js";

const SIGNS = {
  ready: "●",
  joining: "◌",
  loading: "◌",
  draining: "◐",
  left: "○",
  down: "✕",
  ejected: "▲",
  proven: "✓",
  unproven: "?",
  broken: "✕",
};

// A state: a sign and a word, so that its colour says nothing by itself.
export function State({ state, title }) {
  return html`<span class=${`state state-${state}`} title=${title ?? ""}>
    <span aria-hidden="true">${SIGNS[state] ?? "•"}</span> ${state}
  </span>`;
}

export function Phase({ row }) {
  const failed = hasFailed(row);
  const words = row.phase === "ended" ? row.outcome || "ended" : row.phase;
  const sign = failed
    ? "✕"
    : row.phase === "ended"
      ? "✓"
      : row.phase === "queued" || row.phase === "parked"
        ? "◌"
        : "▸";
  return html`<span class=${`phase phase-${failed ? "failed" : row.phase}`}>
    <span aria-hidden="true">${sign}</span> <${Name} text=${words} />
  </span>`;
}

// A table with a box of its own to scroll in, which keys reach.
export function Wide({ label, children }) {
  return html`<div class="wide" role="region" aria-label=${label} tabindex="0">${children}</div>`;
}

export function Empty({ children }) {
  return html`<p class="empty">${children}</p>`;
}

export function Tile({ label, value, unit, children }) {
  return html`<div class="tile">
    <dt>${label}</dt>
    <dd><b>${value}</b> ${unit && html`<span class="unit">${unit}</span>`}${children}</dd>
  </div>`;
}

// Ways to do one thing, as tabs of text to copy: {name: text}.
export function Snippets({ texts, label }) {
  const names = Object.keys(texts);
  const [shown, show] = useState(names[0]);
  const [told, tell] = useState("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(texts[shown]);
      tell("copied");
    } catch {
      tell("this browser does not let the page copy: select the text");
    }
    setTimeout(() => tell(""), 3000);
  };
  return html`<div class="snippets">
    <div class="choices" role="group" aria-label=${label}>
      ${names.map(
        (name) =>
          html`<button key=${name} type="button" aria-pressed=${String(name === shown)} onClick=${() => show(name)}>
            ${name}
          </button>`,
      )}
      <button type="button" class="copy" onClick=${copy}>Copy</button>
      <span class="told" role="status">${told}</span>
    </div>
    <pre tabindex="0" aria-label=${`${label}: ${shown}`}><code>${texts[shown]}</code></pre>
  </div>`;
}

export function Choices({ label, options, chosen, choose }) {
  return html`<div class="choices" role="group" aria-label=${label}>
    ${options.map(
      ([value, words]) =>
        html`<button key=${value} type="button" aria-pressed=${String(value === chosen)} onClick=${() => choose(value)}>
          ${words}
        </button>`,
    )}
  </div>`;
}

export function Workers({ row }) {
  if (!row.prefill_worker && !row.decode_worker) return html`<span class="muted">none yet</span>`;
  if (row.prefill_worker === row.decode_worker) {
    return html`<${Name} text=${row.decode_worker} /> <span class="muted">alone</span>`;
  }
  return html`<${Name}
      text=${row.prefill_worker}
    />${row.decode_worker && html`<${Arrow} /><${Name} text=${row.decode_worker} />`}`;
}

export function Arrow() {
  return html`<span aria-hidden="true">${" → "}</span><span class="hear">${" to "}</span>`;
}

export function Milliseconds({ ms, objective, near }) {
  if (ms === null || ms === undefined) return html`<span class="muted">–</span>`;
  const found = graded(ms, objective, near);
  const grade = found === "met" ? "" : found;
  return html`<span
    class=${grade && `grade-${grade}`}
    title=${grade ? `${grade}: the objective is ${duration(objective)}` : ""}
  >
    ${
      grade &&
      html`<span aria-hidden="true">${grade === "missed" ? "✕ " : "▲ "}</span><span class="hear">${grade} </span>`
    }${duration(ms)}
  </span>`;
}
