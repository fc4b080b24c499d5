"use strict";
// filter, sort, open rows, hover: over the tables of the page and the JSON block below them. Text is only ever
// set as text.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;

  const theme = document.getElementById("theme");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  for (const box of document.querySelectorAll(".filter")) {
    box.hidden = false;
    const cells = [...box.parentElement.querySelectorAll(".cell")];
    const count = box.querySelector(".count");
    const show = () => {
      const words = box.querySelector("input").value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const cell of cells) {
        cell.hidden = !words.every((word) => cell.dataset.words.includes(word));
        shown += !cell.hidden;
      }
      count.textContent = `${shown} of ${cells.length} cells`;
    };
    box.querySelector("input").addEventListener("input", show);
    show();
    if (cells.length <= 12) cells.forEach((cell) => (cell.open = true));
  }

  const close = (table) => table.querySelectorAll("tr.more").forEach((row) => row.remove());
  const number = (text) => {
    const found = text.replace(/,/g, "").match(/^[-+]?\d+(\.\d+)?(e[-+]?\d+)?/i);
    return found ? parseFloat(found[0]) : NaN;
  };
  for (const head of document.querySelectorAll("thead th")) {
    head.classList.add("sortable");
    head.tabIndex = 0;
    const sort = () => {
      const table = head.closest("table"), body = table.tBodies[0], place = head.cellIndex;
      const down = head.getAttribute("aria-sort") === "ascending";
      close(table);
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].sort((one, other) => {
        const [a, b] = [one, other].map((row) => row.cells[place].textContent);
        const [x, y] = [number(a), number(b)];
        if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1;  // empty ones last
        const order = isNaN(x) ? a.localeCompare(b) : x - y;
        return down ? -order : order;
      });
      body.append(...rows);
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  }

  for (const row of document.querySelectorAll("tr[data-row]")) {
    row.tabIndex = 0;
    const toggle = () => {
      const next = row.nextElementSibling;
      if (next && next.classList.contains("more")) return next.remove();
      const more = document.createElement("tr"), cell = document.createElement("td");
      const lines = data.rows[Number(row.dataset.row)];
      more.className = "more";
      cell.colSpan = row.cells.length;
      cell.textContent = lines.slice(0, -1).join("\n") + "\n";
      const command = document.createElement("code");
      command.textContent = lines[lines.length - 1];
      cell.append(command);
      more.append(cell);
      row.after(more);
    };
    row.addEventListener("click", toggle);
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") toggle(); });
  }

  const tip = document.getElementById("tip");
  for (const [id, text] of Object.entries(data.hovers)) {
    const part = document.getElementById(id);
    if (!part) continue;
    part.addEventListener("mousemove", (event) => {
      tip.textContent = text;
      tip.hidden = false;
      const left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8);
      tip.style.left = `${Math.max(4, left)}px`;
      tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
    });
    part.addEventListener("mouseleave", () => (tip.hidden = true));
  }

  addEventListener("beforeprint", () => {
    const cells = document.querySelectorAll(".cell:not([hidden])");
    if (cells.length <= 300) cells.forEach((cell) => (cell.open = true));
  });
})();
