// The overview: outcomes, findings, and the table of all files.

const overviewTables = [];
const chosen = { search: "", outcome: "", code: "" };
const isChosen = (row) =>
  (!chosen.outcome || row.outcome === chosen.outcome) &&
  (!chosen.code || row.codes.some((code) => code.startsWith(`${chosen.code} `))) &&
  (!chosen.search || chosen.search.split(/\s+/).every((word) => row.searched.includes(word)));

function tally(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) || 0) + 1);
  return counts;
}

function leadText() {
  const sum = (field) => rows.reduce((total, row) => total + (row[field] || 0), 0);
  return [
    isDry ? "dry run, nothing was written" : "",
    counted(rows.length, "file"),
    sum("size") ? bytes(sum("size")) : "",
    sum("numel") ? `${quantity(sum("numel"))} parameters and buffers` : "",
    sum("seconds") >= 1 ? `${duration(sum("seconds"))} of processing time` : "",
  ].filter(Boolean).join(" · ");
}

const rounded = (share) => (share < 0.005 ? "< 1 %" : share > 0.995 && share < 1 ? "> 99 %" : `${Math.round(share * 100)} %`);

function showOutcomes(filter) {
  const counts = [...tally(rows.map((row) => row.outcome))].sort(([a], [b]) => rank(a) - rank(b));
  const bar = document.getElementById("outcome-bar");
  bar.setAttribute("aria-label", counts.map(([outcome, count]) => `${count} ${outcome}`).join(", "));
  for (const [outcome, count] of counts) {
    const segment = el("span", { className: tone(outcome), title: `${whole(count)} ${shown(outcome)}` });
    segment.style.flexGrow = count;
    bar.append(segment);
  }
  const chips = document.getElementById("outcome-chips");
  for (const [outcome, count] of counts) {
    const meaning = (OUTCOMES[rank(outcome)] || [])[2];
    const chip = el("button", { type: "button", "aria-pressed": "false", title: meaning, className: tone(outcome) },
      el("strong", {}, whole(count)), " ", shown(outcome), el("span", { className: "faint" }, ` ${rounded(count / rows.length)}`));
    chip.dataset.outcome = outcome;
    chip.addEventListener("click", () => filter({ outcome: chosen.outcome === outcome ? "" : outcome }));
    chips.append(el("li", {}, chip));
    document.getElementById("by-outcome").append(el("option", { value: outcome }, `${shown(outcome)} (${whole(count)})`));
  }
}

function showCodes(filter) {
  const counts = [...tally(rows.flatMap((row) => row.codes))].sort((a, b) => byLevel(codeOf(a[0]), codeOf(b[0])) || b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
  const most = Math.max(...counts.map(([, count]) => count));
  document.getElementById("codes-section").hidden = counts.length === 0;
  const list = document.getElementById("codes");
  const FIRST = 8;
  counts.forEach(([label, count], index) => {
    const code = codeOf(label);
    const button = el("button", { type: "button", "aria-pressed": "false", title: levelOf(code) },
      el("span", { className: `code level ${levelOf(code)}` }, shown(code)), el("span", {}, shown(label.slice(code.length + 1))),
      el("span", { className: "meter", "aria-hidden": true }, gauge(count / most, "mark")),
      el("span", { className: "number" }, counted(count, "file")));
    button.dataset.code = code;
    button.addEventListener("click", () => filter({ code: chosen.code === code ? "" : code }));
    list.append(el("li", { hidden: index >= FIRST }, button));
  });
  if (counts.length > FIRST) {
    const more = el("button", { type: "button", className: "quiet" }, `Show all ${counts.length}`);
    more.addEventListener("click", () => {
      for (const item of list.children) item.hidden = false;
      more.parentElement.remove();
    });
    list.append(el("li", {}, more));
  }
  for (const [label] of [...counts].sort()) {
    document.getElementById("by-code").append(el("option", { value: label.split(" ", 1)[0] }, shown(label)));
  }
}

/** A link to the page of a file, with its folder in a fainter colour. */
function fileLink(row) {
  const base = row.name.lastIndexOf("/", row.name.length - 2) + 1;
  return el("a", { href: addressOf(row) }, name(row.name.slice(0, base), { className: "name faint" }), name(row.name.slice(base)));
}

function whatWasFound(row) {
  if (row.error) return el("span", { className: "clamped faint", title: shown(row.error) }, shown(row.error));
  return el("span", { className: "tags" }, [...row.codes].sort((a, b) => byLevel(codeOf(a), codeOf(b))).map((code) => el("span", { className: `code ${levelOf(codeOf(code))}`, title: shown(code) }, shown(codeOf(code)))));
}

function filesTable(box) {
  const narrow = box.clientWidth < 500;
  const some = (field) => rows.some((row) => row[field] !== null && row[field] !== 0);
  const number = (title, field, text, width, responsive) => ({
    title, ...byNumber(field), visible: some(field), width, responsive,
    formatter: textCell((row, value) => (value === null ? "" : text(value))), sorterParams: { alignEmptyValues: "bottom" },
  });
  return withKeyboard(new Tabulator(box, {
    data: rows,
    index: "id",
    layout: "fitColumns",
    responsiveLayout: "hide",
    pagination: true,
    paginationSize: 50,
    paginationSizeSelector: [25, 50, 100, 500],
    paginationElement: document.getElementById("pages"),
    locale: "en",
    langs: { en: { pagination: { page_size: "Files per page" } } },
    columnDefaults: { headerSortTristate: false },
    placeholder: "No files match these filters.",
    initialSort: [{ column: "name", dir: "asc" }, { column: "outcome", dir: "asc" }],
    columns: [
      { title: "File", field: "name", minWidth: narrow ? 170 : 300, widthGrow: 3, responsive: 0, sorter: "string", formatter: textCell(fileLink) },
      { title: "Outcome", field: "outcome", width: 146, responsive: 0, sorter: (a, b) => rank(a) - rank(b), formatter: textCell((row) => badge(row.outcome)) },
      { title: "Findings", field: "codes", minWidth: 180, widthGrow: 2, responsive: 1, sorter: (a, b) => a.length - b.length, formatter: textCell(whatWasFound) },
      { title: "Format", field: "format", visible: some("format"), width: 96, responsive: 7, formatter: textCell((row) => row.format) },
      number("Elements", "numel", quantity, 92, 5),
      number("Size", "size", bytes, 84, 2),
      number("Coverage", "share", percent, 96, 3),
      { title: "Forward test", field: "smoke", visible: some("smoke"), width: 126, responsive: 4, formatter: textCell((row) => row.smoke) },
      number("Time", "seconds", duration, 74, 6),
    ],
  }));
}

function showPairs(section, list, pairs) {
  document.getElementById(section).hidden = pairs.length === 0;
  document.getElementById(list).append(...facts(pairs));
}

/** The recommended commands that cost no weights, to copy together. */
function showDecisions() {
  const commands = Object.values(run.commands);
  document.getElementById("decisions-section").hidden = commands.length === 0;
  if (commands.length) document.getElementById("decisions").append(commandBox(...commands));
}

function showRenames() {
  const renames = Object.entries(run.renames).map(([old, to], id) => ({ id, old, to }));
  document.getElementById("renames-section").hidden = renames.length === 0;
  if (!renames.length) return;
  const column = (title, field) => ({ title, field, formatter: textCell((row, value) => name(value)) });
  const table = withKeyboard(new Tabulator("#renames", { data: renames, layout: "fitColumns", maxHeight: 420, columns: [column("Old name", "old"), column("New name", "to")] }));
  overviewTables.push([document.getElementById("renames"), () => table]);
}

/** Fills the overview and returns its table. */
function showOverview() {
  const search = document.getElementById("search");
  const byOutcome = document.getElementById("by-outcome");
  const byCode = document.getElementById("by-code");
  const clear = document.getElementById("clear");
  const table = filesTable(document.getElementById("files"));
  const count = () => {
    const shownRows = rows.filter(isChosen).length;
    document.getElementById("count").textContent = shownRows === rows.length ? counted(rows.length, "file") : `${whole(shownRows)} of ${counted(rows.length, "file")}`;
  };
  const filter = (change) => {
    Object.assign(chosen, change);
    byOutcome.value = chosen.outcome;
    byCode.value = chosen.code;
    if (!chosen.search) search.value = "";
    clear.disabled = !(chosen.search || chosen.outcome || chosen.code);
    for (const button of document.querySelectorAll("[data-outcome]")) button.setAttribute("aria-pressed", String(button.dataset.outcome === chosen.outcome));
    for (const button of document.querySelectorAll("[data-code]")) button.setAttribute("aria-pressed", String(button.dataset.code === chosen.code));
    if (clear.disabled) table.clearFilter();
    else table.setFilter(isChosen);
    count();
  };
  showOutcomes(filter);
  showCodes(filter);
  showRenames();
  showDecisions();
  search.addEventListener("input", () => filter({ search: search.value.trim().toLowerCase() }));
  byOutcome.addEventListener("change", () => filter({ outcome: byOutcome.value }));
  byCode.addEventListener("change", () => filter({ code: byCode.value }));
  clear.addEventListener("click", () => filter({ search: "", outcome: "", code: "" }));
  table.on("rowClick", (event, row) => {
    if (!event.target.closest("a") && String(getSelection()) === "") location.hash = addressOf(row.getData());
  });
  count();
  return table;
}
