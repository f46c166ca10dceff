// The page of one file: findings, edits, coverage, the forward test, weights and facts.

const DRY = "This was a dry run: nothing was written. Repaired and fixed stand for what a real run would do.";
const foldedList = (lines) => el("ul", { className: "folded" }, lines.map((line) => el("li", {}, shown(line))));

const urgency = (finding) => LEVELS.indexOf(finding.level) + (finding.fixed || finding.accepted ? 0 : LEVELS.length);

function findingCard(finding, isRefused) {
  const state = finding.fixed ? ["fixed", "good"] : finding.accepted ? ["accepted", "good"] : finding.fixable ? [isDry || isRefused ? "would be fixed" : "a repair fixes it", "repaired"] : null;
  const keys = finding.keys || [];
  return el("article", { className: `card ${finding.level}` },
    el("h4", {},
      el("span", { className: `level ${finding.level}` }, finding.level), " ",
      el("span", { className: "code" }, shown(finding.code)), " ", shown(finding.name),
      state ? [" ", el("span", { className: `badge ${state[1]}` }, state[0])] : null,
    ),
    el("p", {}, shown(finding.message)),
    keys.length ? el("details", { open: keys.length <= 6 }, el("summary", {}, counted(finding.count, "key")), foldedList(keys)) : null,
    finding.evidence ? el("details", {}, el("summary", {}, "Evidence"), foldedList(finding.evidence)) : null,
    finding.remedy && !finding.fixed && !finding.accepted ? el("p", { className: "remedy" }, el("strong", {}, "What to do: "), shown(finding.remedy)) : null,
    run.manuals[finding.code] ? el("details", {}, el("summary", {}, `What ${shown(finding.code)} means`), el("pre", { className: "manual", tabIndex: 0 }, run.manuals[finding.code])) : null,
  );
}

/** Commands to copy. Invisible characters are copied escaped, as shown: when pasted, they could run something. */
function commandBox(...commands) {
  const text = commands.map(shown).join("\n");
  const button = el("button", { type: "button" }, "Copy");
  button.addEventListener("click", () => {
    const area = el("textarea", { value: text, readOnly: true, className: "offscreen", tabIndex: -1 });
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy"); // works for file:// pages, where the newer API may not
    area.remove();
    button.focus();
    button.textContent = isCopied ? "Copied" : "Select it by hand";
  });
  return el("div", { className: "command" }, el("pre", { tabIndex: 0 }, el("code", {}, text)), button);
}

/** A name with those segments marked that differ from the other name. */
function compared(text, other, tag) {
  const [own, theirs] = [text.split("."), other.split(".")];
  let start = 0;
  while (start < Math.min(own.length, theirs.length) && own[start] === theirs[start]) start += 1;
  let end = 0;
  while (end < Math.min(own.length, theirs.length) - start && own[own.length - 1 - end] === theirs[theirs.length - 1 - end]) end += 1;
  const piece = (from, to) => own.slice(from, to).join(".");
  const [before, changed, after] = [piece(0, start), piece(start, own.length - end), piece(own.length - end)];
  return [before && [name(before), changed || after ? "." : ""], changed && el(tag, {}, name(changed)), changed && after ? "." : "", after && name(after)];
}

/** The possible decisions on a file, each with its command. */
function decisionsSection(row, details) {
  const ways = details.decisions || (details.command ? [{ text: "", command: details.command }] : []);
  if (!ways.length) return null;
  const title = row.outcome === "can be repaired" ? "The command that repairs it" : ways.length > 1 ? "Decisions, the recommended one first" : "Decision needed";
  return el("section", { "aria-labelledby": "command-title" }, el("h3", { id: "command-title" }, title),
    ways.map((way) => [way.text ? el("p", {}, shown(way.text)) : null, way.command ? commandBox(way.command) : null, way.price ? el("p", { className: "price" }, shown(way.price)) : null]));
}

function editsSection(details) {
  if (!details.edits) return null;
  const items = [];
  for (const line of details.edits) {
    if (line.startsWith(" ") && items.length) items[items.length - 1].more.push(line.trim());
    else items.push({ line, more: [] });
  }
  const renames = details.renames || [];
  return el("section", { "aria-labelledby": "edits-title" },
    el("h3", { id: "edits-title" }, isDry || details.refused ? "Edits that would be made" : "Edits"),
    el("ul", { className: "edits" }, items.map(({ line, more }) => el("li", {}, shown(line), more.length ? foldedList(more) : null))),
    renames.length
      ? el("details", {},
          el("summary", {}, `Old and new names of ${counted(renames.length, "key")}`),
          el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Old and new names" },
            el("table", {},
              el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "old"), el("th", { scope: "col" }, "new"))),
              el("tbody", {}, renames.map(([old, to]) => el("tr", {}, el("td", {}, compared(old, to, "del")), el("td", {}, compared(to, old, "ins"))))),
            ),
          ),
        )
      : null,
  );
}

function coverageSection({ coverage, refused }) {
  if (!coverage) return null;
  const share = coverage.share;
  const came = isDry || refused ? "would come" : "came";
  const parts = [
    ...Object.entries(coverage.adapted || {}).map(([recipe, numel]) => `${quantity(numel)} elements adapted by ${shown(recipe)}: computed from the file's`),
    ...Object.entries(coverage.filled || {}).map(([origin, numel]) => `${quantity(numel)} elements filled from ${shown(origin)}: not weights of this file`),
  ];
  const buffers = coverage.buffers ? `; ${percent(coverage.buffers_from_file / coverage.buffers)} of its buffers` : "";
  return el("section", { "aria-labelledby": "coverage-title" },
    el("h3", { id: "coverage-title" }, "Coverage"),
    el("div", { className: "meter", role: "img", "aria-label": `${percent(share)} of the parameters ${came} from the file` }, gauge(share, share >= 1 ? "good" : "attention")),
    el("p", {}, `${percent(share)} of the model's ${quantity(coverage.parameters)} parameters, by number of elements, ${came} from the file${buffers}.`),
    parts.length ? el("ul", {}, parts.map((text) => el("li", {}, text))) : null,
  );
}

function gauge(share, kind) {
  const bar = el("span", { className: kind });
  bar.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return bar;
}

function smokeSection(smoke) {
  if (!smoke) return null;
  const verdict = smoke.passed === null || smoke.passed === undefined ? ["no verdict", "other"] : smoke.passed ? ["passed", "good"] : ["failed", "bad"];
  const sides = [smoke.inputs, smoke.outputs].filter((side) => side && side.length).map((side) => side.join(", "));
  return el("section", { "aria-labelledby": "smoke-title" },
    el("h3", { id: "smoke-title" }, "Forward test ", el("span", { className: `badge ${verdict[1]}` }, verdict[0])),
    el("p", {}, [smoke.device && `on ${shown(smoke.device)}`, smoke.note && shown(smoke.note), smoke.seconds && duration(smoke.seconds)].filter(Boolean).join(", ")),
    sides.length ? el("p", { className: "mono" }, shown(sides.join(" → "))) : null,
    smoke.checks && smoke.checks.length ? el("ul", {}, smoke.checks.map((check) => el("li", {}, shown(check)))) : null,
  );
}

function fileFacts(row, details) {
  const versions = Object.entries(details.versions || {}).map(([library, version]) => `${library} ${version}`).join(", ");
  const hash = (text) => text && el("code", { className: "hash" }, shown(text));
  const pairs = [
    ["Format", row.format],
    ["Weights at", details.container === "." ? "" : details.container],
    ["Tensors", row.tensors === null ? "" : whole(row.tensors)],
    ["Parameters and buffers", row.numel === null ? "" : `${quantity(row.numel)} elements`],
    ["Size", row.size === null ? "" : bytes(row.size)],
    ["SHA-256", hash(details.sha256)],
    ["Target", details.target],
    ["Written to", row.output],
    ["Written as", (details.output_parts || []).length ? counted(details.output_parts.length, "file") : ""],
    ["Written size", details.output_size ? bytes(details.output_size) : ""],
    ["SHA-256 of the written file", hash(details.output_sha256)],
    ["Time", row.seconds ? duration(row.seconds) : ""],
    ["Memory", details.peak_memory ? bytes(details.peak_memory) : ""],
    ["Attempts", details.attempts > 1 ? whole(details.attempts) : ""],
    ["Finished", details.finished],
    ["Made with", versions],
  ];
  return el("section", { "aria-labelledby": "facts-title" }, el("h3", { id: "facts-title" }, "The file"), el("dl", { className: "facts" }, facts(pairs)));
}

/** Fills the element with the page of a row. `around` are the rows before and after it, null if there is none. */
function showFile(box, row, around, closers) {
  const details = detailsOf(row.id);
  const findings = [...(details.findings || [])].sort((a, b) => urgency(b) - urgency(a));
  const way = (other, words, relation) => (other ? el("a", { href: addressOf(other), rel: relation }, words) : el("span", { className: "faint" }, words));
  const title = el("h2", { tabIndex: -1 }, name(row.name), " ", badge(row.outcome));
  const renamed = row.output && row.output !== row.name ? el("p", { className: "renamed" }, name(row.name), " → ", name(row.output)) : null;
  box.replaceChildren(
    ...[
      around ? el("nav", { "aria-label": "Files" }, el("a", { href: "#/" }, "← All files"), el("span", { className: "ways" }, way(around[0], "Previous", "prev"), way(around[1], "Next", "next"))) : null,
      title,
      renamed,
      details.looks_like ? el("p", {}, `Looks like: ${shown(details.looks_like.text)}`) : null,
      details.looks_like && details.looks_like.commands.length ? commandBox(...details.looks_like.commands) : null,
      details.error ? el("p", { className: "notice bad", role: "alert" }, shown(details.error)) : null,
      isDry ? el("p", { className: "notice" }, DRY) : null,
      decisionsSection(row, details),
      details.error && !findings.length
        ? null
        : el("section", { "aria-labelledby": "findings-title" },
            el("h3", { id: "findings-title" }, "Findings"),
            findings.length ? findings.map((finding) => findingCard(finding, details.refused)) : el("p", { className: "faint" }, "None."),
            details.obstacles ? [el("p", {}, "A strict load would still fail on:"), foldedList(details.obstacles)] : null,
          ),
      editsSection(details),
      coverageSection(details),
      smokeSection(details.smoke),
      weightsSection(row, closers),
      details.remarks ? el("section", { "aria-labelledby": "remarks-title" }, el("h3", { id: "remarks-title" }, "Notes"), el("ul", {}, details.remarks.map((remark) => el("li", {}, shown(remark))))) : null,
      fileFacts(row, details),
    ].filter(Boolean),
  );
  closers.opened.splice(0).forEach((open) => open());
  return title;
}
