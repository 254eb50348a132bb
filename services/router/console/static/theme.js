// Sets the colours that were chosen before the page is drawn, so that nothing flashes.
try {
  const chosen = localStorage.getItem("baton-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // A browser that keeps nothing follows the system.
}
