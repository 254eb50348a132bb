// Sends the playground's request and reads the answer as it comes.

import { body, path } from "./calls.js";

// `key` is the caller's API key, or empty. Yields {pieces: [{text, token: {logprob, top: [{text, logprob}]} | null}], finish: string | null}. Throws an Error
// with what the router says if it refuses or the stream fails.
export async function* ask(form, id, key, signal) {
  const response = await fetch(path(form), {
    method: "POST",
    headers: { "content-type": "application/json", "x-request-id": id, ...(key && { authorization: `Bearer ${key}` }) },
    body: JSON.stringify(body(form)),
    signal,
  });
  if (!response.ok) throw new Error(await refusal(response));
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const message = JSON.parse(data);
    if (message.error) throw new Error(message.error.message);
    const choice = message.choices?.[0];
    if (!choice) continue;
    const text = choice.delta ? (choice.delta.content ?? "") : (choice.text ?? "");
    yield { pieces: pieces(text, tokens(choice.logprobs)), finish: choice.finish_reason ?? null };
  }
}

async function refusal(response) {
  const answer = await response.json().catch(() => null);
  const { message, param } = answer?.error ?? {};
  return message ? `${param ? `${param}: ` : ""}${message}` : `The router answers ${response.status}.`;
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// A chat and a completion write the same in two ways.
function tokens(logprobs) {
  if (logprobs?.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs: top }) => ({
      text: token,
      logprob,
      top: top.map((each) => ({ text: each.token, logprob: each.logprob })),
    }));
  }
  return (logprobs?.tokens ?? []).map((text, index) => ({
    text,
    logprob: logprobs.token_logprobs[index],
    top: Object.entries(logprobs.top_logprobs?.[index] ?? {}).map(([each, logprob]) => ({ text: each, logprob })),
  }));
}

// A piece for each token, if they make up the text: a character may need several tokens, and a stop string ends before
// one.
function pieces(text, all) {
  if (all.length && all.map((token) => token.text).join("") === text)
    return all.map((token) => ({ text: token.text, token }));
  return text || all.length ? [{ text, token: all.at(-1) ?? null }] : [];
}
