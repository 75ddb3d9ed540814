"use strict";
(() => {
  const root = document.documentElement;
  const make = (tag, text, act) => {
    const made = document.createElement(tag);
    made.textContent = text;
    if (act) made.addEventListener("click", act);
    return made;
  };
  const save = (name, blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };

  // Theme: the machine's, until somebody chooses.
  const remembered = (() => { try { return localStorage.getItem("memsweep-theme"); } catch { return null; } })();
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  if (remembered === "light" || remembered === "dark") root.dataset.theme = remembered;
  const toggle = make("button", "", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("memsweep-theme", root.dataset.theme); } catch { /* a file may not */ }
    label();
  });
  toggle.type = "button";
  const label = () => { toggle.textContent = dark() ? "Light theme" : "Dark theme"; };
  label();
  document.querySelector("header .tools").append(toggle);

  // A number leads to its evidence: open what it lies in.
  const reveal = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    target.scrollIntoView({ block: "center" });
  };
  addEventListener("hashchange", reveal);
  reveal();

  // Charts as files: their colours are the page's variables, a file needs them as they are now.
  const alone = (svg) => {
    const style = getComputedStyle(root);
    const copy = svg.cloneNode(true);
    copy.setAttribute("style", `background:${style.getPropertyValue("--paper")}`);
    return new XMLSerializer().serializeToString(copy).replace(/var\((--[a-z0-9]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
  };
  const image = (svg, name) => {
    const drawn = new Image();
    drawn.onload = () => {
      const canvas = document.createElement("canvas");
      canvas.width = 2 * drawn.width;
      canvas.height = 2 * drawn.height;
      const pen = canvas.getContext("2d");
      pen.fillStyle = getComputedStyle(root).getPropertyValue("--paper");
      pen.fillRect(0, 0, canvas.width, canvas.height);
      pen.scale(2, 2);
      pen.drawImage(drawn, 0, 0);
      canvas.toBlob((blob) => save(name, blob), "image/png");
    };
    drawn.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(alone(svg));
  };
  for (const panel of document.querySelectorAll(".panel")) {
    const svg = panel.querySelector("svg");
    if (!svg) continue;
    const name = panel.dataset.name;
    const tools = make("div", "");
    tools.className = "tools";
    const buttons = [
      make("button", "SVG", () => save(name + ".svg", new Blob([alone(svg)], { type: "image/svg+xml" }))),
      make("button", "PNG", () => image(svg, name + ".png")),
    ];
    for (const button of buttons) {
      button.type = "button";
      button.setAttribute("aria-label", `Save chart ${name} as ${button.textContent}`);
      tools.append(button, " ");
    }
    panel.append(tools);
  }

  // Tables as CSV: numbers as they are stored, text so that no spreadsheet takes it for a formula.
  const quoted = (cell) => {
    const raw = cell.dataset.v ?? cell.textContent.trim();
    const safe = cell.dataset.v === undefined && /^[=+\-@\t\r]/.test(raw) ? "'" + raw : raw;
    return /[",\r\n]/.test(safe) ? '"' + safe.replaceAll('"', '""') + '"' : safe;
  };
  const csv = (table) => [...table.rows].map((row) => [...row.cells].map(quoted).join(",")).join("\n") + "\n";
  for (const table of document.querySelectorAll("table[data-name]")) {
    const name = table.dataset.name.replace(/[^A-Za-z0-9_.-]+/g, "-");
    const button = make("button", "CSV", () => save(name + ".csv", new Blob([csv(table)], { type: "text/csv" })));
    button.type = "button";
    button.setAttribute("aria-label", `Save table ${table.caption.textContent} as CSV`);
    table.caption.append(" ", button);
  }

  // What a mark says, beside the pointer.
  const tip = document.getElementById("tip");
  document.addEventListener("pointermove", (event) => {
    const mark = event.target instanceof Element && event.target.closest(".panel svg [aria-label]");
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.getAttribute("aria-label");
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
  });

  // On paper nothing can be opened.
  addEventListener("beforeprint", () => {
    for (const one of document.querySelectorAll("details.behind, details.folded")) one.open = true;
  });
})();
