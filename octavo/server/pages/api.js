// The server's API, as the page uses it. Addresses are relative to <base>, so that a path prefix of
// a proxy holds for them as well.

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function address(path) {
  return new URL(path, document.baseURI).href;
}

function headers(key) {
  const common = { "content-type": "application/json" };
  return key ? { ...common, authorization: `Bearer ${key}` } : common;
}

async function failure(response) {
  const text = await response.text();
  let message = text || response.statusText || "no reason was given";
  try {
    message = JSON.parse(text).error.message ?? message;
  } catch {
    // not the API's own error: its text is all there is
  }
  return new ApiError(`${response.status}: ${message}`, response.status);
}

async function reach(path, options) {
  try {
    return await fetch(address(path), { cache: "no-store", credentials: "omit", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(`The server at ${address("")} does not answer.`);
  }
}

/** Names of the served models, the default first. */
export async function models(key) {
  const response = await reach("v1/models", { headers: headers(key) });
  if (!response.ok) throw await failure(response);
  return (await response.json()).data.map((model) => model.id);
}

/** The events of a streamed chat completion. Throws ApiError, or AbortError for `signal`. */
export async function* chat(body, key, signal) {
  const response = await reach("v1/chat/completions", {
    method: "POST", headers: headers(key), body: JSON.stringify(body), signal,
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The connection broke off before the answer was complete.");
    }
    if (part.done) throw new ApiError("The answer ended before it was complete.");
    const events = (rest + part.value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ApiError(parsed.error.message);
      yield parsed;
    }
  }
}
