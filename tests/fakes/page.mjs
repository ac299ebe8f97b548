// The page's script with as much of a document as it asks for: reads texts of a JSON list, writes the elements of each; or, called
// with "talk", has a talk with a server that is gone, is back, and breaks off, and writes what is shown and was asked.
import { readFileSync } from "node:fs";

class Element {
  constructor(tag) { Object.assign(this, {tagName: tag.toUpperCase(), className: "", children: [], dataset: {}, value: "", acts: {}}); }
  set textContent(words) { this.children = [words]; }
  get textContent() { return this.children.map((each) => each.textContent ?? each).join(""); }
  append(...more) { for (const each of more) if (each instanceof Element) each.parent = this; this.children.push(...more); }
  replaceChildren() { this.children = []; }
  addEventListener(kind, act) { this.acts[kind] = act; }
  remove() { this.parent.children.splice(this.parent.children.indexOf(this), 1); }
  focus() {}
  before(other) { other.parent = this.parent; this.parent.children.splice(this.parent.children.indexOf(this), 0, other); }
  of(kind) {
    const inner = this.children.filter((each) => each instanceof Element);
    return inner.flatMap((each) => [...(each.className.split(" ").includes(kind) ? [each] : []), ...each.of(kind)]);
  }
  get told() {
    const inner = this.children.map((each) => (each.told === undefined ? each.replaceAll("<", "&lt;") : each.told)).join("");
    const kind = this.tagName === "SPAN" && this.className ? ` ${this.className}` : this.href ? ` ${this.href}` : "";
    const tag = this.tagName.toLowerCase();
    return tag === "span" && this.className === "own" ? inner : `<${tag}${kind}>${inner}</${tag}>`;
  }
}

const script = readFileSync(process.argv[2], "utf8").match(/<script>(.*)<\/script>/s)[1];
const places = {}, place = (id) => places[id] ??= new Element("div");
globalThis.document = {
  createElement: (tag) => new Element(tag), getElementById: place, addEventListener() {}, querySelector: () => new Element("main"),
  querySelectorAll: (kind) => place("chat").of(kind.slice(1)),
};
globalThis.location = {origin: "http://here"};
let copied = null;
Object.defineProperty(globalThis, "navigator", {value: {clipboard: {writeText: async (words) => { copied = words; }}}, configurable: true});
globalThis.requestAnimationFrame = () => {};
globalThis.sessionStorage = {getItem: () => null, setItem() {}};
globalThis.fetch = async () => { throw new TypeError("Failed to fetch"); };
const {StyledText, sendMessage, selectModel} = new Function(script + "; return {StyledText, sendMessage, selectModel};")();
if (process.argv[3] === "talk") {
  await new Promise((done) => setTimeout(done));
  const shown = [place("status").textContent], asked = [], event = (value) => `data: ${JSON.stringify(value)}\n\n`;
  const chunk = (content, finish_reason) => event({choices: [{delta: {content}, finish_reason}]});
  let stream = null;
  globalThis.fetch = async (path, options) => {
    if (path === "v1/models") return Response.json({data: [{id: "m", specdec: {is_loaded: true, can_chat: true}}]});
    asked.push(JSON.parse(options.body).messages.map((one) => one.content));
    if (stream === null) throw new TypeError("Failed to fetch");
    return new Response(stream);
  };
  const say = async (words) => { place("message").value = words; await sendMessage(); };
  const again = async () => {
    place("chat").of("retry")[0].acts.click();
    while (place("status").textContent !== "Done.") await new Promise((done) => setTimeout(done, 1));
  };
  const words = (kind) => place("chat").of(kind).map((each) => each.textContent);
  const errors = () => words("error"), buttons = () => words("quiet");
  await say("one");
  shown.push(errors(), buttons());
  stream = chunk("first", null) + chunk("!", "stop");
  await again();
  shown.push(errors(), buttons());
  stream = chunk("sec", null);
  await say("two");
  shown.push(errors(), buttons());
  stream = event({error: {message: "the server is shutting down", code: "shutting_down"}});
  await say("three");
  shown.push(errors().slice(1));
  stream = chunk("third", "stop");
  await again();
  await place("chat").of("copy").at(-1).acts.click();
  const piece = (delta, runs) => event({choices: [{delta}], specdec: {runs}});
  stream = piece({reasoning_content: "Hm "}, [["own", "<think>Hm "]]) + piece({reasoning_content: "<b>"}, [["guessed", "<b>"]]) +
    piece({content: "Yes"}, [["guessed", "</think>"], ["own", "Yes"]]) + piece({content: "."}, [["guessed", "."]]) + chunk("", "stop") +
    event({choices: [], usage: {completion_tokens_details: {reasoning_tokens: 212}}});
  await say("four");
  const turn = place("chat").of("turn").at(-1), thought = turn.of("thought")[0];
  const thoughts = {shown: thought.children.map((each) => each.textContent), place: turn.children.map((each) => each.tagName)};
  globalThis.fetch = async (path, options) => { asked.push(JSON.parse(options.body).messages.slice(-2)); throw new TypeError("gone"); };
  await say("five");
  const switched = [];
  for (const [can_switch_thinking, value] of [[true, ""], [true, "on"], [true, "off"], [false, "off"]]) {
    selectModel({id: "m", specdec: {is_loaded: true, can_chat: true, can_switch_thinking}});
    place("thinking").value = value;
    globalThis.fetch = async (path, options) => { switched.push(JSON.parse(options.body).chat_template_kwargs ?? null); throw new TypeError("gone"); };
    await say("six");
    switched.push(place("thinking-label").hidden);
  }
  process.stdout.write(JSON.stringify({shown, asked, copied, thoughts, switched}));
  process.exit();
}
const told = JSON.parse(readFileSync(0, "utf8")).map((runs) => {
  const place = new Element("x"), story = new StyledText(place, true);
  for (const [kind, words] of runs) story.add(kind, words);
  story.draw();
  return place.children.map((each) => each.told).join("");
});
process.stdout.write(JSON.stringify(told));
