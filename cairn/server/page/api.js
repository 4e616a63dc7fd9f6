/** The public API of the server, with its key and its errors. */
import { events } from "./sse.js";
import { recall, remember } from "./storage.js";

const KEY = "cairn.key";

/** A request that failed: `message` is for people, `status` is HTTP's, 0 where there was no answer. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

let askKey = async () => null;
let asking = null;

/** Say how to ask the user for a key: `ask(refused)` resolves to the key, or to null. */
export function onUnauthorized(ask) {
  askKey = ask;
}

/** A new key from the user; requests that fail together ask once. */
async function newKey(used) {
  const known = recall(sessionStorage, KEY);
  if (known !== used) return known;
  asking ??= askKey(used !== null).finally(() => (asking = null));
  const key = await asking;
  if (key !== null) remember(sessionStorage, KEY, key);
  return key;
}

async function failure(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // Not the server's own error shape, such as a proxy's page: the status has to do.
  }
  const wait = response.headers.get("Retry-After");
  if (wait) message += `. Try again in ${wait} s`;
  return new ApiError(message, response.status);
}

/** Fetch a path of the API; a body makes it a POST. Throws ApiError, or AbortError when stopped. */
async function request(path, body, signal) {
  for (;;) {
    const key = recall(sessionStorage, KEY);
    const headers = {};
    if (key !== null) headers.Authorization = `Bearer ${key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, {
        method: body === undefined ? "GET" : "POST",
        headers,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server does not answer");
    }
    if (response.ok) return response;
    if (response.status !== 401 || (await newKey(key)) === null) throw await failure(response);
  }
}

/** The served model: {id, pageSize, layers, window, maxModelLen, chat, maxSelection, sees}. */
export async function model() {
  const { data } = await (await request("v1/models")).json();
  const about = data[0].cairn ?? {};
  return {
    id: data[0].id,
    pageSize: about.page_size ?? 0,
    layers: about.landmark_layers ?? [],
    window: about.landmark_window ?? 0,
    maxModelLen: data[0].max_model_len ?? Infinity,
    chat: about.chat_template ?? true,
    maxSelection: about.max_selection_tokens ?? 4096,
    sees: about.images ?? false,
  };
}

/** Token ids of a request body's `prompt` or `messages`, as its endpoint would read them. */
export async function tokenize(body, signal) {
  const { prompt, messages } = body;
  const asked = messages ? { messages } : { prompt };
  return (await (await request("tokenize", asked, signal)).json()).tokens;
}

/** Text of token ids. */
export async function detokenize(tokens) {
  return (await (await request("detokenize", { tokens })).json()).prompt;
}

/**
 * Stream a completion: yields its chunks as objects. Throws when it breaks off.
 * @param onComment called with what the server says between the chunks
 */
export async function* stream(path, body, signal, onComment) {
  const response = await request(path, body, signal);
  try {
    for await (const data of events(response.body, onComment)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, Number(chunk.error.code) || 500);
      yield chunk;
    }
  } catch (error) {
    if (error.name === "TypeError") throw new ApiError("The connection to the server broke");
    throw error;
  }
  throw new ApiError("The server closed the connection before the answer was complete");
}
