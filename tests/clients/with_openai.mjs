// The `openai` client for JavaScript: chats, streams, JSON schemas, calls and responses. Arguments: address of the server,
// and the folder in which the client is installed.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const { OpenAI } = createRequire(`${process.argv[3]}/`)("openai");

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "size as JSON: " }];
const asked = { model: "target", messages, temperature: 0.8, max_tokens: 200 };
const schema = {
  type: "object",
  properties: { kind: { enum: ["small", "large"] }, is_known: { type: "boolean" } },
  required: ["kind", "is_known"],
  additionalProperties: false,
};
const check = (text) => {
  const found = JSON.parse(text);
  assert.deepEqual(Object.keys(found), ["kind", "is_known"]);
  assert.ok(["small", "large"].includes(found.kind));
};
const format = { type: "json_schema", json_schema: { name: "size", strict: true, schema } };

const whole = await client.chat.completions.create({ ...asked, response_format: format });
check(whole.choices[0].message.content);
const parsed = await client.chat.completions.parse({ ...asked, response_format: format });
check(parsed.choices[0].message.content);

let text = "";
for await (const chunk of await client.chat.completions.create({ ...asked, response_format: format, stream: true })) {
  text += chunk.choices[0]?.delta.content ?? "";
}
check(text);
const helper = client.chat.completions.stream({ ...asked, response_format: format });
check((await helper.finalChatCompletion()).choices[0].message.content);

const tools = [{ type: "function", function: { name: "size", parameters: schema, strict: true } }];
const called = await client.chat.completions.create({ ...asked, tools, tool_choice: "required", parallel_tool_calls: false });
assert.equal(called.choices[0].finish_reason, "tool_calls");
check(called.choices[0].message.tool_calls[0].function.arguments);

const input = { model: "target", input: "size as JSON: ", temperature: 0.8, max_output_tokens: 200 };
const response = await client.responses.create({ ...input, text: { format: { type: "json_schema", name: "size", schema } } });
check(response.output_text);
const events = [];
for await (const event of await client.responses.create({ ...input, max_output_tokens: 5, stream: true })) {
  events.push(event.type);
}
assert.equal(events.at(-1), "response.incomplete");
await assert.rejects(client.chat.completions.create({ ...asked, temperature: -1 }), (error) => error.status === 400);
