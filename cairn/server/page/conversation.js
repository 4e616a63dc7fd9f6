/** The messages on the page. Text of users and models enters as text nodes only, never as markup. */

const SHOWN = 4_000; // characters of a prompt shown in the transcript

function element(name, className, ...children) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...children);
  return made;
}

export class Conversation {
  /**
   * @param log where messages go
   * @param scroll the element that scrolls
   * @param onToken called with (reads, index) when a token of an answer is clicked
   */
  constructor(log, scroll, onToken) {
    this.log = log;
    this.scroll = scroll;
    this.onToken = onToken;
    this.lit = null;
  }

  /** Show what the user sent; `context` is {name, text} or null, `images` are [{name}]. */
  user(text, context, images = []) {
    const names = images.map(({ name }) => name).join(", ");
    const body = element("div", "body", shortened(text));
    if (names) body.prepend(element("span", "muted", `${names}\n`));
    this.#add(element("article", "user", heading("You", context), body));
  }

  /**
   * Begin an answer.
   * @param title who writes
   * @param reads the record that its tokens look back into, or null
   * @param given for a completion: {text, context}, shown in front of what is written
   */
  answer(title, reads, given = null) {
    const body = element("div", "body");
    if (given) body.append(element("span", "given", shortened(given.text)));
    const article = element("article", "answer", heading(title, given?.context), body);
    article.classList.toggle("completion", given !== null);
    const answer = new Answer(article, body, reads, (changed) => this.#settle(changed));
    body.addEventListener("click", ({ target }) => {
      const token = target.closest(".token");
      if (token && reads) this.onToken(reads, Number(token.dataset.index));
    });
    if (reads) reads.answer = answer;
    this.#add(article);
    return answer;
  }

  /** Mark the token whose reads are shown. */
  light(reads, index) {
    const token = reads.answer?.token(index) ?? null;
    if (token === this.lit) return;
    this.lit?.classList.remove("lit");
    token?.classList.add("lit");
    this.lit = token;
  }

  /** Remove all messages. */
  clear() {
    this.log.replaceChildren();
    this.lit = null;
  }

  #add(article) {
    this.#settle(() => this.log.append(article));
  }

  /** Change the log and stay at its end, if that is where the reader was. */
  #settle(change) {
    const { scrollTop, clientHeight, scrollHeight } = this.scroll;
    const atEnd = scrollTop + clientHeight > scrollHeight - 60;
    change();
    if (atEnd) this.scroll.scrollTop = this.scroll.scrollHeight;
  }
}

class Answer {
  #pending = [];
  #frame = 0;

  constructor(article, body, reads, settle) {
    this.article = article;
    this.body = body;
    this.reads = reads;
    this.settle = settle;
    this.tokens = []; // [index, span], by rising index
    this.text = "";
    this.facts = element("p", "facts");
    article.append(this.facts);
    article.setAttribute("aria-busy", "true");
  }

  /** Add text; `index` is the token that it belongs to, null where reads are not watched. */
  append(text, index) {
    if (!text) return;
    this.text += text;
    this.#pending.push([text, index]);
    this.#frame ||= requestAnimationFrame(() => this.flush());
  }

  /** Show what has come since the last frame. */
  flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const nodes = this.#pending.map(([text, index]) => this.#node(text, index));
    this.#pending = [];
    if (nodes.length) this.settle(() => this.body.append(...nodes));
  }

  #node(text, index) {
    if (index === null) return element("span", "written", text);
    const token = element("span", "written token", text);
    token.dataset.index = index;
    this.tokens.push([index, token]);
    return token;
  }

  /** The element that shows a token, or null: its text may come with a later one. */
  token(index) {
    return this.tokens.find(([last]) => last >= index)?.[1] ?? null;
  }

  /** Short facts in a line under the text: [text, class] pairs. */
  say(facts) {
    const parts = facts.map(([text, className]) => element("span", className ?? "", text));
    this.settle(() => this.facts.replaceChildren(...parts));
  }

  /** Nothing follows. */
  end() {
    this.flush();
    this.article.removeAttribute("aria-busy");
  }

  /** Say what went wrong. */
  fail(message) {
    const alert = element("p", "error", message);
    alert.setAttribute("role", "alert");
    this.settle(() => this.article.append(alert));
  }
}

/** Who writes, and the context in front of it. */
function heading(title, context) {
  if (!context) return element("h3", "", title);
  return element("h3", "", title, element("span", "", ` · ${context.name}, ${characters(context.text)}`));
}

function shortened(text) {
  if (text.length <= SHOWN) return text;
  return `${text.slice(0, SHOWN)} … ${characters(text.slice(SHOWN))} more`;
}

/** "12,345 characters" */
export function characters(text) {
  return `${text.length.toLocaleString()} characters`;
}
