// Asks Baton for JSON that is valid under a schema, over gRPC, and reads it.
//
//   npm ci
//   node structured.mjs --text "Paris has two million people and lies on the Seine."

import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const SCHEMA = {
  type: "object",
  properties: {
    city: { type: "string", maxLength: 40 },
    kind: { enum: ["village", "town", "city"] },
    millions: { type: "integer", minimum: 0, maximum: 50 },
  },
  required: ["city", "kind", "millions"],
  additionalProperties: false,
};

const { values: args } = parseArgs({
  options: { target: { type: "string", default: "127.0.0.1:50051" }, text: { type: "string", default: "" } },
});
const protos = fileURLToPath(new URL("../../protos", import.meta.url));
const definition = protoLoader.loadSync("baton/v1/inference.proto", {
  includeDirs: [protos],
  keepCase: true,
  defaults: true,
  longs: Number,
  enums: String,
  oneofs: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).baton.v1;
const client = new InferenceService(args.target, grpc.credentials.createInsecure());

// Nobody tells the model of the schema: the prompt has to say what is wanted.
const prompt = `${args.text}\nSay as JSON which city this is: city, kind (village, town or city), millions of people.`;
const request = {
  messages: { messages: [{ role: "user", content: prompt }] },
  sampling: { temperature: 0 },
  stopping: { max_tokens: 400 },
  constraint: { json_schema: JSON.stringify(SCHEMA) },
};
client.generate(request, { deadline: Date.now() + 60_000 }, (error, response) => {
  client.close();
  if (error) {
    console.error(`${grpc.status[error.code]}: ${error.details}`);
    process.exitCode = 1;
  } else if (response.completion.finish_reason !== "FINISH_REASON_STOP") {
    console.error("max_tokens cut the document off");
    process.exitCode = 1;
  } else {
    console.log(JSON.parse(response.output.text));
  }
});
