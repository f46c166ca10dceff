// The data of the page: rows are parsed at once, details when a row is opened.

const parsed = (id) => {
  const element = document.getElementById(id);
  return element === null ? null : JSON.parse(element.textContent);
};

const run = parsed("run");

const rows = [];
for (let chunk = 0, part; (part = parsed(`rows-${chunk}`)) !== null; chunk += 1) {
  for (const values of part) {
    const row = { id: rows.length };
    run.columns.forEach((column, index) => { row[column] = values[index]; });
    row.searched = [row.name, row.output, ...row.codes].join("\n").toLowerCase();
    rows.push(row);
  }
}

/** The details of a row. A field that equals an earlier file's is taken from that file. */
function detailsOf(id) {
  const details = parsed(`file-${id}`);
  for (const [part, earlier] of Object.entries(details.same || {})) details[part] = parsed(`file-${earlier}`)[part];
  return details;
}

const LEVELS = ["note", "warning", "error"];
const isDry = run.dry_run || (rows.length === 1 && Boolean(detailsOf(0).dry_run));

/** The worst level among the findings of a code, for sorting and for its colour. */
const levelOf = (code) => run.levels[code] || "note";
const byLevel = (a, b) => LEVELS.indexOf(levelOf(b)) - LEVELS.indexOf(levelOf(a));
const codeOf = (label) => label.split(" ", 1)[0];

/** Outcomes with their tone and tooltip, those that need attention first. */
const OUTCOMES = [
  ["failed", "bad", "an error of the run, not of the file"],
  ["unreadable", "bad", "nothing could be read"],
  ["needs a decision", "attention", "a finding is left for you to decide"],
  ["partly untrained", "attention", "written; layers that the file lacks have the model's initial values"],
  ["can be repaired", "repaired", "can be repaired without a decision"],
  ["repaired", "repaired", "written, read back and compared"],
  ["accepted", "good", "you accepted the remaining findings"],
  ["already fine", "good", "nothing to repair"],
  ["other", "other", "not a checkpoint"],
];
const rank = (outcome) => {
  const index = OUTCOMES.findIndex(([known]) => known === outcome);
  return index === -1 ? OUTCOMES.length : index;
};
const tone = (outcome) => (OUTCOMES[rank(outcome)] || [null, "other"])[1];
const badge = (outcome) => el("span", { className: `badge ${tone(outcome)}` }, shown(outcome));

/** The layers of a file as objects, null if the page does not have them. */
function layersOf(id) {
  const figures = parsed(`weights-${id}`);
  if (figures === null) return null;
  const layout = parsed(`layout-${figures.layout}`);
  const sparse = (column) => figures[column] || {};
  return layout.key.map((key, index) => ({
    index,
    key,
    dtype: Array.isArray(layout.dtype) ? layout.dtype[index] : layout.dtype,
    shape: layout.shape[index],
    numel: layout.numel[index],
    rms: figures.rms[index],
    minimum: figures.minimum[index],
    maximum: figures.maximum[index],
    peak: Math.max(Math.abs(figures.minimum[index]), Math.abs(figures.maximum[index])),
    zeros: sparse("zeros")[index] || 0,
    nonfinite: sparse("nonfinite")[index] || 0,
    flagged: sparse("flagged")[index] || [],
    histogram: sparse("histogram")[index] || "",
  }));
}

/** Whether a layer is flagged: values that are not finite, or a finding above a note. */
const isBad = (layer) => layer.nonfinite > 0 || layer.flagged.some((code) => levelOf(code) !== LEVELS[0]);

// A file's address is its name, so that links still work when the page is built again.
const isWellFormed = (text) => !/\p{Cs}/u.test(text);
const addressOf = (row) => (isWellFormed(row.name) ? `#/${encodeURIComponent(row.name)}` : `#//${row.id}`);
const rowOfName = new Map(rows.map((row) => [row.name, row]));

/** The row that an address names; null for the overview and for unknown addresses. */
function rowAt(address) {
  if (address.startsWith("#//")) return rows[Number(address.slice(3))] || null;
  try {
    return rowOfName.get(decodeURIComponent(address.slice(2))) || null;
  } catch (error) {
    if (error instanceof URIError) return null;
    throw error;
  }
}
