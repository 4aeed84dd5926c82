// node examples/cancel.js HOST:PORT: ends one request from its own stream, and one by its id.
import { Client, StepaheadError } from "../stepahead.js";

const client = new Client(process.argv[2]);

async function cancelAfterThreeTokens(how, cancel) {
  const answer = client.stream({ requestId: `cancel-${how}`, tokenIds: { ids: [1] }, stopping: { maxTokens: 4000 } });
  let cancelled = false;
  try {
    for await (const _ of answer) {
      if (cancelled || answer.tokenIds.length < 3) continue; // what was under way still arrives
      cancelled = true;
      await cancel(answer);
    }
  } catch (error) {
    if (!(error instanceof StepaheadError)) throw error;
    console.log(`by ${how}: ${error.code} after ${cancelled ? "three tokens or more" : "too few"}`);
  }
}

await cancelAfterThreeTokens("stream", (answer) => answer.cancel());
await cancelAfterThreeTokens("id", async () => {
  console.log(`by id: ${await client.cancel("cancel-id", "cancel-nothing")}`);
});
client.close();
