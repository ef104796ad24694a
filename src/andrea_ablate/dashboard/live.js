"use strict";
// Asks every few seconds whether the page's version is still the newest, and loads it anew without losing what was chosen.
const version = document.querySelector("meta[name=version]").content;
const buttons = () => [...document.querySelectorAll("button[aria-pressed]")];
const selects = () => [...document.querySelectorAll("select")];
const key = `chosen ${location.pathname}`;

function keep() {
  sessionStorage.setItem(key, JSON.stringify({
    selects: selects().map(select => select.value),
    off: buttons().filter(button => button.getAttribute("aria-pressed") === "false").map(button => button.textContent),
    top: scrollY,
  }));
}
function restore() {
  const kept = JSON.parse(sessionStorage.getItem(key));
  if (!kept) return;
  kept.selects.forEach((value, i) => {
    const select = selects()[i];  // choosing a quantity may change the ranges behind it
    if (select && select.value !== value && [...select.options].some(option => option.value === value)) {
      select.value = value;
      select.dispatchEvent(new Event("change"));
    }
  });
  for (const button of buttons())
    if ((button.getAttribute("aria-pressed") === "false") !== kept.off.includes(button.textContent)) button.click();
  scrollTo(0, kept.top);
}
restore();
setInterval(async () => {
  try {
    const answer = await fetch(location.href, { method: "HEAD", cache: "no-store" });
    if (answer.ok && answer.headers.get("etag") !== `"${version}"`) { keep(); location.reload(); }
  } catch { }  // the dashboard was stopped: the page stays as it is
}, 3000);
