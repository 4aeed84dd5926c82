// node examples/chat.js HOST:PORT: a conversation, one turn per line of input.
import { createInterface } from "node:readline";
import { Client } from "../stepahead.js";

const client = new Client(process.argv[2]);
const messages = [];
for await (const content of createInterface({ input: process.stdin })) {
  messages.push({ role: "user", content });
  const answer = client.chat(messages, { sampling: { temperature: 0 } });
  for await (const delta of answer) process.stdout.write(delta.text);
  console.log();
  messages.push({ role: "assistant", content: answer.text });
}
client.close();
