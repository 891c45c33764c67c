// Light, dark, or what the system prefers; and what a colour of the style sheet is now, for canvases.

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
    // Then it lasts as long as the page.
  }
  changed();
}

const changed = () => document.dispatchEvent(new Event("themechange"));
DARK.addEventListener("change", changed);

const probe = document.createElement("span");
probe.hidden = true;

/** The colour that a custom property has now. */
export function colour(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.setProperty("color", `var(${name})`);
  return getComputedStyle(probe).color;
}
