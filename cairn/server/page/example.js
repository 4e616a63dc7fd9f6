/** A document of made-up code with facts hidden in it, and the questions for them. */

const NOUNS = `account anchor archive batch beacon border bridge bucket buffer bundle cabin canvas
  channel cluster column copper corner crystal cursor delta desert digest drawer engine entry field
  filter folder forest fragment garden gateway glacier gravel handle harbor header hollow index
  island journal kernel ladder lantern ledger letter marker meadow mirror module mountain needle
  number object orchard packet parcel pebble pillar pocket portal prefix queue quarry record region
  ribbon river saddle sample schema segment shadow shelter signal socket source stable station
  stream summit surface symbol table temple ticket timber token tower track trail tunnel valley
  vector vessel village window winter worker`.split(/\s+/);
const VERBS = `accept adjust align append apply arrange attach balance borrow build cancel carry
  check clear close collect combine compare convert copy count cover create decode deliver divide
  encode enter expand extend fetch find flush follow format gather guard insert join lift list load
  lock match measure merge move open parse pick place prepare print push read record reduce release
  remove render repeat replace reset restore return scan search select send shift sort split start
  stop store sum trace trim update verify visit wait wrap write`.split(/\s+/);
const LETTERS = "abcdefghijklmnopqrstuvwxyz";
const DIGITS = "0123456789";

/** Lengths on offer, in tokens. */
export const LENGTHS = [8_000, 32_000, 100_000];

// Facts lie well before the end, so that no window reaches them.
const LAST_PLACE = 0.85;

/** Random numbers in [0, 1) of a seed (mulberry32). */
export function generator(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** Three facts {kind, lines, question, answer}: a line, a sentence, and a chain of three lines. */
function makeFacts(random) {
  const used = new Set();
  const some = (letters, count) =>
    Array.from({ length: count }, () => letters[Math.floor(random() * letters.length)]).join("");
  const key = () => {
    let name;
    do name = some(LETTERS, 4);
    while (used.has(name));
    used.add(name);
    return name;
  };
  const value = () => some(DIGITS, 5);
  const [line, lineValue, said, saidValue] = [key(), value(), key(), value()];
  const [a, b, c, end] = [key(), key(), key(), value()];
  return [
    {
      kind: "a line",
      lines: [`#key ${line}=${lineValue}`],
      question: `#ask ${line}=`,
      answer: lineValue,
    },
    {
      kind: "a sentence",
      lines: [`One of the magic numbers for ${said} is ${saidValue}.`],
      question: `What is the magic number for ${said}? It is `,
      answer: saidValue,
    },
    {
      kind: "a chain of lines",
      lines: [`#key ${a}=${b}`, `#key ${b}=${c}`, `#key ${c}=${end}`],
      question: `#run ${a}=`,
      answer: `${b}=${c}=${end}`,
    },
  ];
}

/** Lines of code of a function or class, each time different. */
function block(random) {
  const pick = (words) => words[Math.floor(random() * words.length)];
  const noun = () => pick(NOUNS);
  const verb = () => pick(VERBS);
  const number = () => Math.floor(random() * 64);
  const [a, b, c] = [noun(), noun(), noun()];
  const shapes = [
    () => [
      `def ${verb()}_${a}(${b}, ${c}=${number()}):`,
      `    """${cap(verb())} the ${a} of a ${b} and ${verb()} its ${c}."""`,
      `    ${a} = ${b}.${verb()}(${c})`,
      `    if not ${a}:`,
      `        raise ValueError("${b} has no ${noun()}")`,
      `    return ${a}`,
    ],
    () => [
      `class ${cap(a)}${cap(b)}:`,
      `    """A ${a} that can ${verb()} every ${b} in a ${c}."""`,
      "",
      `    def __init__(self, ${b}, ${c}):`,
      `        self._${b} = ${b}`,
      `        self._${c} = ${c} or ${cap(noun())}()`,
      "",
      `    def ${verb()}(self, ${noun()}=None):`,
      `        return self._${b}.${verb()}(self._${c})`,
    ],
    () => [
      `# ${cap(verb())} the ${a} before the ${b}: a ${c} may ${verb()} it while we ${verb()}.`,
      `${a.toUpperCase()}_${b.toUpperCase()} = ${number()}`,
      `${c.toUpperCase()}S = ("${noun()}", "${noun()}", "${noun()}")`,
    ],
    () => [
      `for ${a} in ${verb()}_${b}(${c}):`,
      `    if ${a}.${noun()} > ${number()}:`,
      `        ${c}.${verb()}(${a})`,
      "    else:",
      `        ${verb()}(${a}, ${noun()}=${number()})`,
    ],
    () => [
      `with ${verb()}_${a}("${b}.${c}") as ${b}:`,
      `    ${c} = [${a} for ${a} in ${b} if ${a}.${verb()}()]`,
      `    ${noun()} = sum(len(${a}) for ${a} in ${c})`,
    ],
  ];
  return [...pick(shapes)(), ""];
}

const cap = (word) => word[0].toUpperCase() + word.slice(1);

/**
 * The document of the example.
 * @param characters its length, about
 * @param random gives numbers in [0, 1)
 * @returns {text, facts: [{kind, question, answer, spans}]}; spans are character ranges in the text
 */
export function buildExample(characters, random) {
  const facts = makeFacts(random);
  const lines = [];
  for (let length = 0; length < characters; ) {
    for (const line of block(random)) {
      lines.push(line);
      length += line.length + 1;
    }
  }
  const hidden = shuffled(facts.flatMap((fact) => fact.lines), random);
  const stretch = (lines.length * LAST_PLACE) / hidden.length;
  // Spread over the document, each somewhere in its own stretch; from the back, so that the
  // places of the others stay.
  for (let i = hidden.length - 1; i >= 0; i--) {
    lines.splice(Math.floor((i + 0.1 + 0.8 * random()) * stretch), 0, hidden[i]);
  }
  const text = lines.join("\n");
  const spans = ({ lines }) => lines.map((line) => spanOf(text, line));
  return { text, facts: facts.map((fact) => ({ ...fact, spans: spans(fact) })) };
}

function spanOf(text, line) {
  const start = text.indexOf(`\n${line}\n`) + 1;
  return [start, start + line.length];
}

function shuffled(items, random) {
  for (let i = items.length - 1; i > 0; i--) {
    const j = Math.floor(random() * (i + 1));
    [items[i], items[j]] = [items[j], items[i]];
  }
  return items;
}
