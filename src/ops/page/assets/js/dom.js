// A small virtual DOM: elements are described as values, and the document is updated with the fewest changes, so that
// focus, input and scroll position stay. Text is always text: there is no way to write markup, and hidden characters
// are escaped.

import { printable } from "./printable.js";

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "rect", "line", "circle", "g", "title"]);
const PROPERTIES = new Set(["value", "checked", "disabled", "open", "selected", "indeterminate", "hidden", "max"]);

/** Describes an element. `key` tells siblings apart; `mount(node)` leaves its content to other code (a chart). */
export function h(tag, props, ...children) {
  const { key, ...rest } = props ?? {};
  return { tag, key, props: rest, children: flat(children) };
}

function flat(children) {
  const all = [];
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === true) continue;
    all.push(typeof child === "object" ? child : { tag: "#text", text: printable(String(child)), props: {}, children: [] });
  }
  return all;
}

/** Updates the children of `parent` to what `wanted` describes. */
export function patch(parent, ...wanted) {
  reconcile(parent, flat(wanted), parent instanceof SVGElement);
}

function reconcile(parent, wanted, svg) {
  const known = new Map();
  for (const node of parent.childNodes) if (node.sluice) known.set(node.sluice.id, node);
  const counted = new Map();
  const nodes = wanted.map((vnode) => {
    const id = identity(vnode, counted);
    const node = known.get(id) ?? create(vnode, svg);
    known.delete(id);
    return { id, node, vnode };
  });
  // Removals come first: then the remaining nodes mostly keep their place and their focus.
  for (const node of known.values()) remove(node);
  let place = parent.firstChild;
  for (const { id, node, vnode } of nodes) {
    if (node === place) place = place.nextSibling;
    else parent.insertBefore(node, place);
    update(node, vnode, id);
  }
}

function identity(vnode, counted) {
  if (vnode.key !== undefined) return `${vnode.tag}:${vnode.key}`;
  const nth = (counted.get(vnode.tag) ?? 0) + 1;
  counted.set(vnode.tag, nth);
  return `${vnode.tag}#${nth}`;
}

function create(vnode, svg) {
  if (vnode.tag === "#text") return document.createTextNode(vnode.text);
  if (svg || SVG_TAGS.has(vnode.tag)) return document.createElementNS(SVG, vnode.tag);
  return document.createElement(vnode.tag);
}

function update(node, vnode, id) {
  const before = node.sluice;
  node.sluice = { id, vnode, handlers: before?.handlers ?? {}, island: before?.island };
  if (vnode.tag === "#text") {
    if (node.nodeValue !== vnode.text) node.nodeValue = vnode.text;
    return;
  }
  const old = before?.vnode.props ?? {};
  // The options of a select before its value.
  const late = vnode.tag === "select" || vnode.tag === "progress";
  if (late) reconcile(node, vnode.children, false);
  for (const name of Object.keys(old)) if (!(name in vnode.props)) set(node, name, undefined, old[name]);
  for (const [name, value] of Object.entries(vnode.props)) set(node, name, value, old[name]);
  if (vnode.props.mount) {
    if (!before) node.sluice.island = vnode.props.mount(node);
    node.sluice.island?.update?.(vnode.props.data);
  } else if (!late) {
    reconcile(node, vnode.children, node instanceof SVGElement);
  }
}

function set(node, name, value, old) {
  if (name === "mount" || name === "data") return;
  if (name.startsWith("on")) return listen(node, name.slice(2), value);
  if (name === "style") return restyle(node, value ?? {}, old ?? {});
  // Compared with the last described value, not with the element's: text that a user typed stays.
  if (value === old) return;
  if (PROPERTIES.has(name) && !(node instanceof SVGElement)) node[name] = value ?? (name === "value" ? "" : false);
  else if (value === undefined || value === null || value === false) node.removeAttribute(name);
  else node.setAttribute(name, value === true ? "" : printable(String(value)));
}

function listen(node, type, handler) {
  const { handlers } = node.sluice;
  if (!(type in handlers)) node.addEventListener(type, (event) => node.sluice.handlers[type]?.(event));
  handlers[type] = handler;
}

function restyle(node, wanted, old) {
  for (const name of Object.keys(old)) if (!(name in wanted)) node.style.removeProperty(name);
  for (const [name, value] of Object.entries(wanted)) {
    if (old[name] !== value) node.style.setProperty(name, String(value));
  }
}

function remove(node) {
  bury(node);
  node.remove();
}

function bury(node) {
  node.sluice?.island?.destroy?.();
  for (const child of node.childNodes) bury(child);
}
