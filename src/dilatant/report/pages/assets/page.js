// Starts the page: its timelines, if any, and the light/dark switch.

const { timelines: packed } = JSON.parse(document.getElementById("data").textContent);
const timelines = packed.map((one, index) => new Timeline(document.querySelectorAll(".timeline")[index], one));
for (const one of timelines) one.others = timelines.filter((other) => other !== one);
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
