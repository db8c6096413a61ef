// Server-sent events of a POST: EventSource can only GET.

/** Yields the data of each event of `response` as text, comments left out. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
      if (data.length) yield data.join("\n");
    }
  }
}

/** The headers that every call carries; the key is the one typed into the page. */
export function headers() {
  const key = document.querySelector("#sampling [name=key]").value;
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

/** What went wrong, in a sentence, from an answer that is not 200. */
export async function complaint(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}
