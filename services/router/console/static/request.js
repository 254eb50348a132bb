// One request: what happened in sentences, the waterfall, where its first token's time went, and why it went where it
// did.

import { html } from "./vendor/htm-preact.js";
import { useDetail } from "./feed.js";
import { NOTHING, Name, bytes, command, count, duration, jaegerLink, plural, visible } from "./format.js";
import { Empty, Phase, Workers } from "./parts.js";
import { Placements } from "./placements.js";
import { FirstToken, Story, way } from "./story.js";
import { Waterfall } from "./waterfall.js";

export function Request({ number, feed }) {
  const { detail, problem } = useDetail(number);
  if (problem && !detail) {
    const words =
      problem === 404 ? "The router no longer remembers this request." : "The router does not answer; trying again.";
    return html`<h1>Request ${number}</h1>
      <${Empty}>${words} <a href="#requests">All requests</a><//>`;
  }
  if (!detail)
    return html`<h1>Request ${number}</h1>
      <p class="loading">Loading …</p>`;
  const { row } = detail;
  return html`<p class="crumbs"><a href="#requests">Requests</a> / ${number}</p>
    <h1><${Name} text=${row.id} /> <${Phase} row=${row} /></h1>
    <${Story} row=${row} />
    <section aria-labelledby="waterfall-title">
      <h2 id="waterfall-title">Where its time went</h2>
      <${Drawn} ...${{ detail, feed }} />
      <${Actions} ...${{ row, feed }} />
    </section>
    <div class="columns">
      <${FirstToken} row=${row} />
      <${Facts} row=${row} />
    </div>
    <${Placements} detail=${detail} />
    <${Texts} ...${{ row, feed }} />`;
}

export function Drawn({ detail, feed }) {
  const { row, bars } = detail;
  const totalMs = row.total_ms ?? 1000 * (feed.now() - row.arrived);
  return html`<${Waterfall} ...${{ bars, totalMs, caption: `Where the time of request ${row.number} went` }} />`;
}

function Actions({ row, feed }) {
  const jaeger =
    row.trace_id && feed.hello.router.jaeger && jaegerLink(feed.hello.router.jaeger, `/trace/${row.trace_id}`);
  return html`<p class="actions">
    <a href=${`/console/requests/${row.number}/otlp`} download=${`request-${row.number}.otlp.json`}
      >Download as OTLP JSON</a
    >
    ${jaeger && html`<a href=${jaeger} rel="noreferrer">Open in Jaeger</a>`}
    <span class="muted"
      >in a terminal:${" "}
      <code><${Name} text=${command(`explain --request ${shellWord(row.id)}`, feed.hello.router)} /></code>
    </span>
  </p>`;
}

function shellWord(text) {
  return /^[\w.:@%+=/-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

function Facts({ row }) {
  const timings = row.timings ?? {};
  const facts = {
    Model: html`<${Name} text=${row.model} />`,
    Workers: html`<${Workers} row=${row} />`,
    Prompt: `${plural(row.prompt_tokens, "token")}, ${count(row.cached_tokens)} of them cached`,
    Answer: `${plural(row.output_tokens, "token")}${row.max_tokens ? ` of at most ${count(row.max_tokens)}` : ""}`,
    "First token (TTFT)": duration(row.ttft_ms),
    "Each further token (TPOT)": duration(row.tpot_ms),
    "Longest between two (ITL)": duration(row.longest_itl_ms),
    Total: duration(row.total_ms),
    "KV handed over": timings.transfer_bytes ? moved(timings) : NOTHING,
    "Transfer, hidden": duration(timings.transfer_overlapped_ms),
    "Transfer, exposed": duration(timings.transfer_exposed_ms),
    Priority: count(row.priority),
    Trace: row.trace_id ? html`<code><${Name} text=${row.trace_id} /></code>` : "not traced",
  };
  return html`<section aria-labelledby="facts-title">
    <h2 id="facts-title">In numbers</h2>
    <dl class="pairs-of-facts">
      ${Object.entries(facts).map(
        ([words, value]) =>
          html`<div key=${words}>
            <dt>${words}</dt>
            <dd>${value}</dd>
          </div>`,
      )}
    </dl>
  </section>`;
}

function moved({ transfer_bytes: size, transfer_blocks: blocks, transport }) {
  return `${bytes(size)} in ${plural(blocks ?? 0, "block")} over ${way(transport)}`;
}

function Texts({ row, feed }) {
  if (!feed.hello.log_prompts) {
    return html`<p class="muted">
      Its text is not kept: only a router started with <code>--log-prompts</code> shows it.
    </p>`;
  }
  return html`<section aria-labelledby="texts-title">
    <h2 id="texts-title">Text</h2>
    ${[
      ["Prompt", row.prompt],
      ["Answer", row.output],
    ]
      .filter(([, text]) => text)
      .map(
        ([words, text]) =>
          html`<h3>${words}</h3>
            <pre class="text" tabindex="0" aria-label=${words}><bdi>${visible(text, "\n\t")}</bdi></pre>`,
      )}
  </section>`;
}
