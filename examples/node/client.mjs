// A complete Node.js client of Baton: streaming, deadline, cancelling and retries, from the protos without generated code.
//
//   npm ci
//   node client.mjs --prompt "Why is the sky blue?"
//   node client.mjs --prompt "Count to a thousand" --timeout 0.5        # DEADLINE_EXCEEDED, exit status 1
//   node client.mjs --prompt "Count to a thousand" --cancel-after 10    # hangs up after 10 messages

import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const here = (path) => fileURLToPath(new URL(path, import.meta.url));

// The channel repeats calls that were refused before they had begun: no worker is ready, or the queue is full.
// A stream of which something has arrived is never repeated.
const SERVICE_CONFIG = {
  methodConfig: [
    {
      name: [{ service: "baton.v1.InferenceService" }],
      retryPolicy: {
        maxAttempts: 5,
        initialBackoff: "0.2s",
        maxBackoff: "5s",
        backoffMultiplier: 3,
        retryableStatusCodes: ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
      },
    },
  ],
};

const { values: args } = parseArgs({
  options: {
    target: { type: "string", default: "127.0.0.1:50051" },
    prompt: { type: "string" },
    "max-tokens": { type: "string", default: "128" },
    temperature: { type: "string", default: "0" },
    "ignore-eos": { type: "boolean", default: false }, // write all of --max-tokens
    timeout: { type: "string", default: "60" }, // deadline, seconds from now
    "cancel-after": { type: "string", default: "-1" }, // hang up after N messages of text
    traceparent: { type: "string", default: "" }, // of the caller's span
  },
});
if (!args.prompt) {
  console.error("--prompt is missing");
  process.exit(2);
}

// `keepCase`: fields are called as in the protos. `oneofs`: message.event says which is set.
const definition = protoLoader.loadSync("baton/v1/inference.proto", {
  includeDirs: [here("../../protos")],
  keepCase: true,
  defaults: true, // a field that was left out reads as 0 or ""
  longs: Number,
  enums: String,
  oneofs: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).baton.v1;
const client = new InferenceService(args.target, grpc.credentials.createInsecure(), {
  "grpc.enable_retries": 1,
  "grpc.service_config": JSON.stringify(SERVICE_CONFIG),
});

// With a `traceparent`, Baton's spans continue the caller's trace.
const metadata = new grpc.Metadata();
if (args.traceparent) metadata.set("traceparent", args.traceparent);

const request = {
  messages: { messages: [{ role: "user", content: args.prompt }] },
  sampling: { temperature: Number(args.temperature) },
  stopping: { max_tokens: Number(args["max-tokens"]), ignore_eos: args["ignore-eos"] },
};
// The deadline travels with the call: past it, all of Baton's processes stop working for this request.
const call = client.generateStream(request, metadata, { deadline: Date.now() + Number(args.timeout) * 1000 });

let numChunks = 0;
try {
  for await (const message of call) {
    if (message.event === "prompt_info") {
      const { request_id, prompt_tokens } = message.prompt_info; // first
      console.log(`[${request_id}: ${prompt_tokens} tokens in]`);
    } else if (message.event === "chunk") {
      process.stdout.write(message.chunk.text);
      numChunks += 1;
    } else if (message.event === "completion") {
      finished(message.completion); // last
    }
    if (numChunks === Number(args["cancel-after"])) {
      call.cancel(); // the workers stop within a step
      console.log(`\n[cancelled after ${numChunks} messages]`);
      break;
    }
  }
} catch (error) {
  if (typeof error.code !== "number") throw error; // not a gRPC status
  if (!(error.code === grpc.status.CANCELLED && numChunks === Number(args["cancel-after"]))) {
    console.error(`\n${grpc.status[error.code]}: ${error.details}`);
    process.exitCode = 1;
  }
} finally {
  client.close();
}

function finished({ finish_reason, usage, timings, workers }) {
  const reason = finish_reason.replace("FINISH_REASON_", "").toLowerCase();
  console.log(
    `\n[${usage.output_tokens} tokens, ${reason}; first token after ${timings.ttft_ms.toFixed(0)} ms, ` +
      `in all ${timings.total_ms.toFixed(0)} ms; ${workers.prefill} -> ${workers.decode}]`,
  );
}
