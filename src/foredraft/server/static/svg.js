// Makes SVG elements; text goes in as text.

const SPACE = "http://www.w3.org/2000/svg";

export function svg(name, attributes = {}, ...content) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...content);
  return made;
}
