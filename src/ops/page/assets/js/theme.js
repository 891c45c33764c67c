// The theme: light, dark or the system's. Also the current colours of the style sheet, for canvases.

const DARK = matchMedia("(prefers-color-scheme: dark)");
const NEXT = { auto: "light", light: "dark", dark: "auto" };

export const theme = () => document.documentElement.dataset.theme ?? "auto";

export function cycle() {
  const next = NEXT[theme()];
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    if (next === "auto") localStorage.removeItem("theme");
    else localStorage.setItem("theme", next);
  } catch {
    // Storage is forbidden: the choice lasts as long as the page.
  }
  changed();
}

const changed = () => document.dispatchEvent(new Event("themechange"));
DARK.addEventListener("change", changed);

const probe = document.createElement("span");
probe.hidden = true;

/** The current colour of a custom property. */
export function colour(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.setProperty("color", `var(${name})`);
  return getComputedStyle(probe).color;
}
