// Client of the server's API: sends a request and reads the chunks of its stream.

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const headers = (key) => ({ "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) });

// Formats an error body of any shape as one line.
export function errorLine(body, status) {
  const detail = body?.error?.message ?? body?.error ?? body?.message ?? body?.detail;
  const fallback = detail ? JSON.stringify(detail) : `The server answered with status ${status}.`;
  const line = typeof detail === "string" ? detail : fallback;
  return line.replace(/\s+/g, " ").trim();
}

// fetch() whose network errors are ApiErrors with a readable message.
async function reach(path, options) {
  try {
    return await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached; is it still running?", 0);
  }
}

async function check(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(errorLine(body, response.status), response.status);
}

export async function firstModel(key) {
  const response = await check(await reach("v1/models", { headers: headers(key) }));
  return (await response.json()).data?.[0] ?? null;
}

// Calls onChunk with every JSON chunk of the stream. Throws ApiError for an error before or in the stream, and
// AbortError if the signal fires, which closes the connection.
export async function stream(path, body, { key, signal, onChunk }) {
  const response = await check(
    await reach(path, { method: "POST", headers: headers(key), body: JSON.stringify(body), signal }),
  );
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The connection failed before the response was complete.", 0);
    });
    if (done) throw new ApiError("The response ended before it was complete.", 0);
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(errorLine(chunk, response.status), response.status);
      onChunk(chunk);
    }
  }
}
