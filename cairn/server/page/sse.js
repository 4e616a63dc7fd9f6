/**
 * Server-sent events of a byte stream: yields the data of each event, however the bytes are cut.
 * @param onComment called with the text of each comment
 */
export async function* events(stream, onComment = () => {}) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      // A carriage return at the very end may be the first half of a line end.
      const whole = rest.endsWith("\r") ? rest.length - 1 : rest.length;
      const lines = rest.slice(0, whole).split(/\r\n|\n|\r/);
      rest = lines.pop() + rest.slice(whole);
      for (const line of lines) {
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        } else if (line.startsWith(":")) {
          onComment(line.slice(1).trim());
        }
      }
    }
  } finally {
    // Leaving early closes the connection, which is how the server learns of it.
    await reader.cancel().catch(() => {});
  }
}
