// The page's script with as much of a document as it asks for: reads texts of a JSON list, writes the elements of each.
import { readFileSync } from "node:fs";

class Element {
  constructor(tag) { Object.assign(this, {tagName: tag.toUpperCase(), className: "", children: [], dataset: {}}); }
  set textContent(words) { this.children = [words]; }
  append(...more) { this.children.push(...more); }
  replaceChildren() { this.children = []; }
  addEventListener() {}
  focus() {}
  get told() {
    const inner = this.children.map((each) => (each.told === undefined ? each.replaceAll("<", "&lt;") : each.told)).join("");
    const kind = this.tagName === "SPAN" && this.className ? ` ${this.className}` : this.href ? ` ${this.href}` : "";
    const tag = this.tagName.toLowerCase();
    return tag === "span" && this.className === "own" ? inner : `<${tag}${kind}>${inner}</${tag}>`;
  }
}

const script = readFileSync(process.argv[2], "utf8").match(/<script>(.*)<\/script>/s)[1];
globalThis.document = {
  createElement: (tag) => new Element(tag), getElementById: () => new Element("div"), addEventListener() {}, querySelector: () => new Element("main"),
};
globalThis.requestAnimationFrame = () => {};
globalThis.sessionStorage = {getItem: () => null, setItem() {}};
globalThis.fetch = async () => { throw new Error("no server"); };
const Story = new Function(script + "; return Story;")();
const told = JSON.parse(readFileSync(0, "utf8")).map((runs) => {
  const place = new Element("x"), story = new Story(place, true);
  for (const [kind, words] of runs) story.add(kind, words);
  story.draw();
  return place.children.map((each) => each.told).join("");
});
process.stdout.write(JSON.stringify(told));
