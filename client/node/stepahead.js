// A small client of Stepahead's public API for Node. Requests are GenerateRequest messages in camel case: see
// protos/stepahead/v1/generation.proto.

import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import { StepaheadError, fromGrpcError } from "./status_details.js";

export { StepaheadError };

const HERE = fileURLToPath(new URL(".", import.meta.url));
const PROTOS = process.env.STEPAHEAD_PROTOS ?? fileURLToPath(new URL("../../protos", import.meta.url));

const definition = protoLoader.loadSync("stepahead/v1/generation.proto", {
  includeDirs: [PROTOS, HERE],
  longs: String, // 64-bit values do not fit a JavaScript number
  enums: String,
  defaults: true, // an empty text is "", not undefined
  oneofs: true,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).stepahead.v1;

export class Client {
  #stub;

  /** `address` is HOST:PORT of a scheduler. The connection opens with the first call. */
  constructor(address = "127.0.0.1:50051") {
    this.#stub = new GenerationService(address, grpc.credentials.createInsecure());
  }

  /** Starts a request; iterate over the result for its deltas. Options: `timeoutMs`. */
  stream(request, { timeoutMs } = {}) {
    const deadline = timeoutMs === undefined ? undefined : Date.now() + timeoutMs;
    return new Generation(this.#stub.generate(request, { deadline }));
  }

  /** Starts the next turn of a conversation, [{role, content}]; other fields as in `stream`. */
  chat(messages, request = {}, options = {}) {
    return this.stream({ ...request, chat: { messages } }, options);
  }

  /** Ends requests by their ids; resolves to one outcome each, such as "CANCELLED" or "NOT_FOUND". */
  cancel(...requestIds) {
    return new Promise((resolve, reject) => {
      this.#stub.cancel({ requestIds }, (error, response) => {
        if (error) reject(fromGrpcError(error));
        else resolve(response.outcomes.map((outcome) => outcome.replace("CANCEL_OUTCOME_", "")));
      });
    });
  }

  close() {
    this.#stub.close();
  }
}

/** A request under way. Iterating yields {choiceIndex, firstTokenIndex, tokenIds, text}; leaving early cancels. */
export class Generation {
  #call;

  constructor(call) {
    this.#call = call;
    this.text = "";
    this.tokenIds = [];
    this.started = undefined; // the admission, once it has come
    this.finishReason = undefined; // such as "STOP", once the choice has ended
    this.usage = undefined; // token counts, once the request has ended
  }

  /** Ends the request; iterating then fails with code CANCELLED. */
  cancel() {
    this.#call.cancel();
  }

  async *[Symbol.asyncIterator]() {
    try {
      for await (const response of this.#call) {
        for (const event of response.events) {
          const delta = this.#take(event);
          if (delta) yield delta;
        }
      }
    } catch (error) {
      throw error instanceof Error && "code" in error && "metadata" in error ? fromGrpcError(error) : error;
    } finally {
      this.#call.cancel(); // harmless after the end
    }
  }

  /** Reads to the end; resolves to this. */
  async completion() {
    for await (const _ of this);
    return this;
  }

  #take(event) {
    if (event.kind === "started") this.started = event.started;
    else if (event.kind === "choiceFinished") {
      this.finishReason = event.choiceFinished.reason.replace("FINISH_REASON_", "");
    } else if (event.kind === "finished") this.usage = event.finished.usage;
    if (event.kind !== "delta") return undefined;
    this.text += event.delta.text;
    this.tokenIds.push(...event.delta.tokenIds);
    return event.delta;
  }
}
