// Runs before the first paint, so that a chosen theme does not flash. Everything else is a module.
"use strict";
try {
  const theme = localStorage.getItem("theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is forbidden: the system's preference counts.
}
