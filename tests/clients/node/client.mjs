// OpenAI's own client for Node: node client.mjs BASE_URL MODEL. Prints what it got as one line of JSON.
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France? Answer in one word." }];
const fields = { model, messages, max_tokens: 12, temperature: 0 };

const whole = await client.chat.completions.create(fields);

let streamed = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({
  ...fields,
  stream: true,
  stream_options: { include_usage: true },
})) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}

const helper = await client.chat.completions.stream(fields).finalChatCompletion();

const schema = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const structured = await client.chat.completions.create({
  ...fields,
  max_tokens: 40,
  response_format: { type: "json_schema", json_schema: { name: "city", strict: true, schema } },
});

const response = await client.responses.create({ model, input: "Say hello.", max_output_tokens: 8 });
const embedding = await client.embeddings.create({ model, input: "a cat" });

let status = null;
let param = null;
try {
  await client.chat.completions.create({ ...fields, temperature: 9 });
} catch (error) {
  ({ status, param } = error);
}

console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    streamed,
    usage,
    helper: helper.choices[0].message.content,
    structured: structured.choices[0].message.content,
    response: response.output_text,
    dimensions: embedding.data[0].embedding.length,
    status,
    param,
  }),
);
