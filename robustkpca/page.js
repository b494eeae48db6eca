"use strict";
// Click a head: largest first, smallest first, then the order of the page again.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], order = [...body.rows], heads = [...table.tHead.rows[0].cells];
  const key = row => column => {
    const text = row.cells[column].textContent.trim().replace(/[\u2212\u2013]/g, "-");
    const number = parseFloat(text);
    return column && !Number.isNaN(number) ? number : column ? -Infinity : text;
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const next = {none: "descending", descending: "ascending", ascending: "none"}[head.ariaSort || "none"];
      heads.forEach(other => { other.ariaSort = "none"; });
      head.ariaSort = next;
      const sign = next === "descending" ? -1 : 1;
      const rows = next === "none" ? order : [...order].sort((a, b) => {
        const [x, y] = [key(a)(column), key(b)(column)];
        return x === y ? 0 : sign * (x < y ? -1 : 1);
      });
      body.append(...rows);
    });
  });
}
