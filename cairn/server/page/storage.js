/** Browser storage that may be forbidden: then nothing is remembered, and nothing breaks. */
const fallback = new Map();

/** The text kept under a name, or null. */
export function recall(storage, name) {
  try {
    return storage.getItem(name);
  } catch {
    return fallback.get(name) ?? null;
  }
}

/** Keep a text under a name. */
export function remember(storage, name, text) {
  try {
    storage.setItem(name, text);
  } catch {
    fallback.set(name, text);
  }
}
