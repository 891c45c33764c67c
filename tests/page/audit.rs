//! Accessibility checks in the document itself: for screen readers, weak eyesight and use by keyboard alone.

/// Returns the violations, as a list of sentences.
pub const STRUCTURE: &str = r#"
const wrong = [];
const name = (node) => (node.getAttribute("aria-label") || node.innerText || node.title || "").trim();
const shown = (node) => node.checkVisibility();
if (document.querySelectorAll("main").length !== 1) wrong.push("not one main");
if (document.querySelectorAll("h1").length !== 1) wrong.push("not one h1");
if (!document.querySelector("header nav[aria-label]")) wrong.push("no named navigation");
if (document.documentElement.lang !== "en") wrong.push("no language");
for (const node of document.querySelectorAll("a, button, summary")) if (shown(node) && !name(node)) wrong.push(`no name: ${node.outerHTML}`);
for (const node of document.querySelectorAll("input, select")) {
  if (!node.labels?.length && !node.getAttribute("aria-label")) wrong.push(`no label: ${node.outerHTML}`);
}
for (const node of document.querySelectorAll("table")) if (!node.caption?.textContent) wrong.push("a table without a caption");
for (const node of document.querySelectorAll("th")) if (node.scope !== "col") wrong.push("a heading without a scope");
for (const node of document.querySelectorAll("canvas")) {
  if (!node.closest("[role=img][aria-label]")?.getAttribute("aria-label")) wrong.push("a chart without words");
}
for (const node of document.querySelectorAll("[role=meter]")) if (!node.getAttribute("aria-valuetext")) wrong.push("a bar without words");
const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
if (new Set(ids).size !== ids.length) wrong.push("an id twice");
let level = 1;
for (const node of document.querySelectorAll("h1, h2, h3")) {
  const now = Number(node.tagName[1]);
  if (now > level + 1) wrong.push(`heading ${node.innerText} skips a level`);
  level = now;
}
return wrong;
"#;

/// Returns every text whose contrast to its background is below WCAG level AA
/// (<https://www.w3.org/TR/WCAG22/#contrast-minimum>).
pub const CONTRAST: &str = r#"
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const parts = (colour) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
};
const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
const behind = (node) => {
  const layers = [];
  for (let at = node; at; at = at.parentElement) layers.push(parts(getComputedStyle(at).backgroundColor));
  return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
};
const luminance = ([r, g, b]) => {
  const [x, y, z] = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const wrong = new Set();
let looked = 0;
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const node = walk.currentNode.parentElement;
  if (!walk.currentNode.nodeValue.trim() || !node.checkVisibility() || node.closest(".unseen, :disabled, noscript, .skip")) continue;
  looked += 1;
  const style = getComputedStyle(node);
  const below = behind(node);
  const [a, b] = [luminance(over(parts(style.color), below)), luminance(below)];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && Number(style.fontWeight) >= 700);
  if (ratio < (large ? 3 : 4.5)) wrong.add(`${ratio.toFixed(2)} ${node.className || node.tagName}: ${node.innerText.slice(0, 40)}`);
}
if (looked < 10) wrong.add(`only ${looked} texts`);
return [...wrong];
"#;
