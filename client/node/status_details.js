// What a failed call says beyond its code: the google.rpc messages behind "grpc-status-details-bin".

import { fileURLToPath } from "node:url";
import { status as codes } from "@grpc/grpc-js";
import protobuf from "protobufjs";

const HERE = fileURLToPath(new URL(".", import.meta.url));
const TYPE_PREFIX = "type.googleapis.com/";

const root = new protobuf.Root();
root.resolvePath = (_origin, target) => (target.startsWith("google/rpc/") ? HERE + target : target);
root.loadSync(["google/rpc/status.proto", "google/rpc/error_details.proto"]);
const Status = root.lookupType("google.rpc.Status");

/** A call that failed. `code` is a name such as "INVALID_ARGUMENT"; `details` are decoded messages with their `type`. */
export class StepaheadError extends Error {
  constructor(code, message, details) {
    super(message);
    this.name = "StepaheadError";
    this.code = code;
    this.details = details;
  }

  /** The fields that were refused, as [{field, description}]; empty unless the request was wrong. */
  get violations() {
    return this.#detail("google.rpc.BadRequest")?.fieldViolations ?? [];
  }

  /** The machine-readable reason, such as "DRAINING". */
  get reason() {
    return this.#detail("google.rpc.ErrorInfo")?.reason ?? "";
  }

  /** Milliseconds after which another try makes sense; undefined if the server named no time. */
  get retryDelayMs() {
    const delay = this.#detail("google.rpc.RetryInfo")?.retryDelay;
    return delay && Number(delay.seconds ?? 0) * 1000 + (delay.nanos ?? 0) / 1e6;
  }

  #detail(type) {
    return this.details.find((detail) => detail.type === type);
  }
}

/** An error of grpc-js to a StepaheadError. Details of an unknown type keep their bytes in `value`. */
export function fromGrpcError(error) {
  const packed = error.metadata?.get("grpc-status-details-bin")[0];
  const details = packed ? Status.decode(packed).details.map(unpack) : [];
  return new StepaheadError(codes[error.code] ?? "UNKNOWN", error.details ?? error.message, details);
}

function unpack(any) {
  const type = any.type_url.replace(TYPE_PREFIX, "");
  try {
    const Message = root.lookupType(type);
    return { type, ...Message.toObject(Message.decode(any.value), { longs: Number, arrays: true }) };
  } catch {
    return { type, value: any.value };
  }
}
