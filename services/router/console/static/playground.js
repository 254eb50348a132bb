// The playground: asks the model, and shows beside the answer where its time went.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { ask } from "./ask.js";
import { NUMBERS, snippets } from "./calls.js";
import { useDetail } from "./feed.js";
import { Name, duration, plural, rate, visible } from "./format.js";
import { Choices, Snippets } from "./parts.js";
import { Drawn } from "./request.js";
import { Story } from "./story.js";

const FIELDS = {
  max_tokens: { words: "Most tokens", min: 1, step: 1 },
  min_tokens: { words: "Least tokens", min: 0, step: 1, hint: "0" },
  temperature: { words: "Temperature", min: 0, max: 100, step: "any", hint: "1" },
  top_p: { words: "Top p", min: 0, max: 1, step: "any", hint: "1" },
  top_k: { words: "Top k", min: 0, step: 1, hint: "0: all" },
  min_p: { words: "Min p", min: 0, max: 1, step: "any", hint: "0" },
  seed: { words: "Seed", min: 0, step: 1, hint: "drawn" },
  repetition_penalty: { words: "Repetition penalty", min: 0, max: 100, step: "any", hint: "1" },
  presence_penalty: { words: "Presence penalty", min: -2, max: 2, step: "any", hint: "0" },
  frequency_penalty: { words: "Frequency penalty", min: -2, max: 2, step: "any", hint: "0" },
};
const UNSURE = 0.3;
const DRAW_EVERY_MS = 50;
const EXAMPLES = {
  "a question": "Why is the sky blue?",
  "a long document": long(),
};
const EMPTY = { ...Object.fromEntries(NUMBERS.map((name) => [name, ""])), max_tokens: "128", stop: "", logprobs: true };

// It stays when another view is shown, and an answer goes on.
const kept = {
  form: { ...EMPTY, mode: "chat", model: "", system: "", text: EXAMPLES["a question"] },
  // It is kept nowhere else, and gone with the page.
  key: "",
  turns: [],
  controller: null,
  drawing: null,
  draw: () => {},
};

export function Playground({ feed }) {
  const [, draw] = useState(0);
  useEffect(() => {
    kept.draw = () => draw((times) => times + 1);
    return () => {
      kept.draw = () => {};
    };
  }, []);
  const { form, turns } = kept;
  const models = feed.state.models.map((model) => model.id);
  if (!models.includes(form.model)) form.model = models[0] ?? "";
  const change = (field, value) => {
    form[field] = value;
    kept.draw();
  };
  const turn = turns.at(-1);
  return html`<h1>Playground</h1>
    <div class="playground">
      <section aria-label="Conversation">
        <${Choices}
          label="Kind of call"
          options=${[
            ["chat", "Chat"],
            ["completion", "Completion"],
          ]}
          chosen=${form.mode}
          choose=${(mode) => change("mode", mode)}
        />
        <ol class="turns">
          ${turns.map((each) => html`<${Turn} key=${each.id} turn=${each} />`)}
        </ol>
        <${Form} ...${{ form, models, change, needsKey: feed.hello.needs_key }} />
        <h2>The same call elsewhere</h2>
        <${Snippets} label="The same call" texts=${snippets(shownCall(form, turn), feed.hello)} />
      </section>
      <section aria-label="Where the time of the answer went" class="beside">
        ${
          turn
            ? html`<${Beside} ...${{ turn, feed }} />`
            : html`<p class="empty">While an answer is made, this side shows where its time goes.</p>`
        }
      </section>
    </div>`;
}

function Form({ form, models, change, needsKey }) {
  const running = kept.controller !== null;
  const onInput = (field) => (event) => change(field, event.target.value);
  const submit = (event) => {
    event.preventDefault();
    if (!running && form.text.trim()) send();
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
  };
  return html`<form class="ask" onSubmit=${submit}>
    ${
      needsKey &&
      html`<label>
        API key
        <input
          type="password"
          name="key"
          autocomplete="off"
          spellcheck="false"
          placeholder="bk_…, kept until this page is closed"
          value=${kept.key}
          onInput=${(event) => {
            kept.key = event.target.value.trim();
          }}
        />
      </label>`
    }
    ${
      form.mode === "chat" &&
      html`<label>System message <input value=${form.system} onInput=${onInput("system")} placeholder="none" /></label>`
    }
    <label>
      ${form.mode === "chat" ? "Message" : "Text to continue"}
      <textarea rows="4" value=${form.text} onInput=${onInput("text")} onKeyDown=${onKeyDown} dir="auto"></textarea>
    </label>
    <p class="examples muted">
      Examples:${" "}
      ${Object.entries(EXAMPLES).map(
        ([words, text]) =>
          html`<button key=${words} type="button" class="small" onClick=${() => change("text", text)}>
            ${words}
          </button> `,
      )}
    </p>
    <p class="bar">
      ${"" /* Keys make them two buttons: one that turns from stopping to sending under a click would send. */}
      ${
        running
          ? html`<button key="stop" type="button" class="main" onClick=${() => kept.controller.abort()}>Stop</button>`
          : html`<button key="send" type="submit" class="main">Send <small>Ctrl+Enter</small></button>`
      }
      ${kept.turns.length > 0 && !running && html`<button type="button" onClick=${forget}>Begin anew</button>`}
      <label class="inline">
        Model
        <select value=${form.model} onChange=${onInput("model")}>
          ${models.map(
            (id) => html`<option key=${id} value=${id} selected=${id === form.model}>${visible(id)}</option>`,
          )}
        </select>
      </label>
    </p>
    <details>
      <summary>Sampling, seed, stops, log-probabilities</summary>
      <div class="fields">
        ${Object.entries(FIELDS).map(
          ([name, { words, hint, ...bounds }]) =>
            html`<label key=${name}>
              ${words}
              <input
                type="number"
                name=${name}
                ...${bounds}
                placeholder=${hint ?? "as fits"}
                value=${form[name]}
                onInput=${onInput(name)}
              />
            </label>`,
        )}
        <label
          >Stop at, one a line <textarea rows="2" name="stop" value=${form.stop} onInput=${onInput("stop")}></textarea>
        </label>
        <label class="check">
          <input
            type="checkbox"
            name="logprobs"
            checked=${form.logprobs}
            onChange=${(event) => change("logprobs", event.target.checked)}
          />
          ${" "}Log-probabilities
        </label>
      </div>
    </details>
  </form>`;
}

function Turn({ turn }) {
  return html`<li class="turn">
    <div class="asked">
      <h3 class="hear">${turn.form.mode === "chat" ? "You" : "Text"}</h3>
      <p dir="auto">${visible(turn.form.text, "\n\t")}</p>
    </div>
    <div class="answered" aria-live="polite" aria-busy=${String(turn.runs)}>
      <h3 class="hear">Answer</h3>
      <${Answer} turn=${turn} />
      ${turn.runs && turn.pieces.length === 0 && html`<p class="muted">waits for the first token …</p>`}
      ${turn.error && html`<p class="story-fault" role="alert"><${Name} text=${turn.error} /></p>`}
      ${turn.finish && html`<p class="muted">ended: ${visible(turn.finish)}</p>`}
    </div>
  </li>`;
}

// Tokens with their log-probabilities: shown for the one under the pointer, or the one that arrow keys have gone to.
function Answer({ turn }) {
  const [at, go] = useState(null);
  const box = useRef(null);
  const { pieces } = turn;
  const onKeyDown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    go(Math.min(pieces.length - 1, Math.max(0, (at ?? -1) + step)));
  };
  const hasTokens = pieces.some((piece) => piece.token);
  const text = pieces.map(
    (piece, index) =>
      html`<span
        key=${index}
        class=${classes(piece.token, index === at)}
        onMouseEnter=${piece.token ? () => go(index) : undefined}
        >${visible(piece.text, "\n\t")}</span
      >`,
  );
  if (!hasTokens) return html`<p class="answer" dir="auto">${text}</p>`;
  return html`<p
      class="answer"
      dir="auto"
      tabindex="0"
      role="group"
      ref=${box}
      onKeyDown=${onKeyDown}
      aria-label="Answer; arrow keys go from token to token"
    >
      ${text}
    </p>
    <${Chances} piece=${at === null ? null : pieces[at]} />`;
}

function Chances({ piece }) {
  if (!piece?.token) {
    return html`<p class="chances muted">
      Point at a token, or go to it by arrow keys: what else it might have been. Underlined: it had a chance below${" "}
      ${100 * UNSURE} %.
    </p>`;
  }
  const { token } = piece;
  return html`<div class="chances" role="status">
    <code
      ><b><${Name} text=${JSON.stringify(piece.text)} /></b></code
    >${" "} ${percent(token.logprob)} <span class="muted">logprob ${token.logprob.toFixed(3)}</span>
    ${
      token.top.length > 0 &&
      html` <span class="muted">likeliest:</span> ${token.top.map(
          (each, index) =>
            html`<span key=${index} class="chance"
              ><code><${Name} text=${JSON.stringify(each.text)} /></code> ${percent(each.logprob)}</span
            >`,
        )}`
    }
  </div>`;
}

function percent(logprob) {
  return `${(100 * Math.exp(logprob)).toFixed(1)} %`;
}

function classes(token, isAt) {
  if (!token) return "";
  return ["token", Math.exp(token.logprob) < UNSURE && "token-unsure", isAt && "token-at"].filter(Boolean).join(" ");
}

function Beside({ turn, feed }) {
  // The router's name of a tenant's request has the tenant's before it.
  const row = [...feed.requests.values()].findLast((each) => each.id === turn.id || each.id.endsWith(`/${turn.id}`));
  const { detail } = useDetail(row?.number ?? null);
  const shown = detail?.row ?? row;
  if (!shown) {
    return html`<p class="muted">
      ${turn.runs ? "Sent; the router has not told of it yet." : "The router has nothing of it."}
    </p>`;
  }
  const seen = turn.firstAt && turn.firstAt - turn.sentAt;
  return html`<h2>Where its time went</h2>
    <${Story} row=${shown} />
    <p class="facts">
      <span>${plural(shown.output_tokens, "token")}</span>
      ${shown.tpot_ms ? html`<span>${rate(1000 / shown.tpot_ms)} tokens/s</span>` : ""}
      <span>first token after ${duration(shown.ttft_ms)}</span>
      ${seen && html`<span>here after ${duration(seen)}</span>`}
    </p>
    ${detail && html`<${Drawn} ...${{ detail, feed }} />`}
    <p><a href=${`#requests/${shown.number}`}>All of request ${shown.number}</a></p>`;
}

// What is being written, or else what was sent last.
function shownCall(form, turn) {
  return form.text.trim() || !turn ? written(form) : turn.form;
}

// The form as it would be sent now: a chat goes on with what was said before.
function written(form) {
  const said = kept.turns
    .filter((turn) => turn.form.mode === "chat" && !turn.error && !turn.runs)
    .flatMap((turn) => [
      { role: "user", content: turn.form.text },
      { role: "assistant", content: turn.pieces.map((piece) => piece.text).join("") },
    ]);
  const system = form.system ? [{ role: "system", content: form.system }] : [];
  return { ...form, prompt: form.text, messages: [...system, ...said, { role: "user", content: form.text }] };
}

// A prompt that takes a while to compute: so long that handing its KV over pays.
function long() {
  const legs = [
    "The first runner is fast and carries the baton alone",
    "the second waits, with a hand held out behind",
    "for a moment both hold it",
  ];
  const parts = Array.from(
    { length: 9 },
    (_, lap) =>
      `In lap ${lap + 1}: ${legs.join("; ")}. Whoever lets go too early loses it, and whoever holds on loses time.`,
  );
  return `Here are notes on a relay race. ${parts.join(" ")} Sum them up in one sentence.`;
}

function forget() {
  kept.turns = [];
  kept.draw();
}

// Drawing takes longer the longer the answer is: once for each token it would keep the page from hearing its user.
function drawSoon() {
  kept.drawing ??= setTimeout(() => {
    kept.drawing = null;
    kept.draw();
  }, DRAW_EVERY_MS);
}

async function send() {
  const form = written(kept.form);
  const turn = {
    id: `console-${crypto.randomUUID?.() ?? Date.now()}`,
    form,
    pieces: [],
    finish: null,
    error: null,
    runs: true,
  };
  Object.assign(turn, { sentAt: performance.now(), firstAt: null });
  kept.turns.push(turn);
  kept.controller = new AbortController();
  kept.draw();
  try {
    for await (const { pieces, finish } of ask(form, turn.id, kept.key, kept.controller.signal)) {
      if (pieces.length) turn.firstAt ??= performance.now();
      turn.pieces.push(...pieces);
      turn.finish = finish ?? turn.finish;
      drawSoon();
    }
    if (form.mode === "chat" && kept.form.text === form.text) kept.form.text = "";
  } catch (error) {
    if (error.name === "AbortError") turn.finish = "stopped";
    else turn.error = error.message;
  }
  turn.runs = false;
  kept.controller = null;
  kept.draw();
}
