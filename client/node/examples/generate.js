// node examples/generate.js HOST:PORT "Once upon a time" [MAX_TOKENS]
import { Client } from "../stepahead.js";

const [address, text, maxTokens = "64"] = process.argv.slice(2);
const client = new Client(address);
const answer = client.stream({ text, sampling: { temperature: 0 }, stopping: { maxTokens: Number(maxTokens) } });
for await (const delta of answer) process.stdout.write(delta.text);
console.log(`\n[${answer.finishReason}, ${answer.usage.outputTokens} tokens]`);
client.close();
