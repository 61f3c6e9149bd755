/** The page: its tabs, its theme, and the views behind the tabs. */

import { getJson } from "/page/api.js";
import { Chat } from "/page/chat.js";
import { byId, say } from "/page/dom.js";
import { Fleet } from "/page/fleet.js";
import { Race } from "/page/race.js";
import { offerModels, startSettings } from "/page/settings.js";
import { Timeline } from "/page/timeline.js";

const tabs = [...document.querySelectorAll("[role=tab]")];
let views = {};
let current = null;

function select(name) {
  views[current]?.hide?.();
  current = name;
  for (const tab of tabs) {
    const chosen = tab.getAttribute("aria-controls") === name;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !chosen;
  }
  history.replaceState(null, "", `#/${name}`); // no element's id: browsers would move the focus there
  views[name].show?.();
}

/** Arrow keys go from tab to tab, as in every list of tabs. */
function moveTab(event) {
  const at = tabs.indexOf(event.target);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const tab = tabs.at(to % tabs.length);
  select(tab.getAttribute("aria-controls"));
  tab.focus();
}

const THEMES = { system: "light", light: "dark", dark: "system" };

function showTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").lastElementChild.textContent = `Theme: ${theme}`;
  byId("theme").title = `Theme: ${theme}`;
}

function nextTheme() {
  const theme = THEMES[document.documentElement.dataset.theme ?? "system"];
  localStorage.setItem("ssd.theme", theme);
  showTheme(theme);
}

async function refreshModels() {
  try {
    offerModels((await getJson("/v1/models")).data);
    views.chat.modelChanged();
  } catch (error) {
    say(byId("notice"), `The models could not be listed: ${error.message}`);
  }
}

startSettings(() => views.chat.modelChanged(), refreshModels);
views = { chat: new Chat(), race: new Race(), timeline: new Timeline(), fleet: new Fleet() };
for (const tab of tabs) {
  tab.addEventListener("click", () => select(tab.getAttribute("aria-controls")));
  tab.addEventListener("keydown", moveTab);
}
byId("theme").addEventListener("click", nextTheme);
showTheme(document.documentElement.dataset.theme ?? "system");
select(location.hash.slice(2) in views ? location.hash.slice(2) : "chat");
byId("prompt").focus();
refreshModels();
