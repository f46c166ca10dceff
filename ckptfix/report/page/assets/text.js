"use strict";
// Text, numbers and elements. Text is only ever inserted as text, never parsed as markup.

/** An element with properties, data-/aria- attributes and children; null children are left out. */
function el(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name in element && !name.includes("-")) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

/** Text with control characters, bidi marks and lone surrogates escaped, as ckptfix prints it in a terminal. */
function shown(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, (character) => {
    const code = character.codePointAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

/** An element with a name that may wrap after its separators. */
function name(text, properties) {
  const pieces = shown(text).split(/(?<=[./_-])/);
  return el("span", { className: "name", ...properties }, pieces.flatMap((piece) => [piece, el("wbr")]).slice(0, -1));
}

function scaled(number, units) {
  let unit = 0;
  while (Math.abs(number) >= 999.5 && unit < units.length - 1) {
    number /= 1000;
    unit += 1;
  }
  if (unit === 0) return `${number}${units[0]}`;
  return `${number.toFixed(number < 9.995 ? 2 : number < 99.95 ? 1 : 0)}${units[unit]}`;
}

const quantity = (number) => scaled(number, ["", " k", " M", " G", " T", " P"]);
const bytes = (number) => scaled(number, [" B", " kB", " MB", " GB", " TB", " PB"]);
const whole = (number) => number.toLocaleString("en-US");
const counted = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

function duration(seconds) {
  if (seconds < 1) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toPrecision(2) : Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

/** A share in per cent, 100 only for the whole and 0 only for nothing. */
function percent(share) {
  if (share >= 1) return "100 %";
  if (share <= 0) return "0 %";
  const hundredths = Math.min(Math.round(share * 10000), 9999);
  return hundredths === 0 ? "< 0.01 %" : `${hundredths / 100} %`;
}

/** A figure of a tensor in four significant digits. */
function figure(number) {
  if (number === null) return "–";
  if (number === 0) return "0";
  const size = Math.abs(number);
  return size >= 1e-3 && size < 1e5 ? String(Number(number.toPrecision(4))) : number.toExponential(3).replace("e+", "e");
}

/** Pairs of terms and values as the content of a dl. */
function facts(pairs) {
  return pairs
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([term, value]) => el("div", { className: String(value).length > 60 ? "wide" : "" }, el("dt", {}, shown(term)), el("dd", {}, value instanceof Node ? value : shown(value))));
}
