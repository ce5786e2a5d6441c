// Starts the page: the timelines and the light/dark switch.

const data = JSON.parse(document.getElementById("data").textContent);
const timelines = [...document.querySelectorAll(".timeline")].map((root, index) => new Timeline(root, data.timelines[index]));
const repaint = () => timelines.forEach((timeline) => timeline.repaint());

const page = document.documentElement, toggle = document.querySelector(".theme");
const themes = ["auto", "light", "dark"];
function setTheme(theme) {
  page.dataset.theme = theme;
  toggle.textContent = `Theme: ${theme}`;
  repaint();
}
toggle.addEventListener("click", () => {
  const next = themes[(themes.indexOf(page.dataset.theme) + 1) % themes.length];
  try { localStorage.setItem("theme", next); } catch { /* storage may be off for local files */ }
  setTheme(next);
});
let stored = null;
try { stored = localStorage.getItem("theme"); } catch { /* as above */ }
setTheme(themes.includes(stored) ? stored : "auto");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
// A canvas is a picture of its size on the screen: before printing it is drawn again for the width of the paper.
addEventListener("beforeprint", () => {
  Object.assign(page.dataset, { printing: "yes", before: page.dataset.theme, theme: "light" });
  repaint();
});
addEventListener("afterprint", () => {
  Object.assign(page.dataset, { printing: "no", theme: page.dataset.before });
  repaint();
});
