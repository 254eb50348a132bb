// Uses Node's `openai`: a chat under a JSON Schema, whole and as a stream.

import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const schema = {
  type: "object",
  properties: { colour: { enum: ["red", "green"] }, count: { type: "integer", minimum: 0, maximum: 9 } },
  required: ["colour", "count"],
  additionalProperties: false,
};
const asked = {
  model,
  messages: [{ role: "user", content: "A colour and a count, as JSON." }],
  temperature: 0,
  max_tokens: 120,
  response_format: { type: "json_schema", json_schema: { name: "Colour", schema, strict: true } },
};

const whole = (await client.chat.completions.create(asked)).choices[0];
assert.equal(whole.finish_reason, "stop");
const answer = JSON.parse(whole.message.content);
assert.ok(["red", "green"].includes(answer.colour));

let text = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(text, whole.message.content);
await assert.rejects(
  client.chat.completions.create({ ...asked, response_format: { type: "json_schema", json_schema: { name: "n", schema: { not: {} } } } }),
  (error) => error.param === "response_format.json_schema.schema",
);
