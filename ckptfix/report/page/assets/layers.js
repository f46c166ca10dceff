// The section of a file's weights: the chart, and the table with the same figures.

const byNumber = (field) => ({ field, sorter: "number", hozAlign: "right", headerHozAlign: "right" });
const textCell = (make) => (cell) => {
  const made = make(cell.getRow().getData(), cell.getValue());
  return made instanceof Node ? made : document.createTextNode(made === null || made === undefined ? "" : shown(made));
};

/** Makes the headers of a table usable from the keyboard. */
function withKeyboard(table) {
  table.on("tableBuilt", () => {
    // A focusable element inside a grid needs a role that grids allow, such as rowgroup.
    table.element.removeAttribute("aria-owns");
    table.element.querySelector(".tabulator-tableholder").setAttribute("role", "rowgroup");
    table.element.querySelector(".tabulator-tableholder > .tabulator-table").setAttribute("role", "presentation");
    for (const column of table.getColumns()) {
      const header = column.getElement();
      if (!header.classList.contains("tabulator-sortable")) continue;
      header.tabIndex = 0;
      header.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        const [now] = table.getSorters();
        table.setSort(column.getField(), now && now.field === column.getField() && now.dir === "asc" ? "desc" : "asc");
      });
    }
  });
  return table;
}

function layersTable(box, layers) {
  const some = (field) => layers.some((layer) => (Array.isArray(layer[field]) ? layer[field].length : layer[field]));
  const columns = [
    { title: "Layer", field: "key", minWidth: 150, widthGrow: 4, sorter: (a, b, one, other) => one.getData().index - other.getData().index, formatter: textCell((layer) => name(layer.key)), responsive: 0 },
    { title: "Flagged", field: "flagged", visible: some("flagged"), minWidth: 80, sorter: "array", formatter: textCell((layer) => layer.flagged.join(", ")), responsive: 0 },
    { title: "Histogram", field: "histogram", visible: some("histogram"), width: 92, headerSort: false, formatter: textCell(histogramOf), responsive: 1 },
    { title: "RMS", ...byNumber("rms"), minWidth: 84, formatter: textCell((layer) => figure(layer.rms)), responsive: 0 },
    { title: "Minimum", ...byNumber("minimum"), minWidth: 96, formatter: textCell((layer) => figure(layer.minimum)), responsive: 1 },
    { title: "Maximum", ...byNumber("maximum"), minWidth: 96, formatter: textCell((layer) => figure(layer.maximum)), responsive: 1 },
    { title: "Not finite", ...byNumber("nonfinite"), visible: some("nonfinite"), minWidth: 100, formatter: textCell((layer) => whole(layer.nonfinite)), responsive: 1 },
    { title: "Zeros", ...byNumber("zeros"), visible: some("zeros"), minWidth: 88, formatter: textCell((layer) => (layer.zeros ? percent(layer.zeros / Math.max(layer.numel, 1)) : "0")), responsive: 2 },
    { title: "Type", field: "dtype", minWidth: 88, formatter: textCell((layer) => layer.dtype), responsive: 3 },
    { title: "Shape", field: "shape", minWidth: 136, sorter: (a, b, one, other) => one.getData().numel - other.getData().numel, formatter: textCell((layer) => layer.shape.replaceAll("x", " × ") || "scalar"), responsive: 3 },
  ];
  return withKeyboard(new Tabulator(box, {
    data: layers,
    index: "index",
    columns,
    layout: "fitColumns",
    responsiveLayout: "hide",
    columnDefaults: { headerSortTristate: false },
    maxHeight: 460,
    rowFormatter: (row) => row.getElement().classList.toggle("flagged", isBad(row.getData())),
  }));
}

/** Counters and masks are not drawn, as they would stretch the scale; quantised weights (`qint8`) are. */
const isDrawn = (layer) => layer.flagged.length > 0 || !/^(u?int|bool)/.test(layer.dtype);

/** The section of a file's weights; null if the page has none. `closers` gets the callbacks for when it is opened, closed or printed. */
function weightsSection(row, closers) {
  const layers = layersOf(row.id);
  const heading = el("h3", { id: "weights-title" }, "Weights");
  const section = el("section", { "aria-labelledby": "weights-title" }, heading);
  if (layers === null) {
    if (!row.tensors) return null;
    const left = "Left out, since the page would be too large with the weights of all files. To see them, run ckptfix check --report on this file only.";
    section.append(el("p", { className: "faint" }, run.left_out ? left : "Not read."));
    return section;
  }
  const flagged = layers.filter(isBad);
  const drawn = layers.filter(isDrawn);
  const rest = layers.length - drawn.length;
  section.append(
    el("p", {}, `${summaryOf(drawn)}.${rest ? ` ${counted(rest, "integer tensor")}, such as counters, ${rest === 1 ? "is" : "are"} only in the table.` : ""}${layers.some((layer) => layer.histogram) ? " Each histogram shows about 256 values of its layer, from the minimum to the maximum." : ""}`),
    el("ul", { className: "key", "aria-hidden": true },
      el("li", {}, el("span", { className: "dot" }), "RMS"),
      el("li", {}, el("span", { className: "stem" }), "up to the largest magnitude"),
      el("li", {}, el("span", { className: "dot hollow" }), "all zero"),
      el("li", {}, el("span", { className: "dot bad" }), "flagged"),
      el("li", {}, el("span", { className: "wedge" }), "not finite"),
    ),
  );
  const chartBox = el("div");
  const grid = el("div", { className: "grid" });
  const only = el("input", { type: "checkbox" });
  section.append(chartBox);
  if (flagged.length) section.append(el("p", { className: "tools" }, el("label", { className: "check" }, only, ` Show only the ${counted(flagged.length, "flagged layer")}`)));
  section.append(grid);
  // The table and the chart need the width that they get in the page.
  closers.opened.push(() => {
    const table = layersTable(grid, layers);
    only.addEventListener("change", () => {
      if (only.checked) table.setFilter(isBad);
      else table.clearFilter();
    });
    const close = weightsChart(chartBox, drawn, (layer) => {
      only.checked = false;
      table.clearFilter();
      table.deselectRow();
      table.scrollToRow(layer.index, "center", true).then(() => {
        const element = table.getRow(layer.index).getElement();
        element.classList.add("picked");
        setTimeout(() => element.classList.remove("picked"), 1600);
      }).catch(() => {});
    });
    closers.closed.push(() => { close(); table.destroy(); });
    closers.printed.push([grid, () => table]);
  });
  return section;
}
