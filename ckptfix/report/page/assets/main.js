// Shows the overview or the page of a file, depending on the fragment of the URL.

const overview = document.getElementById("overview");
const filePage = document.getElementById("file");
const closers = { opened: [], closed: [], printed: [] };
let filesGrid = null;

function around(row) {
  if (rows.length === 1) return null;
  const order = filesGrid ? filesGrid.getRows("active").map((each) => each.getData()) : rows;
  const place = order.findIndex((each) => each.id === row.id);
  return place === -1 ? [null, null] : [order[place - 1] || null, order[place + 1] || null];
}

function route() {
  const row = rows.length === 1 ? rows[0] : rowAt(location.hash);
  closers.closed.splice(0).forEach((close) => close());
  closers.printed.length = 0;
  filePage.replaceChildren();
  overview.hidden = row !== null;
  filePage.hidden = row === null;
  document.title = row === null ? run.title : `${shown(row.name)} | ${run.title}`;
  if (row !== null) {
    const title = showFile(filePage, row, around(row), closers);
    scrollTo(0, 0);
    if (rows.length > 1) title.focus({ preventScroll: true });
    return;
  }
  // A table that is built while it is hidden has no width.
  if (filesGrid === null) filesGrid = showOverview();
}

/** The maximum number of rows of a table that are printed. */
const PRINTED = 500;

/** A table as a plain HTML one, since a paged or scrolled table is printed only in part. */
function printable(table) {
  const columns = table.getColumns().filter((column) => column.isVisible());
  const all = table.getRows("active");
  const body = all.slice(0, PRINTED).map((row) => el("tr", {}, columns.map((column) => {
    const data = row.getData();
    const make = column.getDefinition().formatter;
    return el("td", {}, make({ getRow: () => row, getValue: () => data[column.getField()] }));
  })));
  return el("table", { className: "on-paper" }, el("thead", {}, el("tr", {}, columns.map((column) => el("th", {}, column.getDefinition().title)))), el("tbody", {}, body),
    all.length > PRINTED ? el("caption", {}, `The first ${whole(PRINTED)} of ${counted(all.length, "row")}; the page on screen shows all.`) : null);
}

addEventListener("beforeprint", () => {
  document.documentElement.classList.add("printing");
  dispatchEvent(new Event("ckptfix-colours"));
  const tables = filePage.hidden ? [[document.getElementById("files"), () => filesGrid], ...overviewTables] : closers.printed;
  for (const item of document.querySelectorAll("#codes > [hidden]")) item.dataset.unprinted = "";
  for (const item of document.querySelectorAll("#codes > [hidden]")) item.hidden = false;
  for (const [box, table] of tables) box.after(printable(table()));
});
addEventListener("afterprint", () => {
  document.documentElement.classList.remove("printing");
  dispatchEvent(new Event("ckptfix-colours"));
  for (const copy of document.querySelectorAll(".on-paper")) copy.remove();
  for (const item of document.querySelectorAll("#codes > [data-unprinted]")) {
    item.hidden = true;
    delete item.dataset.unprinted;
  }
});

// Fragments are addresses of files here, so the skip link moves the focus itself.
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  (filePage.hidden ? overview : filePage).focus();
});
document.getElementById("lead").textContent = leadText();
showPairs("run-section", "run-facts", run.facts);
addEventListener("hashchange", route);
route();
