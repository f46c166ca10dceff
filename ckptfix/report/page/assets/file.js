// The page of one file: what was found, what was done, how much of it is proved, and its weights.

const foldedList = (lines) => el("ul", { className: "folded" }, lines.map((line) => el("li", {}, shown(line))));

const LEVELS = ["note", "warning", "error"];
const urgency = (finding) => LEVELS.indexOf(finding.level) + (finding.fixed ? 0 : LEVELS.length);

function findingCard(finding) {
  const state = finding.fixed ? ["fixed", "good"] : finding.fixable ? ["a repair fixes it", "repaired"] : null;
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
    finding.remedy && !finding.fixed ? el("p", { className: "remedy" }, el("strong", {}, "What to do: "), shown(finding.remedy)) : null,
  );
}

/** A command to copy. One with invisible signs in it is copied as it is shown: pasted, such signs could run things. */
function commandBox(command) {
  const text = shown(command);
  const button = el("button", { type: "button" }, "Copy");
  button.addEventListener("click", () => {
    const area = el("textarea", { value: text, readOnly: true, className: "offscreen", tabIndex: -1 });
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy"); // works in a page opened from a disk, where the newer API may not
    area.remove();
    button.focus();
    button.textContent = isCopied ? "Copied" : "Select it by hand";
  });
  return el("div", { className: "command" }, el("pre", { tabIndex: 0 }, el("code", {}, text)), button);
}

function editsSection(account) {
  if (!account.edits) return null;
  const items = [];
  for (const line of account.edits) {
    if (line.startsWith(" ") && items.length) items[items.length - 1].more.push(line.trim());
    else items.push({ line, more: [] });
  }
  const renames = account.renames || [];
  return el("section", { "aria-labelledby": "edits-title" },
    el("h3", { id: "edits-title" }, "Edits"),
    el("ul", { className: "edits" }, items.map(({ line, more }) => el("li", {}, shown(line), more.length ? foldedList(more) : null))),
    renames.length
      ? el("details", {},
          el("summary", {}, `Old and new names of ${counted(renames.length, "key")}`),
          el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Old and new names" },
            el("table", {},
              el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "old"), el("th", { scope: "col" }, "new"))),
              el("tbody", {}, renames.map(([old, to]) => el("tr", {}, el("td", {}, name(old)), el("td", {}, name(to))))),
            ),
          ),
        )
      : null,
  );
}

function coverageSection(coverage) {
  if (!coverage) return null;
  const share = coverage.share;
  const filled = Object.entries(coverage.filled || {});
  const buffers = coverage.buffers ? `; ${percent(coverage.buffers_from_file / coverage.buffers)} of its buffers` : "";
  return el("section", { "aria-labelledby": "coverage-title" },
    el("h3", { id: "coverage-title" }, "Coverage"),
    el("div", { className: "meter", role: "img", "aria-label": `${percent(share)} of the parameters came from the file` }, gauge(share, share >= 1 ? "good" : "attention")),
    el("p", {}, `${percent(share)} of the model's ${quantity(coverage.parameters)} parameters, by number of elements, came from the file${buffers}.`),
    filled.length ? el("ul", {}, filled.map(([origin, numel]) => el("li", {}, `${quantity(numel)} elements filled from ${shown(origin)}: not weights of this file`))) : null,
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

function fileFacts(row, account) {
  const versions = Object.entries(account.versions || {}).map(([word, value]) => `${word} ${value}`).join(", ");
  const hash = (text) => text && el("code", { className: "hash" }, shown(text));
  const pairs = [
    ["Format", row.format],
    ["Weights at", account.container === "." ? "" : account.container],
    ["Tensors", row.tensors === null ? "" : whole(row.tensors)],
    ["Parameters and buffers", row.numel === null ? "" : `${quantity(row.numel)} elements`],
    ["Size", row.size === null ? "" : bytes(row.size)],
    ["SHA-256", hash(account.sha256)],
    ["Target", account.target],
    ["Written to", row.output],
    ["Written as", (account.output_parts || []).length ? counted(account.output_parts.length, "file") : ""],
    ["Written size", account.output_size ? bytes(account.output_size) : ""],
    ["SHA-256 of what was written", hash(account.output_sha256)],
    ["Time", row.seconds ? duration(row.seconds) : ""],
    ["Memory", account.peak_memory ? bytes(account.peak_memory) : ""],
    ["Attempts", account.attempts > 1 ? whole(account.attempts) : ""],
    ["Finished", account.finished],
    ["Made with", versions],
  ];
  return el("section", { "aria-labelledby": "facts-title" }, el("h3", { id: "facts-title" }, "The file"), el("dl", { className: "facts" }, facts(pairs)));
}

/** Fills the element with the page of a row. `around` are the rows before and after it, null where there is none. */
function showFile(box, row, around, closers) {
  const account = accountOf(row.id);
  const findings = [...(account.findings || [])].sort((a, b) => urgency(b) - urgency(a));
  const way = (other, words, relation) => (other ? el("a", { href: addressOf(other), rel: relation }, words) : el("span", { className: "faint" }, words));
  const title = el("h2", { tabIndex: -1 }, name(row.name), " ", badge(row.outcome));
  const renamed = row.output && row.output !== row.name ? el("p", { className: "renamed" }, name(row.name), " → ", name(row.output)) : null;
  box.replaceChildren(
    ...[
      around ? el("nav", { "aria-label": "Files" }, el("a", { href: "#/" }, "← All files"), el("span", { className: "ways" }, way(around[0], "Previous", "prev"), way(around[1], "Next", "next"))) : null,
      title,
      renamed,
      account.error ? el("p", { className: "notice bad", role: "alert" }, shown(account.error)) : null,
      account.command
        ? el("section", { "aria-labelledby": "command-title" }, el("h3", { id: "command-title" }, row.outcome === "can be repaired" ? "The command that repairs it" : "The command that carries it out"), commandBox(account.command))
        : null,
      account.error && !findings.length
        ? null
        : el("section", { "aria-labelledby": "findings-title" },
            el("h3", { id: "findings-title" }, "Findings"),
            findings.length ? findings.map(findingCard) : el("p", { className: "faint" }, "None."),
            account.obstacles ? [el("p", {}, "A strict load would still fail on:"), foldedList(account.obstacles)] : null,
          ),
      editsSection(account),
      coverageSection(account.coverage),
      smokeSection(account.smoke),
      weightsSection(row, closers),
      account.remarks ? el("section", { "aria-labelledby": "remarks-title" }, el("h3", { id: "remarks-title" }, "Notes"), el("ul", {}, account.remarks.map((remark) => el("li", {}, shown(remark))))) : null,
      fileFacts(row, account),
    ].filter(Boolean),
  );
  closers.opened.splice(0).forEach((open) => open());
  return title;
}
