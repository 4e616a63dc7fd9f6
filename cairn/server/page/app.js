/** Puts the page together: what happens on sending, stopping, choosing an example. */
import { model as fetchModel, onUnauthorized, stream, tokenize } from "./api.js";
import { Composer, joined } from "./composer.js";
import { Conversation } from "./conversation.js";
import { LENGTHS, buildExample, generator } from "./example.js";
import { Meter } from "./meter.js";
import { Panel } from "./panel.js";
import { Reads } from "./reads.js";
import { Settings } from "./settings.js";

const RETRY = 1500; // milliseconds between two looks at a server that is not ready
const TICK = 100; // milliseconds between two updates of a waiting time
const ROOM = 256; // tokens of max_model_len that an example leaves for question and answer

const byId = (id) => document.getElementById(id);

const composer = new Composer(send, dropExample);
const conversation = new Conversation(byId("log"), byId("scroll"), (reads, index) =>
  panel?.show(reads, index),
);
let model = null;
let settings = null;
let panel = null; // only for models that select pages
let history = []; // messages of the chat
let running = null; // AbortController of the answer on its way

onUnauthorized(askForKey);
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", startOver);
byId("key-cancel").addEventListener("click", () => byId("key").close());
byId("example-build").addEventListener("click", runExample);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) running?.abort();
});
connect();

/** Wait for the server, then show what it serves. */
async function connect() {
  while (model === null) {
    try {
      model = await fetchModel();
    } catch (error) {
      const passing = error.status === 503 || error.status === 0;
      byId("model").textContent = passing ? "waiting for the server" : "not connected";
      composer.say(error.message, true);
      if (!passing) return;
      await new Promise((done) => setTimeout(done, RETRY));
    }
  }
  composer.say("");
  composer.model = model;
  composer.setMode(model.chat ? "chat" : "completion");
  const context = document.createElement("span");
  if (Number.isFinite(model.maxModelLen)) {
    context.textContent = ` · up to ${model.maxModelLen.toLocaleString()} tokens`;
  }
  byId("model").replaceChildren(model.id, context);
  byId("model").title = model.id;
  settings = new Settings(model);
  if (model.layers.length) panel = new Panel(model, (...at) => conversation.light(...at));
  byId("main").classList.toggle("watched", panel !== null);
  offerExample();
  composer.prompt.focus();
}

function send() {
  const { context, images, mode } = composer;
  const given = composer.prompt.value || context || images.length;
  if (running || model === null || !given) return;
  if (images.length && mode !== "chat") {
    composer.say("Images go with a chat", true);
    return;
  }
  const text = composer.take();
  composer.setImages([]);
  // A chat remembers its context; completions know nothing of each other and keep it in front.
  if (mode === "chat") composer.setContext(null);
  run({ mode, text, context, images });
}

/**
 * Send a request and show its answer.
 * @param order {mode, text, context, images, fact}; fact is the example's that is asked for
 */
async function run(order) {
  const { mode, text, context, images = [], fact } = order;
  const prompt = joined(context?.text ?? "", text);
  const content = withImages(prompt.toWellFormed(), images);
  const body = requestBody(order, content);
  const watched = panel !== null && body.cairn !== undefined;
  const reads = watched ? new Reads(model) : null;
  byId("welcome").hidden = true;
  if (mode === "chat") conversation.user(text, context, images);
  const given = mode === "chat" ? null : { text, context };
  const answer = conversation.answer(model.id, reads, given);
  running = new AbortController();
  composer.setBusy(true);
  composer.say("Reading");
  const meter = new Meter();
  const tick = setInterval(() => {
    answer.say(meter.first === null ? meter.waiting() : meter.facts());
  }, TICK);
  if (reads) {
    panel.start(reads);
    locate(reads, body, prompt, fact, running.signal);
  }
  try {
    await follow(mode, body, { answer, meter, reads });
    composer.say("Done");
  } catch (error) {
    if (error.name === "AbortError") meter.reason = "stopped";
    else answer.fail(error.message);
    composer.say(error.name === "AbortError" ? "Stopped" : "Failed");
    // Nothing was answered: what was written can be sent again.
    if (!answer.text && !fact) composer.give(text, context, images);
  } finally {
    clearInterval(tick);
    running = null;
    answer.end();
    // An example's answer is as long as it was asked to be.
    if (fact && meter.reason === "length") meter.reason = null;
    answer.say([...meter.facts(), ...verdict(fact, answer.text, meter.reason)]);
    panel?.refresh();
    composer.setBusy(false);
    composer.prompt.focus();
  }
  if (mode === "chat" && answer.text) {
    history.push({ role: "user", content });
    history.push({ role: "assistant", content: answer.text });
  }
}

/** A message's content: a text, or parts where there are images. */
function withImages(text, images) {
  if (!images.length) return text;
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

function requestBody({ mode, fact }, content) {
  const body = {
    model: model.id,
    stream: true,
    stream_options: { include_usage: true },
    // An example's answer is known to the character, and a token is at least one.
    max_tokens: fact ? fact.answer.length : settings.maxTokens,
    temperature: fact ? 0 : settings.temperature,
  };
  if (mode === "chat") {
    const system = settings.system ? [{ role: "system", content: settings.system }] : [];
    body.messages = [...system, ...history, { role: "user", content }];
    // What the model thinks is shown where it writes it.
    body.separate_reasoning = false;
  } else {
    body.prompt = content;
  }
  if (settings.watch && body.max_tokens <= model.maxSelection) body.cairn = { selection: true };
  return body;
}

/** Take the chunks of a stream as they come. */
async function follow(mode, body, { answer, meter, reads }) {
  const path = mode === "chat" ? "v1/chat/completions" : "v1/completions";
  const hear = (comment) => meter.hear(comment);
  for await (const { choices, usage } of stream(path, body, running.signal, hear)) {
    meter.usage = usage ?? meter.usage;
    for (const choice of choices) {
      const text = (mode === "chat" ? choice.delta.content : choice.text) ?? "";
      const selection = choice.cairn?.selection ?? [];
      meter.reason = choice.finish_reason ?? meter.reason;
      if (!text && !selection.length) continue;
      if (meter.first === null) composer.say("Writing");
      meter.count(reads ? selection.length : 1);
      reads?.add(selection, text);
      answer.append(text, reads?.length ? reads.length - 1 : null);
      if (reads) panel.grown(reads);
    }
  }
}

/** Learn the tokens of the prompt, which say what its pages hold, and where the fact lies. */
async function locate(reads, body, prompt, fact, signal) {
  try {
    reads.promptTokens = await tokenize(body, signal);
    const bytes = reads.promptTokens.length === prompt.length;
    const tokenAt = async (place) =>
      bytes ? place : (await tokenize({ prompt: prompt.slice(0, place) }, signal)).length;
    for (const [start, end] of fact?.spans ?? []) {
      const first = reads.pageOf(await tokenAt(start));
      const last = reads.pageOf((await tokenAt(end)) - 1);
      for (let page = first; page <= last; page++) reads.facts.add(page);
    }
  } catch (error) {
    // Without the tokens the strip still shows pages by number; the answer is not held up.
    if (error.name !== "AbortError") composer.say(error.message, true);
  }
  panel.refresh();
}

function verdict(fact, text, reason) {
  if (!fact || reason === "stopped") return [];
  const right = text.slice(0, fact.answer.length) === fact.answer;
  return [right ? ["right", "right"] : [`wrong, it is ${fact.answer}`, "wrong"]];
}

function startOver() {
  running?.abort();
  history = [];
  conversation.clear();
  panel?.clear();
  dropExample();
  composer.setContext(null);
  composer.take();
  composer.say("");
  byId("welcome").hidden = false;
  composer.prompt.focus();
}

/** The lengths that fit the model, the middle one chosen. */
function offerExample() {
  const longest = model.maxModelLen - ROOM;
  const fitting = LENGTHS.filter((length) => length <= longest);
  const lengths = fitting.length ? fitting : [Math.floor(longest * 0.9)];
  const radios = lengths.map((length, i) => {
    const label = document.createElement("label");
    const radio = document.createElement("input");
    Object.assign(radio, { type: "radio", name: "length", value: length, checked: i === 0 });
    const name = document.createElement("span");
    name.textContent = length < 1000 ? `${length} tokens` : `${Math.round(length / 1000)}K tokens`;
    label.append(radio, name);
    return label;
  });
  byId("example-length").replaceChildren(...radios);
  byId("example").hidden = longest < ROOM;
}

/** Build the document, and ask for its first fact. */
async function runExample() {
  if (running) return;
  const tokens = Number(byId("example-length").querySelector(":checked").value);
  const [seed] = crypto.getRandomValues(new Uint32Array(1));
  try {
    const sample = buildExample(4000, generator(seed)).text;
    const perToken = sample.length / (await tokenize({ prompt: sample })).length;
    showExample(buildExample(Math.floor(tokens * perToken * 0.99), generator(seed)));
  } catch (error) {
    composer.say(error.message, true);
  }
}

function showExample({ text, facts }) {
  composer.setMode("completion");
  composer.setContext({ name: "Made-up code with hidden facts", text });
  const { context } = composer;
  const ask = (fact) => {
    if (!running) run({ mode: "completion", text: fact.question, context, fact });
  };
  const buttons = facts.map((fact) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = `Ask for ${fact.kind}`;
    button.title = fact.question;
    button.addEventListener("click", () => ask(fact));
    return button;
  });
  byId("asks").replaceChildren(...buttons);
  byId("asks").hidden = false;
  ask(facts[0]);
}

function dropExample() {
  byId("asks").hidden = true;
  byId("asks").replaceChildren();
}

/** Ask for the API key; null when the user does not give one. */
function askForKey(refused) {
  const dialog = byId("key");
  if (refused) byId("key-reason").textContent = "The server does not know this key.";
  byId("key-value").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((answered) => {
    const closed = () =>
      answered(dialog.returnValue === "use" ? byId("key-value").value.trim() || null : null);
    dialog.addEventListener("close", closed, { once: true });
  });
}
