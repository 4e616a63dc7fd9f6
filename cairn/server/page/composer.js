/** Where the user writes: the text, the context that goes in front of it, and the endpoint. */
import { tokenize } from "./api.js";
import { characters } from "./conversation.js";

const LONG_PASTE = 4_000; // characters from which a paste becomes context
const LARGEST_FILE = 64 << 20; // bytes that a browser takes without trouble

const PLACEHOLDERS = {
  chat: "Write a message",
  completion: "Write what the model is to continue",
};

const byId = (id) => document.getElementById(id);

/** A context and a text as one prompt, the text on a line of its own. */
export function joined(context, text) {
  if (!context) return text;
  const border = context.endsWith("\n") || text.startsWith("\n") ? "" : "\n";
  return context + border + text;
}

/** A file as a data URL. */
function dataUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => done(reader.result));
    reader.addEventListener("error", () => failed(new Error("cannot be read")));
    reader.readAsDataURL(file);
  });
}

export class Composer {
  /**
   * @param onSend called when the user sends
   * @param onContext called when the context was taken away or replaced by the user
   */
  constructor(onSend, onContext) {
    this.onContext = onContext;
    this.context = null; // {name, text}
    this.images = []; // {name, url}, of models that see
    this.model = null;
    this.prompt = byId("prompt");
    this.form = byId("composer");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      onSend();
    });
    this.prompt.addEventListener("keydown", (event) => {
      const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing;
      if (!sends) return;
      event.preventDefault();
      onSend();
    });
    this.prompt.addEventListener("paste", (event) => {
      const pictures = [...event.clipboardData.files].filter((file) => this.#isImage(file));
      if (pictures.length) {
        event.preventDefault();
        this.#files(pictures);
        return;
      }
      const text = event.clipboardData.getData("text/plain");
      if (text.length <= LONG_PASTE) return;
      event.preventDefault();
      this.#add("Pasted text", text);
    });
    byId("attach").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", ({ target }) => {
      this.#files(target.files).then(() => (target.value = ""));
    });
    byId("context-drop").addEventListener("click", () => {
      this.setContext(null);
      this.onContext();
      this.prompt.focus();
    });
    byId("images-drop").addEventListener("click", () => {
      this.setImages([]);
      this.prompt.focus();
    });
    for (const radio of this.form.elements.mode) {
      radio.addEventListener("change", () => this.setMode(radio.value));
    }
    this.#acceptDrops();
    this.setMode("chat");
  }

  /** "chat" or "completion". */
  get mode() {
    return this.form.elements.mode.value;
  }

  /** Choose the endpoint. */
  setMode(mode) {
    this.form.elements.mode.value = mode;
    this.prompt.placeholder = PLACEHOLDERS[mode];
    byId("prompt-label").textContent = PLACEHOLDERS[mode];
  }

  /** What is written, and an empty field. */
  take() {
    const text = this.prompt.value;
    this.prompt.value = "";
    return text;
  }

  /** Put back what was taken, unless something new has been written. */
  give(text, context, images = []) {
    this.prompt.value ||= text;
    if (context && !this.context) this.setContext(context);
    if (images.length && !this.images.length) this.setImages(images);
  }

  /** Show [{name, url}] to the model beside what is written. */
  setImages(images) {
    this.images = images;
    byId("images").hidden = images.length === 0;
    byId("images-name").textContent = images.map(({ name }) => name).join(", ");
    byId("images-size").textContent = images.length === 1 ? "image" : `${images.length} images`;
  }

  /** Put {name, text} in front of what is written; null takes it away. */
  setContext(context) {
    this.context = context;
    byId("context").hidden = context === null;
    if (context === null) return;
    byId("context-name").textContent = context.name;
    byId("context-size").textContent = characters(context.text);
    this.#count(context);
  }

  /** Show that an answer is on its way, or that none is. */
  setBusy(busy) {
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    for (const button of byId("asks").children) button.disabled = busy;
  }

  /** A line for the user. */
  say(text, wrong = false) {
    byId("status").textContent = text;
    byId("status").classList.toggle("error", wrong);
  }

  async #count(context) {
    let tokens;
    try {
      tokens = (await tokenize({ prompt: context.text })).length;
    } catch (error) {
      if (context === this.context) this.say(error.message, true);
      return;
    }
    if (context !== this.context) return;
    const { maxModelLen, layers, pageSize } = this.model ?? { layers: [] };
    let size = `${tokens.toLocaleString()} tokens`;
    if (layers.length) size += `, ${Math.ceil(tokens / (pageSize - 1)).toLocaleString()} pages`;
    if (tokens > maxModelLen) size += `, more than the model's ${maxModelLen.toLocaleString()}`;
    byId("context-size").textContent = size;
  }

  #add(name, text) {
    // Half a surrogate pair cannot be sent as UTF-8.
    const whole = text.toWellFormed();
    const before = this.context;
    this.setContext(
      before ? { name: "Several texts", text: joined(before.text, whole) } : { name, text: whole },
    );
    this.onContext();
    this.say("");
  }

  async #files(files) {
    for (const file of files) {
      try {
        if (file.size > LARGEST_FILE) throw new Error("is too large for a prompt");
        if (this.#isImage(file)) {
          const image = { name: file.name, url: await dataUrl(file) };
          this.setImages([...this.images, image]);
          this.say("");
          continue;
        }
        const bytes = await file.arrayBuffer();
        const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
        if (text.includes("\0")) throw new Error("is not a text");
        this.#add(file.name, text);
      } catch (error) {
        const reason = error instanceof TypeError ? "is not text in UTF-8" : error.message;
        this.say(`${file.name} ${reason}`, true);
      }
    }
  }

  #isImage(file) {
    return Boolean(this.model?.sees) && file.type.startsWith("image/");
  }

  #acceptDrops() {
    const { body } = document;
    body.addEventListener("dragover", (event) => {
      event.preventDefault();
      body.classList.add("dropping");
    });
    body.addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) body.classList.remove("dropping");
    });
    body.addEventListener("drop", (event) => {
      event.preventDefault();
      body.classList.remove("dropping");
      const text = event.dataTransfer.getData("text/plain");
      if (event.dataTransfer.files.length) this.#files(event.dataTransfer.files);
      else if (text) this.#add("Dropped text", text);
    });
  }
}
