// node examples/errors.js HOST:PORT: what a refused request says.
import { Client, StepaheadError } from "../stepahead.js";

const client = new Client(process.argv[2]);
try {
  await client.stream({ tokenIds: { ids: [1] }, sampling: { topP: 2 }, stopping: { maxTokens: 0 } }).completion();
} catch (error) {
  if (!(error instanceof StepaheadError)) throw error;
  console.log(`${error.code} ${error.reason}`);
  for (const { field, description } of error.violations) console.log(`  ${field}: ${description}`);
}
client.close();
