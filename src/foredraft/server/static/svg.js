// Creates SVG elements. Strings in the content become text nodes, never markup.

const NAMESPACE = "http://www.w3.org/2000/svg";

export function svg(name, attributes = {}, ...content) {
  const element = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...content);
  return element;
}
