// The chosen theme, set before the first paint so that it does not flash. All other scripts are modules.
"use strict";
try {
  const theme = localStorage.getItem("theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is forbidden: the system's preference counts.
}
