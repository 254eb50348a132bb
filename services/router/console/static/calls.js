// Writes the playground's request: as the body that is sent, and as curl, Python and grpcurl have it.

import { UNSAFE } from "./waterfall.js";

const SAMPLING = [
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
  "seed",
];
export const NUMBERS = ["max_tokens", "min_tokens", ...SAMPLING];
// Fields that OpenAI's client does not know.
const EXTRA = ["min_tokens", "top_k", "min_p", "repetition_penalty"];

// The form: {mode: "chat" | "completion", model, messages, prompt, stop, logprobs, and NUMBERS, each "" if left out}.
export function body(form) {
  const sent =
    form.mode === "chat" ? { model: form.model, messages: form.messages } : { model: form.model, prompt: form.prompt };
  for (const name of NUMBERS) {
    if (form[name] !== "") sent[name] = Number(form[name]);
  }
  const stop = form.stop.split("\n").filter(Boolean);
  if (stop.length) sent.stop = stop;
  if (form.logprobs) Object.assign(sent, form.mode === "chat" ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 });
  return { ...sent, stream: true };
}

export function path(form) {
  return form.mode === "chat" ? "/v1/chat/completions" : "/v1/completions";
}

// A key is in none of them: who needs one has it in the environment.
export function snippets(form, { router, needs_key: needsKey }) {
  const header = needsKey ? ` -H "authorization: Bearer $BATON_API_KEY"` : "";
  return {
    curl: curl(form, router, header),
    Python: python(form, router, needsKey),
    grpcurl: grpcurl(form, router, header),
  };
}

function base({ http, tls }) {
  return `${tls ? "https" : "http"}://${http}`;
}

function curl(form, router, header) {
  const sent = quoted(JSON.stringify(body(form)));
  return `curl -N ${base(router)}${path(form)}${header} -H 'content-type: application/json' \\\n    -d ${sent}\n`;
}

function python(form, router, needsKey) {
  const { stream, ...fields } = body(form);
  const extra = Object.fromEntries(EXTRA.filter((name) => name in fields).map((name) => [name, fields[name]]));
  for (const name of EXTRA) delete fields[name];
  const lines = Object.entries(fields).map(([name, value]) => `    ${name}=${literal(value)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra)},`);
  const [create, text] =
    form.mode === "chat"
      ? ["client.chat.completions.create", "chunk.choices[0].delta.content"]
      : ["client.completions.create", "chunk.choices[0].text"];
  const key = needsKey ? `os.environ["BATON_API_KEY"]` : `"none"`;
  return `${needsKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${literal(`${base(router)}/v1`)}, api_key=${key})
stream = ${create}(
${lines.join("\n")}
    stream=True,
)
for chunk in stream:
    print(${text} or "", end="", flush=True)
print()
`;
}

function grpcurl(form, router, header) {
  const { stream, messages, prompt, model, max_tokens, min_tokens, stop, logprobs, top_logprobs, ...sampling } = body(form);
  const request = { model, ...(messages ? { messages: { messages } } : { text: prompt }) };
  const chosen = Object.fromEntries(SAMPLING.filter((name) => name in sampling).map((name) => [name, sampling[name]]));
  if (Object.keys(chosen).length) request.sampling = chosen;
  // Over HTTP a completion has 16 tokens unless told, as OpenAI's.
  const most = max_tokens ?? (form.mode === "chat" ? undefined : 16);
  const stopping = { max_tokens: most, min_tokens, stop };
  if (Object.values(stopping).some((value) => value !== undefined)) request.stopping = stopping;
  if (logprobs) request.response = { logprobs: 5 };
  const sent = quoted(JSON.stringify(request));
  return `grpcurl${router.tls ? "" : " -plaintext"}${header} -d ${sent} \\\n    ${router.grpc} baton.v1.InferenceService/GenerateStream\n`;
}

// For a shell, which takes everything between single quotes as it is.
function quoted(json) {
  const seen = json.replace(UNSAFE, (each) =>
    Array.from({ length: each.length }, (_, unit) => hex("u", each.charCodeAt(unit), 4)).join(""),
  );
  return `'${seen.replaceAll("'", "'\\''")}'`;
}

// For Python. What is copied has no character that cannot be seen.
function literal(value) {
  if (value === true) return "True";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object")
    return `{${Object.entries(value)
      .map(([name, each]) => `${literal(name)}: ${literal(each)}`)
      .join(", ")}}`;
  return JSON.stringify(value).replace(UNSAFE, (each) =>
    each.codePointAt(0) > 0xffff ? hex("U", each.codePointAt(0), 8) : hex("u", each.charCodeAt(0), 4),
  );
}

function hex(letter, number, digits) {
  return `\\${letter}${number.toString(16).padStart(digits, "0")}`;
}
