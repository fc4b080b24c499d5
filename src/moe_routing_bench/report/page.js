"use strict";
// Filters, sorts and opens rows, follows links to cases, and shows hover texts from the JSON of the page.
// It sets text only as text, never as HTML.
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

  const press = (part, act) => part.addEventListener("keydown", (event) => {
    if (event.target !== part || (event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    act();
  });
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
    press(head, sort);
  }

  for (const row of document.querySelectorAll("tr[data-row]")) {
    row.tabIndex = 0;
    row.setAttribute("aria-expanded", "false");
    const toggle = () => {
      const next = row.nextElementSibling, open = next && next.classList.contains("more");
      row.setAttribute("aria-expanded", String(!open));
      if (open) return next.remove();
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
    press(row, toggle);
  }

  const tip = document.getElementById("tip");
  for (const [id, text] of Object.entries(data.hovers)) {
    const part = document.getElementById(id), link = part && part.closest("a");
    if (!part) continue;
    const show = (x, y) => {
      tip.textContent = text;
      tip.hidden = false;
      tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 8))}px`;
      tip.style.top = `${Math.min(y + 14, innerHeight - tip.offsetHeight - 8)}px`;
    };
    const hide = () => (tip.hidden = true);
    part.addEventListener("mousemove", (event) => show(event.clientX, event.clientY));
    part.addEventListener("mouseleave", hide);
    if (!link) continue;
    link.setAttribute("aria-label", text);
    link.addEventListener("blur", hide);
    link.addEventListener("focus", () => {
      const box = part.getBoundingClientRect();
      show(box.left, box.bottom);
    });
  }

  const arrive = () => {
    const cell = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (!cell || cell.tagName !== "DETAILS") return;
    cell.hidden = false;
    cell.open = true;
    cell.scrollIntoView();
  };
  addEventListener("hashchange", arrive);
  arrive();

  addEventListener("beforeprint", () => {
    document.getElementById("evidence").open = true;
    const cells = document.querySelectorAll(".cell:not([hidden])");
    if (cells.length <= 300) cells.forEach((cell) => (cell.open = true));
  });
})();
